"""``mpsagent``: the daemon's command line."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import socket as socketlib
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import click
import structlog

import mpsagent
from mpsagent.agent.conditions import FILES, note_files
from mpsagent.agent.host import MakeSupervisor
from mpsagent.agent.node import Node
from mpsagent.agent.settings import Settings
from mpsagent.gate import linger
from mpsagent.interfaces.api import Api
from mpsagent.interfaces.everything import Everything
from mpsagent.interfaces.listen import administrators_path, bind, bind_administrators, inherited, split
from mpsagent.interfaces.metrics import Metrics
from mpsagent.policy.policy import Policy
from mpsagent.system.control import ControlSupervisor
from mpsagent.system.control_child import ControlChild
from mpsagent.system.directories import Directories, DirectoryRefused
from mpsagent.system.history import History
from mpsagent.system.journal import configure_log
from mpsagent.system.lock import AlreadyLocked, take
from mpsagent.system.names import Names
from mpsagent.system.notify import Notifier
from mpsagent.system.store import Store

OPENING = 10.0
"""Seconds until systemd is told READY although users cannot be let in yet; `status` says why."""

log = structlog.get_logger("mpsagent")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(mpsagent.__version__, prog_name="mpsagent")
def main() -> None:
    """Makes NVIDIA MPS safe to leave on. Ask a running one with mpsagent-cli."""


@main.command()
@click.option(
    "--policy", default=Settings.policy, show_default=True, help="The policy; policy.d beside it is read too."
)
@click.option("--socket", default=Settings.socket, show_default=True, help="Where the API listens.")
@click.option(
    "--state-directory", default=Settings.state_directory, show_default=True, help="Where the history is kept."
)
@click.option(
    "--run-directory",
    default=Settings.run_directory,
    show_default=True,
    help="Hidden directories of the control daemons, and the link to the gate.",
)
@click.option("--supervise", type=click.Choice(["child", "systemd"]), default="child", show_default=True,
              help="Who runs the control daemon: the agent itself, or systemd.")  # fmt: skip
@click.option("--devices", "devices_file", help="The GPUs, as JSON, instead of asking NVML (for the simulator).")
@click.option("--log-format", type=click.Choice(["auto", "journal", "text"]), default="auto", show_default=True)
def run(
    policy: str,
    socket: str,
    state_directory: str,
    run_directory: str,
    supervise: str,
    devices_file: str | None,
    log_format: str,
) -> None:
    """Run the agent in the foreground."""
    configure_log(log_format)
    settings = Settings(
        policy=policy,
        socket=socket,
        state_directory=state_directory or None,
        run_directory=run_directory.rstrip("/"),
        supervise="systemd" if supervise == "systemd" else "child",
        devices_file=devices_file,
    )
    files = _open_more_files()
    sys.exit(asyncio.run(_serve(settings, files)))


def _supervisor(settings: Settings) -> MakeSupervisor:
    def make(policy: Policy, where: Directories, on_gone: Callable[[int], None]) -> ControlSupervisor:
        if settings.supervise == "systemd":
            from mpsagent.system.control_unit import ControlUnit

            return ControlUnit(
                policy.instance, where.hidden, on_gone,
                program=policy.control_program, run_directory=settings.run_directory,
            )  # fmt: skip
        return ControlChild(where.hidden, on_gone, program=policy.control_program)

    return make


async def _serve(settings: Settings, files: int) -> int:
    notifier = Notifier()
    loop = asyncio.get_running_loop()
    stop, reload = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, reload.set)
    linger.watch_over()
    try:
        held = _lock(settings)
        sock, admin = split(inherited(), Path(settings.socket))
        sock = sock or bind(Path(settings.socket))
    except (OSError, AlreadyLocked) as error:
        log.error("the agent cannot start", reason=str(error))
        return 1
    store = Store(None if settings.state_directory is None else Path(settings.state_directory, "state.json"))
    agent = Node(settings, History(settings.state_directory), Names(), store)
    if what := note_files(agent.conditions, "the agent", files, agent.started):
        log.warning("open files", text=what)
    backend = Everything(agent)
    metered = Metrics(agent.name_of)
    agent.watchers.append(metered.watch)
    gc.freeze()  # else each full collection looks at 56,000 objects of modules, for 30 ms
    api = Api(backend, _is_admin(agent), failed=lambda error: agent.failed("a request failed", error), metered=metered)
    try:
        if not await _started(agent, settings, stop):
            return 0
        await api.start(sock, admin or _administrators(agent, Path(settings.socket)))
        await _opened(agent, stop)
        notifier.tell("READY=1", f"STATUS={backend.one_line()}")
        log.info("agent.ready", version=mpsagent.__version__, policy=settings.policy, socket=settings.socket)
        await _until_stopped(agent, backend, notifier, stop, reload)
    except (AlreadyLocked, DirectoryRefused, OSError) as error:
        log.error("the agent cannot start", reason=str(error))
        return 1
    finally:
        notifier.tell("STOPPING=1")
        await api.close()
        await agent.end()
        if held is not None:
            os.close(held)
    return 0


def _administrators(agent: Node, path: Path) -> socketlib.socket | None:
    """The administrators' own socket; without it root has a reserve on the public one."""
    try:
        return bind_administrators(administrators_path(path), agent.policy.admin_group)
    except OSError as error:
        log.warning("no socket for administrators", reason=str(error))
        return None


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


async def _until_stopped(
    agent: Node, backend: Everything, notifier: Notifier, stop: asyncio.Event, reload: asyncio.Event
) -> None:
    """Keep systemd informed until we are stopped. The watchdog hears from us only while the loop turns."""
    every = min(1.0, notifier.watchdog / 3) if notifier.watchdog else 1.0
    said = ""
    while not stop.is_set():
        waiters = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(reload.wait())]
        await asyncio.wait(waiters, timeout=every, return_when=asyncio.FIRST_COMPLETED)
        for waiter in waiters:
            waiter.cancel()
        if reload.is_set():
            reload.clear()
            agent.spawn(_reload(agent))  # aside: its files may be slow, and the watchdog is not
        line = backend.one_line()
        notifier.tell(*(["WATCHDOG=1"] if notifier.watchdog else []), *([f"STATUS={line}"] if line != said else []))
        said = line


async def _reload(agent: Node) -> None:
    await agent.load_policy()


def _lock(settings: Settings) -> int | None:
    """The state directory is one agent's alone. None where there is none, or where it cannot be written to (the history
    says so, and the lock in the pipe directory is still to come)."""
    if settings.state_directory is None:
        return None
    directory = Path(settings.state_directory)
    with suppress(OSError):
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        return take(directory / "lock", f"the history in {directory}")
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
