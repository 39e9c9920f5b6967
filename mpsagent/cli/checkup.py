"""Looks at the machine for what goes wrong in practice, and says how to mend it. Changes nothing.

Each check is a function that gives its findings, and stands alone: what one may not read is no finding of another.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from mpsagent.linux.proc import namespace
from mpsagent.mps.rendezvous import HELLO
from mpsagent.system import directories
from mpsagent.system.control_search import environment
from mpsagent.system.prepare import entry_problem

OK, NOTE, WARNING, PROBLEM = "ok", "note", "warning", "problem"
SHOWN = 5
GREETING = 2.0
"""Seconds for the gate to greet."""
LONGEST = 256 << 10
"""Bytes read of a file of /proc or /etc."""
PIPE = "CUDA_MPS_PIPE_DIRECTORY"
_VERSION = re.compile(r"\b(\d{3,4}\.\d{1,4}(?:\.\d{1,4})?)\b", re.ASCII)
_SETTING = re.compile(rf"{PIPE}[= ]\s*[\"']?(/[^\"'\s$#;]+)")
_LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib")
_UNITS = ("etc/systemd/system", "run/systemd/system", "usr/local/lib/systemd/system")
_UNSYNCHRONISED = 5


class Finding(NamedTuple):
    """``grade``: ``ok``, ``note``, ``warning`` (it can hurt) or ``problem`` (it does); ``do``: how to mend it."""

    grade: str
    topic: str
    what: str
    do: str = ""


def programs(control: str) -> Iterator[Finding]:
    """What has to be installed. ``control``: the policy's ``control_daemon_path``."""
    topic = "programs"
    found = shutil.which(control)
    if found is None:
        yield Finding(PROBLEM, topic, f"{control} is not installed", "install the driver's MPS (nvidia-cuda-mps)")
        return
    server = "nvidia-cuda-mps-server"
    if shutil.which(server) is None and not Path(found).with_name(server).exists():
        yield Finding(PROBLEM, topic, f"{server} is not installed", "install the driver's MPS (nvidia-cuda-mps)")
    else:
        yield Finding(OK, topic, f"{found} and its server")


def command_in_force(shown: str, command: str) -> Iterator[Finding]:
    """Compare the command of mpsagent.service with that of the running agent. ``shown``: the properties ExecStart and
    NeedDaemonReload as systemctl prints them; ``command``: the running agent's words, empty if it is not known."""
    found = re.search(r"^ExecStart=\{ .*?argv\[\]=(.*?) ; ", shown, re.MULTILINE)
    reload = "NeedDaemonReload=yes" in shown
    wanted = found[1] if found and "$" not in found[1] else ""
    if command and (reload or (wanted and not command.endswith(wanted))):
        what = "mpsagent.service was changed under the running agent, which keeps its old command"
        do = f"{'systemctl daemon-reload && ' if reload else ''}systemctl restart mpsagent"
        yield Finding(WARNING, "units", what, do)


def agents_command() -> Iterator[Finding]:
    """Look whether the running agent is what its unit says."""
    words = ("systemctl", "show", "mpsagent.service", "--property=ExecStart,MainPID,NeedDaemonReload")
    if shutil.which(words[0]) is None:
        return
    shown = subprocess.run(words, capture_output=True, text=True, timeout=GREETING, check=False).stdout
    pid = re.search(r"^MainPID=(\d+)$", shown, re.MULTILINE)
    command = _read(Path(f"/proc/{pid[1]}/cmdline")).rstrip("\0").replace("\0", " ") if pid else ""
    yield from command_in_force(shown, command)


def compute_mode(devices: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """Note the GPUs whose compute mode does not keep programs from running outside MPS. It is the driver's default.
    ``devices``: as the status has them."""
    known = [one for one in devices if one["compute_mode"] is not None]
    loose = [str(one["ordinal"]) for one in known if one["compute_mode"] not in ("exclusive-process", "prohibited")]
    if loose:
        where = "" if len(loose) == len(known) else f" of GPU {_some(loose)}"
        what = f"the compute mode{where} is not EXCLUSIVE_PROCESS"
        then = "a program that does not reach the gate runs outside MPS, without limits"
        yield Finding(NOTE, "compute mode", f"{what}: {then}", "compute_mode in the policy prevents that")


def replaced(pids: Iterable[int]) -> Iterator[Finding]:
    """Of MPS, which still runs what an upgrade has replaced: it and the driver's libraries of today need not agree.
    ``pids``: the control daemon's and its servers'."""
    for pid in pids:
        with suppress(OSError):
            program = str(Path(f"/proc/{pid}/exe").readlink())
            if program.endswith(" (deleted)"):
                what = f"process {pid} runs {program.removesuffix(' (deleted)')} of before an upgrade"
                yield Finding(WARNING, "programs", what, "when no user works: mpsagent-cli restart-mps")
                return


def driver(devices_known: bool, root: Path = Path("/")) -> Iterator[Finding]:
    """The kernel's driver, and libraries of the same version."""
    topic = "driver"
    text = _read(root / "proc/driver/nvidia/version")
    loaded = _VERSION.search(text)
    if loaded is None:
        grade = NOTE if devices_known else PROBLEM
        yield Finding(
            grade, topic, "no NVIDIA driver is loaded", "" if devices_known else "modprobe nvidia; nvidia-smi"
        )
        return
    library = next(filter(None, (_library(root / place / "libcuda.so.1") for place in _LIBRARIES)), None)
    if library is not None and library != loaded[1]:
        what = f"driver {loaded[1]} is loaded, and libcuda is of {library}: programs end with a version mismatch"
        yield Finding(PROBLEM, topic, what, "restart the machine, or unload and load the nvidia modules")
    else:
        yield Finding(OK, topic, loaded[1])


def _library(path: Path) -> str | None:
    match = re.search(r"\.so\.(\d[\d.]*)$", os.path.realpath(path))
    return match[1] if match and "." in match[1] else None


def device_count(ours: int, root: Path = Path("/")) -> Iterator[Finding]:
    """PyTorch counts GPUs by NVML, and CUDA those of the instance."""
    with suppress(OSError):
        there = len(_names(root / "proc/driver/nvidia/gpus"))
        if 0 < ours < there:
            numbers = ",".join(str(number) for number in range(ours))
            what = f"{there} GPUs are in the machine and {ours} in MPS: PyTorch counts {there}, and fails on the others"
            yield Finding(WARNING, "PyTorch", what, f"set CUDA_VISIBLE_DEVICES={numbers} for users")


# --- files ------------------------------------------------------------------------------------------------------------


def public_directory(path: str) -> Iterator[Finding]:
    """Owner and mode along the whole path, the sockets, and what else lies there."""
    topic = "public directory"
    if not Path(path).is_dir():
        yield Finding(PROBLEM, topic, f"{path} is not there: programs run outside MPS, without limits",
                      "systemctl restart mpsagent-gate.socket mpsagent-gate")  # fmt: skip
        return
    wrong = [Finding(PROBLEM, topic, *_parted(one)) for one in [entry_problem(path)] if one is not None]
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    refused = directories.refusal(path) if os.geteuid() == 0 else None  # it judges as the gate does, which is root
    if mode & 0o022:
        what = f"{path} can be written to by others (mode {mode:04o}), who can replace its sockets"
        wrong.append(Finding(PROBLEM, topic, what, f"chmod 0755 {path}"))
    elif refused is not None:
        wrong.append(Finding(PROBLEM, topic, *_parted(refused)))
    greets = _greets(f"{path}/control")
    if greets is not None:
        wrong.append(Finding(PROBLEM, topic, f"{path}/control: {greets}: programs run outside MPS, without limits",
                             "systemctl restart mpsagent-gate.socket mpsagent-gate"))  # fmt: skip
    yield from wrong or [Finding(OK, topic, path)]
    stale = sorted(set(_names(Path(path))) & (set(directories.DAEMON_NAMES) - {"control", "control_privileged"}))
    listener = directories.listener_of(f"{path}/control")
    if stale and not (listener and is_mps(listener[0])):
        what = f"{', '.join(stale)} in {path}: left by a control daemon that has ended"
        yield Finding(NOTE, topic, what, f"cd {path} && rm {' '.join(stale)}")


def _parted(text: str) -> tuple[str, str]:
    """What is wrong, and its last sentence, which says what to do."""
    what, dot, do = text.partition(". ")
    return what, do if dot else ""


def _greets(path: str) -> str | None:
    """Why a client that comes to this socket is not greeted; None when it is."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(GREETING)
            sock.connect(path)
            return None if sock.recv(64) == HELLO else "something else than MPS answers"
    except TimeoutError:
        return f"no greeting within {GREETING:g} s"
    except OSError as error:
        return error.strerror or str(error)


def logs(directory: str, pids: Iterable[int]) -> Iterator[Finding]:
    """MPS opens its logs once: after a rename it writes into the old file for ever. ``pids``: the control daemon's and
    its servers'."""
    topic, place = "logs", os.path.realpath(directory)
    fine = False
    for pid in pids:
        for target, status in _open_files(pid):
            name = Path(target).name
            if not target.startswith(f"{place}/") or not name.startswith(("control.log", "server.log")):
                continue
            log = f"{name.partition('.log')[0]}.log"
            beside = None if str(Path(target).parent) == place else _stat(str(Path(target).with_name(log)))
            if beside is not None and os.path.samestat(beside, status):
                continue  # of another instance, whose directory is below this one
            there = _stat(f"{place}/{log}")
            fine = there is not None and os.path.samestat(there, status)
            if not fine:
                what = f"process {pid} writes into {target}, which was renamed or removed: what it says is not seen"
                do = "rotate with copytruncate; when no user works: mpsagent-cli restart-mps"
                yield Finding(PROBLEM, topic, what, do)
                return
    if fine:
        yield Finding(OK, topic, directory)


def log_rotation(directory: str, root: Path = Path("/")) -> Iterator[Finding]:
    """logrotate's rules for these logs that rename them."""
    with suppress(OSError):
        for path in [root / "etc/logrotate.conf", *sorted((root / "etc/logrotate.d").iterdir())]:
            for patterns, rules in re.findall(r"(?m)^([^#{}]*)\{([^}]*)\}", _read(path)):
                ours = any(fnmatch(f"{directory}/control.log", one.strip("\"'")) for one in patterns.split())
                if ours and not re.search(r"(?m)^\s*copytruncate\b", rules):
                    what = f"{path} renames the logs of MPS, which goes on writing into the old files"
                    yield Finding(PROBLEM, "logs", what, f"write copytruncate into {path}")


def units(root: Path = Path("/")) -> Iterator[Finding]:
    """What an administrator has put beside or in place of our units."""
    for place in _UNITS:
        with suppress(OSError):
            for entry in sorted((root / place).iterdir()):
                if not entry.name.startswith("mpsagent"):
                    continue
                if entry.is_symlink():
                    if str(entry.readlink()) == "/dev/null":
                        what = f"{entry.name} is masked: nothing starts it"
                        yield Finding(NOTE, "units", what, f"systemctl unmask {entry.name}")
                    continue
                parts = sorted(entry.glob("*.conf")) if entry.is_dir() else [entry]
                unit = entry.name.removesuffix(".d")
                yield from (Finding(NOTE, "units", f"{part} changes {unit}", f"systemctl cat {unit}") for part in parts)


def environment_files(public: str, root: Path = Path("/")) -> Iterator[Finding]:
    """Settings for all users that lead past the gate."""
    paths = [root / "etc/environment", root / "etc/security/pam_env.conf"]
    with suppress(OSError):
        paths += sorted((root / "etc/profile.d").iterdir())
    for path in paths:
        for line in _read(path).splitlines():
            found = None if line.lstrip().startswith("#") else _SETTING.search(line)
            if found is not None and os.path.realpath(found[1]) != os.path.realpath(public):
                what = f"{path} says {PIPE}={found[1]}: programs of those users run outside MPS, without limits"
                yield Finding(WARNING, "environment", what, f"write {public} there, or remove the line")


def clock() -> Iterator[Finding]:
    """Whether the kernel knows its clock to be right; records and logs rest on it."""
    with suppress(OSError, AttributeError):
        if ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(1024)) == _UNSYNCHRONISED:
            yield Finding(
                NOTE,
                "clock",
                "the clock is not synchronised: times in the journal may jump",
                "timedatectl set-ntp true",
            )


# --- processes --------------------------------------------------------------------------------------------------------


def processes(public: str, ours: Iterable[int] = ()) -> Iterator[Finding]:
    """Programs that look for MPS elsewhere, and containers that use the GPU and have no socket. ``ours``: the control
    daemon and its servers. Without root only one's own are seen."""
    here, skipped = namespace("self", "mnt"), {os.getpid(), *ours}
    elsewhere: list[str] = []
    without: list[str] = []
    for pid in psutil.pids():
        given = None if pid in skipped else environment(pid)
        if given is None or is_mps(pid):
            continue
        wanted = given.get(PIPE)
        nvmls_helper = wanted == directories.NOWHERE and _uid(pid) == 0
        if _same(pid, wanted or public, public) or nvmls_helper:
            continue
        who = f"process {pid} of uid {_uid(pid)}"
        none = _stat(f"/proc/{pid}/root/{(wanted or public).lstrip('/')}/control") is None
        if none and namespace(pid, "mnt") != here and (wanted is not None or _uses_gpu(pid, given)):
            without.append(who)
        elif wanted is not None:
            elsewhere.append(f"{who} ({wanted[:80]})")
    if elsewhere:
        what = f"{PIPE} leads elsewhere for {_some(elsewhere)}: CUDA programs there run outside MPS, or with another"
        yield Finding(WARNING, "environment", what, f"{PIPE}={public}, or without it where that is the default")
    if without:
        what = f"containers without {public}/control: {_some(without)}; CUDA programs there run outside MPS"
        yield Finding(
            WARNING, "containers", what, 'mpsagent-cli env --format cdi, or "mpsagent-cli env --format docker"'
        )


def jax(limited: Iterable[int]) -> Iterator[Finding]:
    """JAX reserves 75 % of what the device has, whatever the limit. ``limited``: clients with a memory limit."""
    found = []
    for pid in limited:
        given = environment(pid) or {}
        tame = given.get("XLA_PYTHON_CLIENT_PREALLOCATE") == "false" or "XLA_PYTHON_CLIENT_MEM_FRACTION" in given
        if not tame and "jaxlib" in _read(Path(f"/proc/{pid}/maps")):
            found.append(str(pid))
    if found:
        what = f"JAX in process {_some(found)} reserves 75 % of the GPU's memory, whatever the limit, and then fails"
        yield Finding(WARNING, "JAX", what, "XLA_PYTHON_CLIENT_PREALLOCATE=false in its environment")


def is_mps(pid: int) -> bool:
    """Whether a process calls itself MPS's daemon or server."""
    return _read(Path(f"/proc/{pid}/comm")).startswith("nvidia-cuda-mps")


def _uses_gpu(pid: int, given: Mapping[str, str]) -> bool:
    if given.get("NVIDIA_VISIBLE_DEVICES", "void") not in ("", "void", "none"):
        return True
    return any(target.startswith("/dev/nvidia") for target, _ in _open_files(pid))


def _same(pid: int, theirs: str, ours: str) -> bool:
    """Whether what a process calls ``theirs`` is our directory. True where that cannot be seen."""
    try:
        there = Path(f"/proc/{pid}/root/{theirs.lstrip('/')}/control").stat()
        return os.path.samestat(there, Path(ours, "control").stat())
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _open_files(pid: int) -> Iterator[tuple[str, os.stat_result]]:
    with suppress(OSError):
        for name in _names(Path(f"/proc/{pid}/fd")):
            path = Path(f"/proc/{pid}/fd/{name}")
            with suppress(OSError):
                yield str(path.readlink()), path.stat()


def _names(directory: Path) -> list[str]:
    """Raises OSError."""
    return os.listdir(directory)  # noqa: PTH208 - names only


def _uid(pid: int) -> int:
    found = _stat(f"/proc/{pid}")
    return -1 if found is None else found.st_uid


def _stat(path: str) -> os.stat_result | None:
    with suppress(OSError):
        return Path(path).stat()
    return None


def _read(path: Path) -> str:
    """Its beginning; empty when it cannot be read."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            return file.read(LONGEST if not str(path).endswith("/maps") else 4 << 20).decode(errors="replace")
    return ""


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
