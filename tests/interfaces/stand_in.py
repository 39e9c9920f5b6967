"""A stand-in for the agent behind the API: real views over a real state, an event list, a record of what was asked.

The API and its socket are real; they run in a thread of their own, so that tests may use blocking clients.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpsagent.core.model import Client, Control, Server, State, Status, Waiting
from mpsagent.interfaces import listen, views
from mpsagent.interfaces.api import Api
from mpsagent.interfaces.backend import CursorGone, Problem
from mpsagent.interfaces.door import Bounds
from mpsagent.mps.limits import Limits

START = 1795219200.0
USER, OTHER, ADMIN = 20001, 20002, 20003


def busy_state() -> State:
    """User 20001 holds the GPU with one client, 20002 waits with two, 20003 behind it."""
    limits = Limits(20.0, {0: 1 << 30})
    server = Server(500, USER, Status.ACTIVE, started=START, ready=START + 1, limits=limits, reported=True)
    return State(
        control=Control(pid=400, started=START - 60, socket="/tmp/nvidia-mps/control", version=13000),
        servers={500: server},
        clients={501: Client(pid=501, uid=USER, server=500, since=START + 1, queued=START, contexts=frozenset({0, 1}))},
        waiting=(
            Waiting(600, OTHER, START + 10),
            Waiting(601, ADMIN, START + 20),
            Waiting(602, OTHER, START + 30),
        ),
    )


class StandIn:
    """Implements Backend. ``events_kept`` bounds the history as the agent's does."""

    def __init__(self, events_kept: int = 1000) -> None:
        self.state = busy_state()
        self.troubles: tuple[views.Trouble, ...] = ()
        self.wanted = {USER: Limits(20.0, {0: 1 << 30})}
        self.errors: tuple[str, ...] = ()
        self.asked: list[tuple[Any, ...]] = []
        self.history: list[dict[str, Any]] = []
        self.newest = 0
        self.kept = events_kept
        self.commands = {501: "python train.py"}
        self.loop: asyncio.AbstractEventLoop | None = None
        self.changed: asyncio.Event | None = None

    def happen(self, kind: str, **more: Any) -> int:
        """Something happens; its cursor. May be called from any thread."""
        self.newest += 1
        self.history.append({"cursor": self.newest, "at": views.iso(START + self.newest), "kind": kind, **more})
        del self.history[: -self.kept]
        if self.loop is not None and self.changed is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.changed.set)
        return self.newest

    def about(self) -> views.About:
        oldest = self.history[0]["cursor"] - 1 if self.history else self.newest
        return views.About(
            version="0.0-test", pid=os.getpid(), started=START, troubles=self.troubles,
            pipe_directory="/tmp/nvidia-mps", names={USER: "alice", OTHER: "bob"}, wanted=self.wanted,
            turns={OTHER: START + 1800}, commands=self.commands,
            policy_digest="abc123", policy_loaded=START, policy_errors=self.errors,
            oldest_cursor=oldest, newest_cursor=self.newest,
        )  # fmt: skip

    def status(self) -> Any:
        return views.status(self.state, self.about(), START + 40)

    def servers(self) -> Any:
        return views.servers(self.state, self.about())

    def clients(self) -> Any:
        return views.clients(self.state, self.about(), START + 40)

    def queue(self) -> Any:
        return views.queue(self.state, self.about(), START + 40)

    def policy(self) -> Any:
        return {
            "digest": "abc123",
            "loaded": views.iso(START),
            "files": [],
            "errors": list(self.errors),
            "sections": {},
        }

    async def explain(self, user: str) -> Any:
        if user == "nobody-knows":
            raise Problem(404, "there is no such user", "user", "a name or a uid")
        if user == "slow":
            await asyncio.sleep(60)
        if user == "broken":
            raise RuntimeError("a bug")
        origin = {"key": "user.alice.threads", "file": "policy.toml", "line": 3}
        return {
            "user": user,
            "uid": USER,
            "groups": ["students"],
            "threads": {"value": 20.0, "written": 20, "from": origin},
        }

    def events(self, cursor: int | None, limit: int) -> Any:
        if cursor is None:
            return self.history[-limit:]
        oldest = self.history[0]["cursor"] - 1 if self.history else self.newest
        if cursor < oldest or cursor > self.newest:
            raise CursorGone(cursor, oldest)
        return [one for one in self.history if one["cursor"] > cursor][:limit]

    async def wait_events(self, cursor: int, timeout: float) -> None:
        assert self.changed is not None
        self.changed.clear()
        if self.newest > cursor:
            return
        try:
            await asyncio.wait_for(self.changed.wait(), timeout)
        except TimeoutError:
            return

    def health(self) -> tuple[bool, list[str]]:
        return not self.troubles, [one.what for one in self.troubles]

    async def terminate(self, pid: int, *, now: bool, dry_run: bool, by: int) -> Any:
        self.asked.append(("terminate", pid, now, dry_run, by))
        return {"ok": True, "pid": pid}

    async def drain(self, timeout: float | None, by: int) -> Any:
        self.asked.append(("drain", timeout, by))
        return {"ok": True}

    async def resume(self, by: int) -> Any:
        self.asked.append(("resume", by))
        return {"ok": True}

    async def restart(self, by: int) -> Any:
        self.asked.append(("restart", by))
        return {"ok": True}

    async def reload(self, by: int) -> Any:
        self.asked.append(("reload", by))
        return {"ok": False, "errors": ["policy.toml:1: no"]}


class Served:
    """A running API: its socket's path, the stand-in, and the exceptions that its handlers let through."""

    def __init__(self, path: Path, backend: StandIn) -> None:
        self.path, self.backend = path, backend
        self.failures: list[BaseException] = []
        self.api: Api | None = None


async def _is_admin(uid: int) -> bool:
    return uid == ADMIN


@contextmanager
def serve(backend: StandIn | None = None, bounds: Bounds | None = None, path: Path | None = None) -> Iterator[Served]:
    """The API on a socket at ``path``, or in a directory of its own that every user can enter."""
    directory = Path(tempfile.mkdtemp(prefix="mpsagent-api-"))
    directory.chmod(0o755)
    served = Served(path or directory / "mpsagent.sock", backend or StandIn())
    ready, stop = threading.Event(), threading.Event()
    problems: list[BaseException] = []

    async def run() -> None:
        served.backend.loop = asyncio.get_running_loop()
        served.backend.changed = asyncio.Event()
        served.api = Api(served.backend, _is_admin, bounds, served.failures.append)
        await served.api.start(listen.bind(served.path))
        ready.set()
        while not stop.is_set():  # the other side is a thread
            await asyncio.sleep(0.01)
        await served.api.close()

    def thread() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            problems.append(error)
            ready.set()

    runner = threading.Thread(target=thread)
    runner.start()
    try:
        assert ready.wait(20)
        assert not problems, problems
        yield served
    finally:
        stop.set()
        runner.join(20)
        shutil.rmtree(directory, ignore_errors=True)
    assert not problems, problems


def until(true: Callable[[], bool], within: float = 10.0) -> None:
    """Wait until something is so; a test's only way to wait."""
    end = time.monotonic() + within
    while not true():
        assert time.monotonic() < end, "did not become so in time"
        time.sleep(0.01)
