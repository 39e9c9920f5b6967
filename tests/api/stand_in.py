"""A stand-in for the agent behind the API: real views over a real state, an event list, a record of what was asked.

The API and its socket are real; they run in a thread of their own, so that tests may use blocking clients.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mpsagent.agent import acting
from mpsagent.agent.orders import Orders
from mpsagent.api import views
from mpsagent.api.calls import Api
from mpsagent.api.connections import Bounds
from mpsagent.api.instances import Everything
from mpsagent.core import pause_room
from mpsagent.core import waiting as waits
from mpsagent.core.inputs import Peer
from mpsagent.core.model import Attachment, Client, Control, Gate, Held, Server, State, Status
from mpsagent.core.queue import Queue
from mpsagent.core.sessions import Session, Sessions
from mpsagent.core.view import Turn, View
from mpsagent.linux import listen
from mpsagent.mps.gpus import GpusSeen
from mpsagent.mps.limits import Device, Limits
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.shares import Lease, Share
from mpsagent.snapshot import lease_body
from mpsagent.snapshot.condition import Condition
from mpsagent.snapshot.page import InstancePage, Page
from mpsagent.snapshot.problem import Problem
from tests.policies import in_turns

START = 1795219200.0
USER, OTHER, ADMIN = 20001, 20002, 20003
CHANGE = Session(1, "turn", None, USER, 0, START, START, more={"before": ADMIN, "gap": 0.1})
POLICY = """
[limits]
active_threads = '20%'
memory_limit = "1G"
[turn]
time_limit = "30m"
grace = "1m"
"""


def held(connection: int, pid: int, uid: int, since: float, **more: Any) -> Held:
    """A connection at the gate."""
    return Held(connection, Peer(pid, uid, uid, pid * 10, command=f"python job-{pid}.py"), since, **more)


def busy_state() -> State:
    """User 20001 has the GPU with one client, 20002 waits with two, 20003 behind it."""
    policy, errors = load([("policy.toml", POLICY), ("turns.toml", in_turns(POLICY))])
    assert policy is not None, errors
    limits = Limits(20.0, {0: 1 << 30})
    attached = {501: Attachment(START + 1, frozenset({0, 1}))}
    server = Server(
        500, USER, Status.ACTIVE, started=START, ready=START + 1, limits=limits, reported=True, attached=attached
    )
    peer = Peer(501, USER, USER, 5010, command="python train.py")
    control = Control(pid=400, started=START - 60, socket="/tmp/nvidia-mps/control", version=13000, proven=True)
    return State(
        policy=policy,
        devices=(Device(0, "GPU-0", "NVIDIA H200", 140 << 30, 132),),
        identities={USER: Identity(USER, "alice"), OTHER: Identity(OTHER, "bob"), ADMIN: Identity(ADMIN, "carol")},
        gate=Gate(300, START - 60, synced=True),
        control=control,
        servers={500: server},
        applied=1,
        known_handshake=True,
        clients={501: Client(peer, since=START + 1, waited=1.0, limits=limits)},
        held=Queue()
        .put(held(1, 600, OTHER, START + 10))
        .put(held(2, 601, ADMIN, START + 20))
        .put(held(3, 602, OTHER, START + 30)),
    )


def decided(view: View) -> View:
    """With what the rule of turns says of the present one."""
    if view.turn is None:
        return view
    ends = pause_room.ends(view, view.turn)
    over = None if ends is None else ends + pause_room.leaving(view, view.turn.uid)
    return replace(view, turn=replace(view.turn, ends=ends, over=over))


def nobody(uid: int) -> None:
    """No name is known."""


def instance(view: View, now: float = 0.0, **more: Any) -> InstancePage:
    """As the agent shows it."""
    found = InstancePage("default", view, {}, True, {}, (), {}, waits.waiting(decided(view), now))
    return found._replace(**more)


def page(*instances: InstancePage, **more: Any) -> Page:
    one = instances[0]
    policy = one.view.policy
    found = Page(1, 0.0, 0.0, 0.0, instances, (), policy, None, (), {}, {}, True, one.name, (), GpusSeen())
    return found._replace(**more)


def queue(view: View, now: float) -> Any:
    return views.queue(instance(view, now), nobody, now)


class Kept:
    """The history as far as the API reads it in memory. ``most`` bounds it as the agent's does."""

    sessions = SimpleNamespace(changes={None: CHANGE}, faults={})
    problem = None

    def __init__(self, most: int) -> None:
        self.most, self.newest = most, 0
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self.changed: asyncio.Event | None = None

    @property
    def oldest(self) -> int:
        return self.rows[0]["seq"] if self.rows else self.newest + 1

    in_memory = oldest

    def happen(self, kind: str, **more: Any) -> int:
        """Something happens; its cursor. May be called from any thread."""
        self.newest += 1
        self.rows.append({"seq": self.newest, "at": START + self.newest, "kind": kind, **more})
        del self.rows[: -self.most]
        if self.loop is not None and self.changed is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.changed.set)
        return self.newest

    def since(self, cursor: int, limit: int) -> list[dict[str, Any]]:
        return [one for one in self.rows if one["seq"] > cursor][:limit]

    async def wait(self, cursor: int) -> None:
        assert self.changed is not None
        self.changed.clear()
        if self.newest <= cursor:
            await self.changed.wait()


class StandIn(Everything):
    """What the API answers of a state, a list of events and a record of what was asked. ``events_kept`` bounds the list
    as the agent's history is bounded."""

    old, live = None, {}

    def __init__(self, events_kept: int = 1000) -> None:
        self.state = busy_state()
        self.turn: Turn | None = Turn(USER, START, contested=START + 10)
        self.conditions: tuple[Condition, ...] = ()
        self.checked = {500: True}
        self.errors: tuple[str, ...] = ()
        self.memory: dict[int, int] = {}
        self.asked: list[tuple[Any, ...]] = []
        self.given: list[dict[str, Any]] = []
        self.settled = True
        self.history = Kept(events_kept)
        self.happen = self.history.happen
        self.names = SimpleNamespace(uid_of=self._uid_of, look_up=self._look_up)
        super().__init__(self)  # type: ignore[arg-type]

    # --- what was received of the agent

    @property
    def page(self) -> Page:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": self.state.policy.pipe_directory}
        one = instance(self.view(), START + 40, checked=self.checked, memory=self.memory)
        return page(
            one, environment=environment, pid=os.getpid(), started=START, policy_loaded=START,
            policy_errors=self.errors, conditions=self.conditions,
        )  # fmt: skip

    def view(self) -> View:
        return decided(View(self.state, turn=self.turn))

    def now(self) -> float:
        return START + 40

    def identity(self, uid: int | None) -> Identity | None:
        return self.state.identities.get(uid)

    def name(self, uid: int | None) -> str | None:
        known = self.identity(uid)
        return None if known is None else known.name

    async def _uid_of(self, name: str) -> int | None:
        if name == "slow":
            await asyncio.sleep(60)
        if name == "broken":
            raise RuntimeError("a bug")
        return next((uid for uid, known in self.state.identities.items() if known.name == name), None)

    async def _look_up(self, uid: int) -> Identity:
        return self.identity(uid) or Identity(uid)

    async def first(self) -> None:
        pass

    async def look(self, most: float) -> None:
        pass

    # --- what the history's file says

    async def find(self, user: str | None, query: Any) -> Any:
        self.asked.append(("find", user, query))
        if user is not None:
            await self._identity(user)
        return self.history.rows[-query.limit :]

    async def sessions(self, user: str | None, query: Any) -> Any:
        """Of the records that there are, and of who works and waits now."""
        fold = Sessions()
        fold.take({"seq": 1, "at": START, "kind": "client.connected", "pid": 501, "uid": USER, "waited": 0.0})
        fold.take({"seq": 2, "at": START, "kind": "client.waiting", "pid": 601, "uid": OTHER})
        names = {USER: "alice", OTHER: "bob"}.get
        rows = [views.session(one, START + 40, names) for one in fold.open.values() if one.number > (query.after or 0)]
        return rows[: query.limit]

    async def report(self, by: str, first: str, last: str, job: str | None = None) -> Any:
        return {"by": by, "first": first, "last": last, "rows": []}

    def leases(self) -> Any:
        return iter(self.given)

    # --- the agent

    def owner(self, pid: int) -> int | None:
        client = self.state.clients.get(pid)
        return None if client is None else client.uid

    def waits(self, pid: int) -> bool:
        return bool(self.state.held.of_pid(pid))

    async def policy_diff(self) -> Any:
        return {"same": True, "digest": "abc123", "users": [], "settings": []}

    async def terminate(self, pid: int, *, now: bool, dry_run: bool, by: int) -> Any:
        self.asked.append(("terminate", pid, now, dry_run, by))
        found = acting.ending(self.state, self.state.clients[pid], at_once=now, dry_run=dry_run)
        return {**found, "user": self.state.identities[found["uid"]].name}

    async def terminate_each(self, those: Any, *, now: bool, dry_run: bool, by: int) -> Any:
        self.asked.append(("terminate-each", those, now, dry_run, by))
        found = [one for one in self.state.clients.values() if those.uid in (None, one.uid)]
        rows = [{"pid": one.pid, "uid": one.uid, "user": self.state.identities[one.uid].name} for one in found]
        return {"ok": True, "dry_run": dry_run, "ending": rows}

    async def drain(self, timeout: float | None, by: int, instance: str | None = None) -> Any:
        self.asked.append(("drain", timeout, by, *([instance] if instance else [])))
        return {"ok": True}

    async def resume(self, by: int, instance: str | None = None) -> Any:
        self.asked.append(("resume", by))
        return {"ok": True}

    async def extend_turn(self, uid: int, seconds: float, by: int) -> Any:
        self.asked.append(("extend-turn", uid, seconds, by))
        return {"uid": uid, "user": None, "until": views.when(START + seconds)}

    async def restart(
        self, timeout: float | None, by: int, instance: str | None = None, *, dry_run: bool = False
    ) -> Any:
        if dry_run:
            return {"restarting": False}
        self.asked.append(("restart", timeout, by))
        self.happen("control.ended", pid=400)
        self.happen("action.done", action="StartControl", reason="no control daemon is running", ok=True, text="")
        return {"ok": True}

    async def give_lease(self, body: Any, by: int) -> Any:
        asked = lease_body.asked(body, START)
        source = f"lease {len(self.given) + 1}"
        share = Share(source, **asked.share, job=asked.name or source)
        found = Lease(len(self.given) + 1, share, START, START + 60, by, asked.uid, asked.cgroup, None, asked.name)
        self.given.append(lease_body.shown(found, self.view()))
        return {**self.given[-1], "in_force": self.settled}

    async def end_lease(self, number: int, by: int) -> Any:
        found = [one for one in self.given if one["id"] == number]
        if not found:
            raise Problem(404, f"there is no lease {number}", "lease")
        self.given.remove(found[0])
        return {"ended": number}

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
        served.backend.history.loop = asyncio.get_running_loop()
        served.backend.history.changed = asyncio.Event()
        served.api = Api(served.backend, bounds, served.failures.append)
        orders = Orders(served.backend, _is_admin, served.failures.append)
        orders.listen(listen.bind_administrators(served.path, None))
        orders.listen(listen.bind_orders(served.path))
        await served.api.start(listen.bind(served.path))
        ready.set()
        while not stop.is_set():  # the other side is a thread
            await asyncio.sleep(0.01)
        orders.close()
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
        assert ready.wait(60)
        assert not problems, problems
        yield served
    finally:
        stop.set()
        runner.join(60)
        shutil.rmtree(directory, ignore_errors=True)
    assert not problems, problems
