"""mpsagent-tell@.service: a line on the terminal or in the job's output of a waiting user, by a unit of that user."""

from __future__ import annotations

import threading

from tests.booted.machine import Machine
from tests.booted.service import CLIENT, api, enough, until, until_it_computes

HOLDER, WAITER, STRANGER = "2001", "2002", "300001"
ON_A_TERMINAL = "import pty, sys; pty.spawn(sys.argv[1:])"


def lines_tried(node: Machine) -> list[object]:
    events = api(node, "/v1/events?cursor=0&limit=1000")["events"]
    return [one for one in events if one["kind"] in ("action.done", "action.failed") and one["action"] == "Tell"]


def test_who_waits_is_told_on_the_terminal_and_who_has_none_is_not(running: Machine) -> None:
    running.write(
        "/etc/mpsagent/policy.d/terminal.toml", '[limits]\nnotify_terminal = true\n[turn]\ntime_limit = "1h"\n'
    )
    running.run("mpsagent-cli", "reload")
    holder = running.start(CLIENT, "sleep", "600", user=HOLDER)
    until_it_computes(holder)
    waiter = running.start("/usr/bin/python3", "-c", ON_A_TERMINAL, CLIENT, "sleep", "600", user=WAITER)
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(iter(lambda: waiter.stdout.read(1), "")))  # type: ignore[union-attr]
    reader.start()
    until("it waits, before the others", lambda: api(running, "/v1/status")["waiting"])
    for user in (WAITER, STRANGER):
        running.start(CLIENT, "sleep", "600", user=user)
    until("the waiting user is told", lambda: "waits for the GPU: it is the turn of" in "".join(said))
    until("nobody else is", lambda: len(lines_tried(running)) == 3)
    failed = running.systemctl("list-units", "--failed", "--plain", "--no-legend", "mpsagent-tell@*")
    assert failed == "", "a process without a terminal, or without an account, is no failure of the node"
    enough(running, HOLDER)
    until("and that the wait is over", lambda: "has the GPU now, after" in "".join(said))
    enough(running, WAITER)
    waiter.wait(60)
    reader.join(60)
    assert running.show(f"mpsagent-tell@{WAITER}.service", "User", "Result") == {"User": WAITER, "Result": "success"}
    until("no words are left", lambda: running.run("ls", "-A", "/run/mpsagent/tell").stdout == "")


IN_A_JOB = """
for top in /sys/fs/cgroup/freezer /sys/fs/cgroup/unified /sys/fs/cgroup; do [ ! -e $top/cgroup.procs ] || break; done
mkdir -p $top/slurm/uid_$1/job_17
echo $$ >$top/slurm/uid_$1/job_17/cgroup.procs
uid=$1 out=$2
shift 2
exec setpriv --reuid=$uid --regid=$uid --clear-groups sh -c 'out=$1; shift; exec "$@" 2>>"$out"' sh "$out" "$@"
"""
"""A user's program in the cgroup of a job of Slurm, with a file as its standard error."""


def test_a_job_has_its_line_in_the_users_file_whatever_the_unit_may_see(running: Machine) -> None:
    """The unit sees no home and no temporary directory but its own, and the file of the process is open there."""
    running.write("/etc/mpsagent/policy.d/terminal.toml", '[turn]\ntime_limit = "1h"\n')
    running.run("mpsagent-cli", "reload")
    holder = running.start(CLIENT, "sleep", "600", user=HOLDER)
    until_it_computes(holder)
    running.run("mkdir", "-p", "-m", "755", "/home/waiter")
    running.run("chown", WAITER, "/home/waiter")
    for out in ("/home/waiter/slurm-17.out", "/tmp/slurm-17.out"):
        running.start("/bin/sh", "-ec", IN_A_JOB, "sh", WAITER, out, CLIENT, "sleep", "600")

        def said(out: str = out) -> str:
            return running.run("cat", out, check=False).stdout

        until(f"{out} has the line", lambda: "waits for the GPU: it is the turn of" in said())
    failed = running.systemctl("list-units", "--failed", "--plain", "--no-legend", "mpsagent-tell@*")
    assert failed == ""
    enough(running, HOLDER)
    enough(running, WAITER)
