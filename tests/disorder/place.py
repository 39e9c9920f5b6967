"""Where a run happens: the machine, what each user sees when all is right, and the product or a bare MPS.

Of the product only this is assumed: the program `mpsagent run`, its policy file, and the public pipe directory.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from mpsagent.linux.processes import stopped
from mpsagent_sim import gpu
from tests.conformance import rig as rigs
from tests.disorder.population import Machine, Population
from tests.disorder.verdict import Entitled
from tests.scenes.stage import Agent, Stage

GUEST = Path(__file__).with_name("guest.py")
REAL_TOLERANCE = 40
"""MiB that the same client sees more or less on a GPU that others use."""


class PlaceError(Exception):
    """The run cannot begin."""


def machine_of(kind: str, gpus: int) -> Machine:
    """The simulated machine with `gpus` GPUs, or this one as NVML tells it: CUDA has what is not reserved."""
    if kind == "sim":
        return Machine(gpus, gpu.MULTIPROCESSORS, gpu.TOTAL << 20)
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return Machine(int(pynvml.nvmlDeviceGetCount()), 0, int(memory.total - memory.reserved))
    finally:
        pynvml.nvmlShutdown()


def entitled_on_the_simulator(population: Population, machine: Machine) -> dict[tuple[int, int], Entitled]:
    """By the simulator's own arithmetic, to the MiB."""
    found = {}
    for user in population.users:
        count = user.multiprocessors(machine)
        for device, limit in enumerate(user.memory):
            found[user.uid, device] = Entitled(count, gpu.free(count, limit, 0, 0))
    return found


def entitled_by_measuring(stage: Stage, population: Population, machine: Machine) -> dict[tuple[int, int], Entitled]:
    """What a client sees on a bare MPS of its own with exactly these limits, without the product."""
    found = {}
    rig = stage.rig
    if rig.start("-d").rc != 0:
        raise PlaceError("the control daemon does not start")
    holder = ""
    for user in population.users:
        commands = [f"set_default_active_thread_percentage {user.percent}"]
        commands += [f"set_default_device_pinned_mem_limit {n} {size}M" for n, size in enumerate(user.memory)]
        for server in rig.ctl("get_server_list", quiet=True).out.split():
            commands += [f"set_active_thread_percentage {server} {user.percent}"]
            commands += [f"set_device_pinned_mem_limit {server} {n} {size}M" for n, size in enumerate(user.memory)]
        rig.ctl("\n".join(commands))
        if not holder:  # the server stays while it has a client
            holder = rig.spawn(population.users[0].uid, "sleep", 60)
            rig.working(holder)
        for device in range(machine.gpus):
            name = rig.spawn(population.users[0].uid, "query", env={"DEV": str(device)})
            rig.wait(name)
            seen = re.search(r"\] sms (\d+) meminfo \w+ free (\d+) MiB", rig.clients[name].read())
            if seen is None:
                raise PlaceError(f"a client is not served by a bare MPS: {rig.clients[name].read()}")
            found[user.uid, device] = Entitled(int(seen[1]), int(seen[2]), REAL_TOLERANCE)
            if int(seen[1]) != user.multiprocessors(machine):
                raise PlaceError(
                    f"{user.percent} % are {seen[1]} multiprocessors here, not {user.multiprocessors(machine)}"
                )
    return found


def start_product(stage: Stage, population: Population, server_program: str, *, each: bool = False) -> Agent:
    """The agent with this policy; returns when a first client has been served. `each`: an instance for each GPU."""
    several = 'devices = ["each"]\n[agent]\nplacement = "least-loaded"\n' if each else ""
    (stage.place / "policy.toml").write_text(
        population.policy + f'pipe_directory = "{stage.rig.pipe}"\nlog_directory = "{stage.rig.log}"\n'
        f'control_daemon_path = "{server_program}"\n{several}'
    )
    agent = stage.start_agent()
    end = time.monotonic() + 60
    while not (stage.rig.pipe / "control").exists():
        if time.monotonic() > end or agent.started.process.poll() is not None:
            raise PlaceError(f"no public control socket: {agent.log()[-4000:]}")
        time.sleep(0.02)
    first = stage.client(population.users[0].uid)
    if first.ended(60) != 0:
        raise PlaceError(f"the first client was not served: {first.text()}\n{agent.log()[-4000:]}")
    return agent


def frozen(stage: Stage, living: Sequence[int]) -> int:
    """Processes that stand when the run is over, and files that say that one does."""
    return sum(map(stopped, living)) + len(list(stage.place.glob("run/instances/*/frozen/*")))


def start_bare(stage: Stage, population: Population, server: str) -> list[tuple[float, Callable[[], None]]]:
    """MPS without the product, as it is run today: the same limits for everybody, first small ones, then large ones;
    between them the daemon is told to quit and is started anew. What happens when, in seconds of the run."""
    options = ["-d", *(["--multiuser-server"] if server == "shared" else [])]

    def limits(percent: int, size: str) -> None:
        lines = [f"set_default_device_pinned_mem_limit {n} {size}" for n in range(len(population.users[0].memory))]
        stage.rig.ctl("\n".join([f"set_default_active_thread_percentage {percent}", *lines]))

    def quit_slowly() -> None:
        stage.rig.begin("quit -t 1")  # who comes before it has ended is refused, who comes later runs outside

    def started() -> None:
        stage.rig.start(*options)
        limits(100, "100G")

    if stage.rig.start(*options).rc != 0:
        raise PlaceError("the control daemon does not start")
    limits(5, "500M")
    half = population.seconds / 2
    return [(half, quit_slowly), (half + 2, started)]


KILLED = {
    "agent": ("mpsagent", " run"), "gate": ("mpsagent.gate.main run",), "daemon": (rigs.CONTROL,),
    "server": ("nvidia-cuda-mps-server",),
}  # fmt: skip
"""What can be killed, by words in its arguments. The gate's keeper, which stands in for systemd, is left alone."""


class Killer:
    """SIGKILLs parts of the product and of MPS, and starts the agent again as systemd would."""

    def __init__(self, stage: Stage, now: Callable[[], float], later: Callable[[float, Callable[[], None]], None]):
        self._stage, self._now, self._later = stage, now, later
        self.done: list[tuple[float, str]] = []
        self.agents: list[Agent] = []
        """Those that were killed."""

    def kill(self, what: str) -> None:
        words = KILLED[what]
        found = [one.pid for one in self._stage.rig.ours() if all(word in one.arguments for word in words)]
        if what == "agent":  # unless it is still to be started again
            found = [agent.pid for agent in self._stage.agents[-1:] if agent.started.process.poll() is None]
        if what == "server":
            found = [pid for pid in found if pid not in self._daemons()]
        for pid in found:
            rigs.send_signal(pid, signal.SIGKILL)
        if found:
            self.done.append((self._now(), what))
        if found and what == "agent":
            self._later(self._now() + 0.3, self._again)

    def _daemons(self) -> set[int]:
        return {one.pid for one in self._stage.rig.ours() if rigs.CONTROL in one.arguments}

    def _again(self) -> None:
        self.agents.append(self._stage.agents.pop())
        self._stage.start_agent()


def kills(seed: int, count: int, what: str, seconds: float) -> list[tuple[float, str]]:
    """When what is killed: `what` has the choice, with commas."""
    draw = random.Random(seed)
    choice = [word for word in what.split(",") if word]
    return sorted((draw.uniform(1.0, seconds), draw.choice(choice)) for _ in range(count))


_STAMP = r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) Server +\d+\] "
FAULTED = re.compile(_STAMP + "Server is handling a fatal GPU error")
ACTIVE = re.compile(_STAMP + r"Status of client \{PID: (\d+), Context ID: [1-9]\d*\} is ACTIVE")


def _logged(stage: Stage, line: re.Pattern[str], began: float) -> list[tuple[float, str]]:
    """When server.log has such a line, in seconds since `began` (time.time(); logs are UTC), and its last group."""
    found = [
        (datetime.strptime(match[1], "%Y-%m-%d %H:%M:%S.%f").replace(tzinfo=UTC).timestamp(), match[match.re.groups])
        for path in stage.place.glob("**/server.log*")
        for match in line.finditer(path.read_text(errors="replace"))
    ]
    return sorted((at - began, what) for at, what in found if at >= began)


def logged_faults(stage: Stage, began: float) -> list[float]:
    """When servers faulted."""
    return [at for at, _ in _logged(stage, FAULTED, began)]


def logged_active(stage: Stage, began: float) -> dict[int, list[float]]:
    """By pid, when servers called a context of it active: from then on the driver makes it."""
    found: dict[int, list[float]] = {}
    for at, pid in _logged(stage, ACTIVE, began):
        found.setdefault(int(pid), []).append(at)
    return found


class Driver:
    """Asks the driver through nvidia-smi, again and again: a witness of its own for when it answers no process.
    An answer took 0.03 s on a quiet H200, 0.3 to 0.9 s beside 400 clients, up to 4.6 s while no context was made."""

    QUICK = 1.0
    """Seconds that an answer may take; what it takes beyond that the driver stood still."""

    def __init__(self) -> None:
        self.looks: list[tuple[float, float, str]] = []
        """When asked, when answered (Unix times), MiB in use and free on each GPU."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Driver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _look(self) -> None:
        command = ["nvidia-smi", "--query-gpu=memory.used,memory.free", "--format=csv,noheader,nounits"]
        while not self._over.wait(0.5):
            asked = time.time()
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            self.looks.append((asked, time.time(), done.stdout.strip().replace("\n", "; ")))

    def stalls(self, began: float) -> list[tuple[float, float]]:
        """From when to when it stood still, in seconds since ``began``."""
        return [
            (asked + self.QUICK - began, answered - began)
            for asked, answered, _ in self.looks if answered - asked > self.QUICK
        ]  # fmt: skip

    def text(self) -> str:
        return "".join(
            f"{asked:.3f} answered after {answered - asked:.2f} s: {what}\n" for asked, answered, what in self.looks
        )


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that do nothing but use the cores."""
    command = [sys.executable, "-S", "-E", "-c", "while True: pass"]
    burners = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def guest_command(place: Path, uid: int) -> list[str]:
    """guest.py where every user can read it."""
    copy = place / "guest.py"
    copy.write_bytes(GUEST.read_bytes())
    copy.chmod(0o644)
    return [rigs.other_users_python(uid), "-S", "-E", str(copy)]


def environment_of(stage: Stage) -> dict[str, str]:
    """For clients and guests: the public directory, and nothing of ours."""
    found = stage.rig.environment()
    found.pop("CUDA_MPS_LOG_DIRECTORY", None)
    return {key: value for key, value in found.items() if not key.startswith("PYTEST") and key != "PWD"} | {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "SAY_MPS": "1",
    }
