"""The gate's units under systemd: started again when they failed, moved when the policy has another public directory.

The agent wants them started (Wants= in its unit); this is for what comes later: a control daemon that was started by
hand served the public directory and has ended, an administrator has changed ``pipe_directory``, or the socket's file is
gone. Units that an administrator has stopped stay stopped.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, NamedTuple

from mpsagent.linux.threads import in_thread
from mpsagent.system.control_unit import CALL_DEADLINE, STEP, SystemBus, reason, text_of, units
from mpsagent.system.directories import Directories, unusable

SOCKET, SERVICE = "mpsagent-gate.socket", "mpsagent-gate.service"
DEADLINE = 15.0
ADMIN = "mpsagent-admin.socket"


class GateState(NamedTuple):
    """``socket``, ``service``: ActiveState of the units; ``listens``: path of the public socket; ``environment``: of
    the service. ``job``: what was asked of one of them waits or goes on, so that its state is about to change."""

    socket: str
    service: str
    listens: str
    environment: tuple[str, ...]
    job: bool = False


class GateBus(SystemBus):
    """What is asked of systemd about the two."""

    def both(self) -> GateState:
        with units(SOCKET, SERVICE) as (socket, service):
            job = any(unit.Unit.Job[0] for unit in (socket, service))  # first: it may end meanwhile
            listen = [text_of(path) for _, path in socket.Socket.Listen] if _loaded(socket) else []
            environment = tuple(map(text_of, service.Service.Environment)) if _loaded(service) else ()
            active = text_of(socket.Unit.ActiveState), text_of(service.Unit.ActiveState)
            return GateState(*active, listen[0] if listen else "", environment, job)

    def reload(self) -> None:
        self.call("Reload")

    def begin(self) -> None:
        self.forget_failure(SOCKET)
        self.start(SERVICE)

    def restart(self) -> None:
        """The service requires the socket, so it is restarted with it; who waits stays in systemd's store."""
        self.call("RestartUnit", SOCKET.encode(), b"replace")
        self.call("StartUnit", SERVICE.encode(), b"replace")


class GateUnits:
    """Nothing here raises or blocks the loop."""

    def __init__(self, bus: GateBus | None = None) -> None:
        self._bus = bus or GateBus()

    async def ensure(self, where: Directories) -> str | None:
        """The gate's units listen, for these directories. None, or why they do not, in words."""
        try:
            async with asyncio.timeout(DEADLINE):
                return await self._ensure(where)
        except TimeoutError:
            return f"{SERVICE} was not up after {DEADLINE:g} s, or systemd does not answer"
        except Exception as error:
            return f"{SERVICE} could not be started: {reason(error)}"

    async def _ensure(self, where: Directories) -> str | None:
        state = await self._settled()
        if state.socket == "inactive":
            return (
                f"{SOCKET} is stopped or not installed: programs that start now run outside MPS, without limits; "
                f"systemctl start {SOCKET} {SERVICE}"
            )
        if state.listens and not state.environment:
            return f"{SERVICE} is masked or not installed: programs that start wait; systemctl unmask {SERVICE}"
        if state.listens and not _fits(state, where):
            await in_thread(self._bus.reload, deadline=DEADLINE)  # mpsagent-generator reads the policy again
            state = await in_thread(self._bus.both, deadline=CALL_DEADLINE)
            if not _fits(state, where):
                return (
                    f"{SOCKET} listens on {state.listens}, the policy says {where.public}: is there a drop-in of "
                    f"yours? See systemctl cat {SOCKET} {SERVICE}"
                )
            await in_thread(self._bus.restart, deadline=CALL_DEADLINE)
        elif state.socket == "failed":
            await in_thread(self._bus.begin, deadline=CALL_DEADLINE)
        elif await in_thread(unusable, state.listens, deadline=CALL_DEADLINE):  # removed by hand
            await in_thread(self._bus.restart, deadline=CALL_DEADLINE)
        else:  # a service that does not run is started by the next client, or by systemd's Restart=
            return None
        state = await self._settled()
        if (state.socket, state.service) == ("active", "active"):
            return None
        return (
            f"the gate does not run ({SOCKET}: {state.socket}, {SERVICE}: {state.service}): "
            f"journalctl -b -u {SOCKET} -u {SERVICE}"
        )

    async def _settled(self) -> GateState:
        """Waits while a unit is on its way from one state to another, or is to go."""
        while True:
            state = await in_thread(self._bus.both, deadline=CALL_DEADLINE)
            if not (state.job or state.socket.endswith("ing") or state.service.endswith("ing")):
                return state
            await asyncio.sleep(STEP)


def _fits(state: GateState, where: Directories) -> bool:
    return state.listens == f"{where.public}/control" and f"MPSAGENT_HIDDEN={where.hidden}" in state.environment


def sockets_again(root: Path = Path("/")) -> str:
    """Return the command that restores the sockets for orders. systemd starts no socket of a service that runs, so the
    agent is restarted with them."""
    masks = [root / place / "systemd/system" / ADMIN for place in ("etc", "run")]
    masked = any(os.path.realpath(one) == "/dev/null" for one in masks)
    unmask = f"systemctl unmask {ADMIN}; " if masked else ""
    return f"{unmask}systemctl restart mpsagent.socket mpsagent-api.socket mpsagent"


def _loaded(unit: Any) -> bool:
    return text_of(unit.Unit.LoadState) == "loaded"
