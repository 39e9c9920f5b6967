"""``mpsagent``: the daemon's command line."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import structlog

import mpsagent
from mpsagent.agent.api_side import ENDS
from mpsagent.agent.clock import until_next
from mpsagent.agent.conditions import FILES, note_files
from mpsagent.agent.lane import MakeSupervisor
from mpsagent.agent.node import Node
from mpsagent.agent.orders import Orders
from mpsagent.agent.settings import Settings
from mpsagent.agent.status_line import one_line
from mpsagent.linux import sent_descriptors
from mpsagent.linux.listen import bind, bind_administrators, bind_orders, sockets
from mpsagent.linux.lock import AlreadyLocked, take
from mpsagent.linux.notify import Notifier
from mpsagent.policy.policy import Policy
from mpsagent.system.control import ControlSupervisor
from mpsagent.system.control_child import ControlChild
from mpsagent.system.directories import Directories, DirectoryRefused
from mpsagent.system.journal import configure_log
from mpsagent.system.names import Names
from mpsagent.system.store import Store

OPENING = 10.0
"""Seconds until systemd is told READY although users cannot be let in yet; `status` says why."""

TOLD = 2.0
"""Seconds between two words to systemd: the line in `systemctl status`, and the watchdog's."""
SOON = 0.1
"""Seconds between two looks whether a socket is free."""

log = structlog.get_logger("mpsagent")


def main() -> None:
    words = argparse.ArgumentParser(
        "mpsagent", description="Run NVIDIA MPS for several users. mpsagent-cli shows its state."
    )
    words.add_argument("--version", action="version", version=f"mpsagent, version {mpsagent.__version__}")
    run = words.add_subparsers(required=True, metavar="run").add_parser("run", help="run the agent in the foreground")
    told = {"policy": "read this policy, and policy.d in the same directory", "socket": "serve the api at this socket",
            "state-directory": "keep the state for the next agent in this directory",
            "run-directory": "keep the directories of the control daemons and the link to the gate here"}  # fmt: skip
    for name, about in told.items():
        default = getattr(Settings, name.replace("-", "_"))
        run.add_argument(f"--{name}", default=default, metavar="PATH", help=f"{about} ({default})")
    run.add_argument("--supervise", choices=("child", "systemd"), default="child",
                     help="start control daemon and api as children or with systemd (child)")  # fmt: skip
    run.add_argument(
        "--devices", metavar="FILE", help="read the GPUs from this JSON file and not from NVML (for the simulator)"
    )
    run.add_argument("--log-format", choices=("auto", "journal", "text"), default="auto")
    asked = words.parse_args()
    configure_log(asked.log_format)
    settings = Settings(
        policy=asked.policy,
        socket=asked.socket,
        state_directory=asked.state_directory or None,
        run_directory=asked.run_directory.rstrip("/"),
        supervise=asked.supervise,
        devices_file=asked.devices,
    )
    files = _open_more_files()
    sys.exit(asyncio.run(_serve(settings, files)))


def _supervisor(settings: Settings) -> MakeSupervisor:
    def make(policy: Policy, where: Directories, on_gone: Callable[[int], None]) -> ControlSupervisor:
        if settings.supervise == "systemd":
            from mpsagent.system.control_unit import ControlUnit

            return ControlUnit(
                Path(where.home).name, where.hidden, on_gone,
                program=policy.control_daemon_path, run_directory=settings.run_directory,
            )  # fmt: skip
        return ControlChild(where.hidden, on_gone, program=policy.control_daemon_path)

    return make


async def _serve(settings: Settings, files: int) -> int:
    notifier = Notifier()
    loop = asyncio.get_running_loop()
    stop, reload = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    sent_descriptors.watch_over()
    try:
        held = _lock(settings)
        given = sockets()
        public = next((one for one in given if one.type == socket.SOCK_STREAM), None)
        if public is None and settings.supervise == "child":
            public = await _bound(Path(settings.socket))
    except (OSError, AlreadyLocked) as error:
        log.error("the agent cannot start", reason=str(error))
        return 1
    store = Store(None if settings.state_directory is None else Path(settings.state_directory, "state.json"))
    agent = Node(settings, Names(), store)
    agent.api.public = public
    if what := note_files(agent.conditions, "the agent", files, agent.started):
        log.warning("open files", text=what)
    gc.freeze()  # else each full collection looks at 56,000 objects of modules, for 30 ms
    orders = Orders(agent.acting, _is_admin(agent), lambda error: agent.failed("an order failed", error))
    try:
        if not await _started(agent, settings, stop):
            return 0
        passed = [one for one in given if one is not public]
        agent.listens = frozenset(str(one.getsockname()) for one in passed)
        for sock in passed or _own_sockets(agent, Path(settings.socket)):
            orders.listen(sock)
        await _opened(agent, stop)
        notifier.tell("READY=1", f"STATUS={_line(agent)}")
        log.info("agent.ready", version=mpsagent.__version__, policy=settings.policy, socket=settings.socket)
        await _until_stopped(agent, notifier, stop, reload)
    except (AlreadyLocked, DirectoryRefused, OSError) as error:
        log.error("the agent cannot start", reason=str(error))
        return 1
    finally:
        notifier.tell("STOPPING=1")
        orders.close()
        await agent.end()
        if held is not None:
            os.close(held)
    return 0


async def _bound(path: Path) -> socket.socket:
    """The api of an agent that was killed may answer there for a moment more. Raises OSError."""
    for _ in range(int(ENDS / SOON)):
        with suppress(FileExistsError):
            return bind(path)
        await asyncio.sleep(SOON)
    return bind(path)


def _own_sockets(agent: Node, path: Path) -> list[socket.socket]:
    """For orders, where systemd has made none."""
    found = []
    for group in (agent.policy.admin_group, None):
        try:
            found.append(bind_orders(path) if group is None else bind_administrators(path, group))
        except OSError as error:
            log.warning("no socket for orders", reason=str(error))
    return found


async def _started(agent: Node, settings: Settings, stop: asyncio.Event) -> bool:
    """Start it, unless it is to be stopped before that is done."""
    starting = asyncio.ensure_future(agent.start(_supervisor(settings)))
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not starting.done():
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting
        return False
    starting.result()
    return True


async def _opened(agent: Node, stop: asyncio.Event) -> None:
    """Wait until clients are served, for units that are ordered after this one. Not for ever, and not at all where only
    a person can help."""
    until = asyncio.get_running_loop().time() + OPENING
    while not (agent.opened or stop.is_set()) and asyncio.get_running_loop().time() < until:
        await asyncio.sleep(0.01)


async def _until_stopped(agent: Node, notifier: Notifier, stop: asyncio.Event, reload: asyncio.Event) -> None:
    """Keep systemd informed until we are stopped. The watchdog hears from us only while the loop turns."""
    every = min(TOLD, notifier.watchdog / 3) if notifier.watchdog else TOLD
    said, stopped = "", asyncio.ensure_future(stop.wait())
    reloading = asyncio.ensure_future(reload.wait())
    while not stop.is_set():
        await asyncio.wait((stopped, reloading), timeout=until_next(every), return_when=asyncio.FIRST_COMPLETED)
        if reload.is_set():
            reload.clear()
            reloading = asyncio.ensure_future(reload.wait())
            agent.spawn(agent.load_policy())  # aside: its files may be slow, and the watchdog is not
        line = _line(agent)
        notifier.tell(*(["WATCHDOG=1"] if notifier.watchdog else []), *([f"STATUS={line}"] if line != said else []))
        said = line
    reloading.cancel()


def _line(agent: Node) -> str:
    return one_line(agent.agents, agent.all_conditions(), agent.people.name)


def _lock(settings: Settings) -> int | None:
    """One agent alone has the state directory. None without one, or where it cannot be written to (the store
    says so, and the lock in the pipe directory is still to come)."""
    if settings.state_directory is None:
        return None
    directory = Path(settings.state_directory)
    with suppress(OSError):
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        return take(directory / "lock", f"what is kept in {directory}")
    return None


def _open_more_files() -> int:
    """Each waiting client costs a descriptor, and any user may start thousands. Returns how many there are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def _is_admin(agent: Node) -> Callable[[int], Awaitable[bool]]:
    async def is_admin(uid: int) -> bool:
        return uid == 0 or agent.policy.admin_group in (await agent.names.look_up(uid)).groups

    return is_admin


if __name__ == "__main__":
    main()
