"""``mpsagent-api`` serves the agent's state to users. It runs as its own user, without rights, and takes no orders."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import structlog

import mpsagent
from mpsagent.api.calls import KEPT, Api
from mpsagent.api.history import History
from mpsagent.api.instances import Everything
from mpsagent.api.metrics import Metrics
from mpsagent.api.received import OtherVersion, Received
from mpsagent.linux import sent_descriptors
from mpsagent.linux.listen import sockets
from mpsagent.linux.lock import AlreadyLocked, take
from mpsagent.linux.notify import Notifier
from mpsagent.system.journal import configure_log
from mpsagent.system.names import Names

log = structlog.get_logger("mpsagent")
LOCK_WAIT = 10.0
"""Seconds for the api before to write down the rest."""
PR_SET_NO_NEW_PRIVS = 38


def main() -> None:
    words = argparse.ArgumentParser("mpsagent-api", description=__doc__)
    words.add_argument("--version", action="version", version=f"mpsagent-api, version {mpsagent.__version__}")
    words.add_argument(
        "--state-directory", metavar="DIRECTORY", help="keep the history in this directory; without it, in memory"
    )
    words.add_argument(
        "--public", type=int, metavar="FD", help="accept connections at this socket; without it, at systemd's"
    )
    words.add_argument(
        "--pages", type=int, metavar="FD", help="read pages from this connection of the agent, and exit when it closes"
    )
    words.add_argument("--user", type=int, metavar="UID", help="become this user")
    asked = words.parse_args()
    configure_log("auto")
    sent_descriptors.watch_over(0)  # while it may: a process that has changed its user may not open what that needs
    if asked.user is not None and os.geteuid() == 0:
        _become(asked.user)
    given = sockets()
    public, pages = _named(given, "mpsagent.sock"), _named(given, "pages.sock")
    if asked.public is not None and asked.pages is not None:
        public, pages = socket.socket(fileno=asked.public), socket.socket(fileno=asked.pages)
    if public is None or pages is None:
        words.error("no sockets: it is started by mpsagent-api.socket, or by mpsagent run")
    try:
        sys.exit(asyncio.run(_serve(asked.state_directory, public, pages, child=asked.pages is not None)))
    except KeyboardInterrupt:
        sys.exit(0)


def _named(found: list[socket.socket], name: str) -> socket.socket | None:
    return next((one for one in found if Path(str(one.getsockname())).name == name), None)


def _become(uid: int) -> None:
    """Without any right from here on; what it needs has been imported."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


async def _serve(directory: str | None, public: socket.socket, pages: socket.socket, *, child: bool) -> int:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if child:
        loop.add_signal_handler(signal.SIGINT, lambda: None)  # a terminal's, which the agent has, too
    held = await _locked(directory)
    notifier = Notifier()
    metered = Metrics(lambda uid: received.name(uid))
    received = Received(History(directory), Names(), metered)
    api = Api(Everything(received), failed=_failed, metered=metered)
    gc.freeze()
    await api.start(public)
    notifier.tell("READY=1")
    status = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal status
        try:
            await received.listen(reader, writer)
        except OtherVersion as other:
            log.warning("api.version", text=f"the agent is {other}, this is {mpsagent.__version__}: started again")
            status = 1
            stop.set()
        if child:
            stop.set()

    if child:
        reading = loop.create_task(serve(*await asyncio.open_unix_connection(sock=pages)))
    else:
        reading = loop.create_task((await asyncio.start_unix_server(serve, sock=pages, **KEPT)).serve_forever())
    while not stop.is_set():
        notifier.tell("WATCHDOG=1")
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), notifier.watchdog / 3 if notifier.watchdog else None)
    notifier.tell("STOPPING=1")
    reading.cancel()
    await api.close()
    received.history.close()
    if held is not None:
        os.close(held)
    return status


def _failed(error: BaseException) -> None:
    log.error("a request failed", exc_info=error)


async def _locked(directory: str | None) -> int | None:
    if directory is None:
        return None
    end = asyncio.get_running_loop().time() + LOCK_WAIT
    while True:
        try:
            return take(Path(directory, "lock"), f"the history in {directory}")
        except AlreadyLocked:
            if asyncio.get_running_loop().time() > end:
                raise
            await asyncio.sleep(0.02)
        except OSError:  # the history says so
            return None


if __name__ == "__main__":
    main()
