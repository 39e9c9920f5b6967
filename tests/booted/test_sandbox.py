"""The sandboxes of agent and gate, tried from inside: what each has to do is allowed, and what it must not do is not.

The probe runs as the service itself, with only its program replaced, so that a directive that is one too many shows
here and not at three in the morning.
"""

from __future__ import annotations

import json
import signal

import pytest

from tests.booted.gate import CONTROL, GATE, HIDDEN, start_daemon, start_gate
from tests.booted.machine import Machine
from tests.booted.service import (
    ALICE,
    BOB,
    CLIENT,
    agent_pid,
    api,
    assert_served_exactly,
    enable,
    ready,
    until,
    until_it_computes,
)  # fmt: skip

START = r"""
import array, ctypes, errno, json, os, platform, signal, socket, sqlite3, struct, subprocess, sys, threading

sys.path.insert(0, "/usr/lib/mpsagent/lib/python%d.%d" % sys.version_info[:2])
other, daemon, results_in = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
results = {}


def attempt(name):
    def run(function):
        try:
            function()
            results[name] = "done"
        except BaseException as error:
            results[name] = "%s: %s" % (type(error).__name__, error)
    return run

@attempt("FORBIDDEN: reach the network")
def _():
    socket.socket(socket.AF_INET)

@attempt("FORBIDDEN: change the system")
def _():
    open("/usr/bin/probe", "w")

@attempt("FORBIDDEN: change the policy")
def _():
    open("/etc/passwd", "a")

@attempt("FORBIDDEN: look into homes")
def _():
    assert os.listdir("/root"), "empty"

@attempt("FORBIDDEN: become another user")
def _():
    os.setuid(2001)

@attempt("FORBIDDEN: give files away")
def _():
    os.chown("/run/mpsagent/probe", 2001, 2001)

@attempt("FORBIDDEN: make a device")
def _():
    os.mknod("/run/mpsagent/null", 0o600 | 0o020000, os.makedev(1, 3))

@attempt("FORBIDDEN: mount")
def _():
    failed = ctypes.CDLL(None, use_errno=True).mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None)
    assert not failed, os.strerror(ctypes.get_errno())

@attempt("FORBIDDEN: put something into the public directory")
def _():
    open("/tmp/nvidia-mps/probe", "w")

# Number on x86_64 and aarch64, and arguments with which the kernel itself would say something else than EPERM.
CALLS = {
    "ptrace": (101, 117, 0, 0, 0, 0), "bpf": (321, 280, 9999, 0, 0), "perf_event_open": (298, 241, 0, 0, -1, -1, 0),
    "io_uring_setup": (425, 425, 0, 0), "keyctl": (250, 219, 0, -3, 0), "userfaultfd": (323, 282, 0xFFFF),
    "process_vm_writev": (311, 271, os.getpid(), 0, 0, 0, 0, 0), "init_module": (105, 105, 0, 0, 0),
    "open_tree": (428, 428, -1, 0, 0), "memfd_create": (319, 279, b"probe", 0), "shmget": (29, 194, 0, 4096, 0o600),
    "setpriority": (141, 140, 0, 0, 19), "setns": (308, 268, -1, 0), "name_to_handle_at": (303, 264, -1, b"", 0, 0, 0),
}

def refused(*names):
    for name in names:
        def call():
            number = CALLS[name][platform.machine() == "aarch64"]
            failed = ctypes.CDLL(None, use_errno=True).syscall(number, *CALLS[name][2:]) == -1
            assert not failed or ctypes.get_errno() != errno.EPERM, "refused"
        attempt("FORBIDDEN: call " + name)(call)

refused("ptrace", "bpf", "perf_event_open", "io_uring_setup", "keyctl", "userfaultfd", "process_vm_writev",
        "init_module", "open_tree")
"""

END = r"""
with open(results_in + "/results.json", "w") as file:
    json.dump(results, file)
"""

AGENT = r"""
@attempt("write where its files are")
def _():
    for place in ("/run/mpsagent", "/var/lib/mpsagent", "/var/log/nvidia-mps"):
        with open(place + "/probe", "w") as file:
            file.write("x")

@attempt("make the hidden directory, and look what is in the public one's way")
def _():
    from mpsagent.system import directories
    where = directories.directories("probe", "/tmp/nvidia-mps", "/var/log/nvidia-mps")
    directories.prepare_hidden(where)
    directories.prepare_log(where.log)
    assert directories.refusal(where.public) is None
    assert "control" in os.listdir(where.public)

@attempt("prove what a daemon is, and which directory it serves")
def _():
    open("/proc/%d/environ" % daemon, "rb").read()
    open("/proc/%d/cmdline" % daemon, "rb").read()
    os.stat("/proc/%d/root/run" % daemon)
    os.stat("/proc/1/ns/mnt")

@attempt("end another user's process by its pidfd")
def _():
    fd = os.pidfd_open(other)
    signal.pidfd_send_signal(fd, signal.SIGTERM)

@attempt("run the front-end")
def _():
    done = subprocess.run(["nvidia-cuda-mps-control"], input=b"get_server_list\n", capture_output=True, timeout=10,
                          env={"CUDA_MPS_PIPE_DIRECTORY": HIDDEN, "PATH": "/usr/bin"})
    assert done.returncode == 0, done.stderr

@attempt("speak to the gate")
def _():
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect("/run/mpsagent/gate.sock")
    assert b"hello" in sock.recv(4096)

@attempt("watch files")
def _():
    from asyncinotify import Inotify, Mask
    with Inotify() as watch:
        watch.add_watch("/var/log/nvidia-mps", Mask.CREATE)

@attempt("lower a helper's priority")
def _():
    os.setpriority(os.PRIO_PROCESS, 0, 0)

@attempt("start a unit over D-Bus")
def _():
    from pystemd.systemd1 import Manager
    with Manager() as manager:
        manager.Manager.StartUnit(b"probe-target.target", b"replace")

@attempt("call through ctypes")
def _():
    assert ctypes.CDLL(None).getpid() == os.getpid()
"""

GATE_PROBE = r"""
refused("memfd_create", "shmget", "setpriority", "setns", "name_to_handle_at")

def notify(text, *descriptors):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(os.environ["NOTIFY_SOCKET"])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        sock.sendmsg([text], rights)

@attempt("keep its signals to itself")
def _():
    from mpsagent.gate import own_signals
    assert own_signals.keep() == ""

@attempt("have both public sockets by name")
def _():
    names = sorted(os.environ["LISTEN_FDNAMES"].split(":"))
    assert names == ["control", "control_privileged"], names

def pass_on(pid):
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    two.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    said = struct.pack("3i", pid, 2001, 2001)
    one.sendmsg([b"x"], [(socket.SOL_SOCKET, 2, said)])
    assert two.recvmsg(1, 64)[1][0][2] == said

@attempt("pass on another user's credentials")
def _():
    pass_on(os.getpid())

@attempt("FORBIDDEN: pass for another process")
def _():
    pass_on(other)

@attempt("know the process: pidfd, start time, name, cgroup")
def _():
    os.close(os.pidfd_open(other))
    for name in ("stat", "comm", "cgroup"):
        assert open("/proc/%d/%s" % (other, name)).read()

@attempt("reach the hidden daemon")
def _():
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(HIDDEN + "/control_privileged")
    assert sock.recv(64) == b"OUTBHELL\0"

@attempt("keep its state and its link")
def _():
    open("/run/mpsagent/probe", "w").write("x")
    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).bind("/run/mpsagent/probe.sock")

@attempt("put a descriptor into the store")
def _():
    notify(b"FDSTORE=1\nFDNAME=probe", os.pidfd_open(other))

@attempt("FORBIDDEN: read what root alone may read")
def _():
    assert open("/etc/shadow").read()

@attempt("FORBIDDEN: have systemd start a unit")
def _():
    subprocess.run(["systemctl", "start", "probe-target.target"], check=True, capture_output=True)

@attempt("FORBIDDEN: have systemd run a program with all of root's rights")
def _():
    subprocess.run(["systemd-run", "--wait", "true"], check=True, capture_output=True)

@attempt("FORBIDDEN: signal another user's process")
def _():
    signal.pidfd_send_signal(os.pidfd_open(other), signal.SIGCONT)

@attempt("FORBIDDEN: look into root's records and everybody's files")
def _():
    assert os.listdir("/var") + os.listdir("/tmp"), "empty"

@attempt("FORBIDDEN: signal root's process")
def _():
    os.kill(daemon, 0)

@attempt("FORBIDDEN: make root's process the first to end when memory is short")
def _():
    open("/proc/%d/oom_score_adj" % daemon, "w").write("1000")

@attempt("FORBIDDEN: signal any process as the owner of a file")
def _():
    import fcntl
    fcntl.fcntl(socket.socket(socket.AF_UNIX), fcntl.F_SETOWN, other)

@attempt("FORBIDDEN: limit root's process")
def _():
    import resource
    resource.prlimit(daemon, resource.RLIMIT_CPU, (1, 1))

@attempt("FORBIDDEN: read another user's environment")
def _():
    open("/proc/%d/environ" % other, "rb").read()

@attempt("FORBIDDEN: see devices")
def _():
    open("/dev/zero-of-the-machine", "rb")
"""


API_PROBE = r"""
refused("memfd_create", "shmget", "setpriority", "setns", "name_to_handle_at")

@attempt("keep the history")
def _():
    base = sqlite3.connect("/var/lib/mpsagent-api/probe.db")
    base.execute("PRAGMA journal_mode=WAL")
    base.execute("CREATE TABLE one (x)")
    base.executemany("INSERT INTO one VALUES (?)", [(number,) for number in range(20000)])
    base.commit()
    base.execute("VACUUM")
    assert base.execute("SELECT count(*) FROM one GROUP BY x % 1").fetchone() == (20000,)

@attempt("have both sockets, threads and names of users")
def _():
    import pwd
    assert sorted(os.environ["LISTEN_FDNAMES"].split(":")) == ["api", "pages"]
    found = []
    thread = threading.Thread(target=lambda: found.append(pwd.getpwuid(0).pw_name))
    thread.start()
    thread.join()
    assert found == ["root"]

@attempt("FORBIDDEN: see other users' processes")
def _():
    open("/proc/%d/stat" % other).read()

@attempt("FORBIDDEN: signal another user's process")
def _():
    os.kill(other, 0)

@attempt("FORBIDDEN: give orders to the gate")
def _():
    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect("/run/mpsagent/gate.sock")

@attempt("FORBIDDEN: see devices")
def _():
    open("/dev/zero-of-the-machine", "rb")
"""


def probed(node: Machine, unit: str, probe: str, place: str) -> dict[str, str]:
    """What came of each attempt, made by the unit itself with only its program replaced."""
    start_gate(node)
    start_daemon(node)
    daemon = node.show(CONTROL, "MainPID")["MainPID"]
    # Inside its own pid namespace the other user's process has another number than out here.
    other = node.run("sh", "-c", "setpriv --reuid 2001 --regid 2001 --clear-groups sleep 600 >/dev/null 2>&1 & echo $!")
    node.write("/etc/systemd/system/probe-target.target", "[Unit]\nDescription=Probe\n")
    node.write("/opt/probe.py", f'HIDDEN = "{HIDDEN}"\n{START}{probe}{END}')
    node.write(
        f"/etc/systemd/system/{unit}.d/probe.conf",
        "[Service]\nType=oneshot\nRestart=no\nWatchdogSec=0\nExecStartPre=\nExecStartPost=\nExecStart=\n"
        f"ExecStart=/usr/bin/python3 -I /opt/probe.py {other.stdout.strip()} {daemon} {place}\n",
    )
    node.systemctl("daemon-reload")
    if unit == GATE:
        node.systemctl("stop", GATE)
    node.systemctl("start", unit)
    found: dict[str, str] = json.loads(node.path(f"{place}/results.json").read_text())
    return found


@pytest.mark.parametrize(
    ("unit", "probe", "place"),
    [
        ("mpsagent.service", AGENT, "/run/mpsagent"),
        (GATE, GATE_PROBE, "/run/mpsagent"),
        ("mpsagent-api.service", API_PROBE, "/var/lib/mpsagent-api"),
    ],
    ids=["agent", "gate", "api"],
)
def test_the_sandbox_lets_it_work_and_nothing_else(node: Machine, unit: str, probe: str, place: str) -> None:
    """One machine for both directions: booting one for each attempt would take a minute."""
    results = probed(node, unit, probe, place)
    wanted = {name: said for name, said in results.items() if not name.startswith("FORBIDDEN")}
    unwanted = {name: said for name, said in results.items() if name.startswith("FORBIDDEN")}
    assert set(wanted.values()) == {"done"}, json.dumps(wanted, indent=2)
    assert "done" not in unwanted.values(), json.dumps(unwanted, indent=2)
    assert len(unwanted) >= 17
    if unit == GATE:
        kept = len(node.show(GATE, "FileDescriptorStorePreserve"))  # of a unit that has stopped: from systemd 254 on
        assert node.show(GATE, "NFileDescriptorStore")["NFileDescriptorStore"] == str(kept)
    elif unit == "mpsagent.service":
        assert node.systemctl("is-active", "probe-target.target") == "active"


UNITS = ("mpsagent.service", GATE, "mpsagent-api.service")
SHORT_TURNS = """
[turn]
time_limit = "0.2s"
grace = "0.2s"
[timeouts]
fault_recovery = "1s"
sigkill_delay = "0.5s"
"""
PAUSING = '[instance.default]\nserver_scope = "all"\n[turn]\non_expiry = "pause"\npause_slice = "1s"\n'


def deadly(node: Machine) -> None:
    """A call that is not in a unit's list ends its process from now on."""
    for unit in UNITS:
        node.write(f"/etc/systemd/system/{unit}.d/deadly.conf", "[Service]\nSystemCallErrorNumber=kill\n")


def count(node: Machine, kind: str) -> int:
    """Records of a kind."""
    return sum(one["kind"] == kind for one in api(node, "/v1/events?cursor=0&limit=1000")["events"])


def a_day(node: Machine) -> None:
    """Turns that end by force, a fault, a paused user, deaths of all three, reloads, readers, orders, front-ends."""
    node.write("/etc/mpsagent/policy.d/20-short.toml", SHORT_TURNS)
    node.systemctl("reload", "mpsagent.service")
    deaf = node.start(CLIENT, "sleep", "600", "--ignore-term", user=ALICE)
    until_it_computes(deaf)
    assert_served_exactly(node, BOB)
    assert deaf.wait(60)
    deaf.communicate()
    for unit in UNITS:
        before = node.show(unit, "MainPID")["MainPID"]
        node.systemctl("kill", "--signal=KILL", "--kill-whom=main", unit)
        until(
            f"{unit} is back",
            lambda unit=unit, before=before: node.show(unit, "MainPID")["MainPID"] not in ("0", before),
        )  # type: ignore[misc]
    until("ready for users", lambda: ready(node))
    careless = node.start(CLIENT, "mind", "600", "1", user=ALICE)
    until_it_computes(careless)
    node.run(CLIENT, "oob", "0", user=ALICE, check=False)
    assert_served_exactly(node, BOB)
    careless.communicate(timeout=60)
    node.write(
        "/etc/mpsagent/policy.d/20-short.toml",
        '[instance.default]\nserver_scope = "all"\n[turn]\non_expiry = "pause"\npause_slice = "1s"\n',
    )
    node.systemctl("reload", "mpsagent.service")
    before = count(node, "client.ended")
    paused = [node.start(CLIENT, "sleep", "4", user=user) for user in (ALICE, BOB)]
    until("both have ended", lambda: count(node, "client.ended") == before + 2)
    assert count(node, "user.paused")
    for one in paused:
        one.send_signal(signal.SIGCONT)  # nsenter stops with what it has started
        assert one.wait(60) == 0, one.communicate()
        one.communicate()
    for words in ("status", "queue", "clients", "events", "report", "timeline", "doctor", "metrics", "drain", "resume"):
        node.run("mpsagent-cli", words, user=None if words in ("drain", "resume") else ALICE, check=False)
    for user in (None, ALICE):
        node.run("nvidia-cuda-mps-control", text="get_server_list\n", user=user, check=False)
    kill = "systemctl", "kill", "--signal=KILL", CONTROL
    until(
        "the next control daemon runs, after the drain, and is killed",
        lambda: not node.run(*kill, check=False).returncode,
    )
    assert_served_exactly(node, ALICE)
    assert [node.show(unit, "NRestarts") for unit in UNITS] == [{"NRestarts": "1"}] * 3
    node.systemctl("restart", *UNITS)
    until("ready for users", lambda: ready(node))


def test_no_call_that_it_makes_is_missing_in_its_list(node: Machine) -> None:
    """Where a call is refused a process goes on, and what it wanted is missing somewhere; here it ends it."""
    deadly(node)
    enable(node)
    agent = agent_pid(node)
    a_day(node)
    assert agent_pid(node) != agent
    assert api(node, "/v1/status")["agent"]
