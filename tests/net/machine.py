"""The net: a node that is played through the core in fixed time, and all that people and programs see of it, as text.

No process, file or clock: scripted inputs go through the harness of tests/core, the pages come from the API's own code,
the words from mpsagent-cli itself.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs, urlsplit

from click.testing import CliRunner

import mpsagent
from mpsagent.agent.conditions import Conditions, note_conditions, note_daemon
from mpsagent.agent.node import Node
from mpsagent.agent.records import action_record
from mpsagent.api.instances import Everything
from mpsagent.api.metrics import Metrics
from mpsagent.cli import ask, client, event_lines, verbs
from mpsagent.core import actions as act
from mpsagent.core import inputs as inp
from mpsagent.core import placement
from mpsagent.core.coordinator import Core, Step
from mpsagent.core.model import Key
from mpsagent.core.outside import Outsider
from mpsagent.core.sessions import Sessions
from mpsagent.core.transitions import transition_fields
from mpsagent.policy import apart, instances
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy
from mpsagent.snapshot.problem import Problem
from mpsagent.wire import codec, link
from tests.core.harness import NAMES, POLICY, Stage, policy


class Records:
    """What happened, as the history keeps it, and the metrics count it."""

    problem = None

    def __init__(self, metrics: Metrics) -> None:
        self.metrics, self.first = metrics, ""
        self.notes: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.sessions = Sessions()

    def append(self, kind: str, at: float, **fields: object) -> int:
        self.rows.append(json.loads(json.dumps({"seq": self.last + 1, "at": at, "kind": kind, **fields})))
        instance = str(fields.get("instance", self.first))
        user = apart.split(instance)
        self.sessions.take(self.rows[-1])
        self.metrics.hear(instance if user is None else user[0], self.rows[-1])
        return self.last

    @property
    def last(self) -> int:
        return len(self.rows)

    newest = last
    oldest = 1

    def since(self, cursor: int, limit: int) -> list[dict[str, Any]]:
        return self.rows[cursor : cursor + limit]


class Machine:
    """A node with its instances, and what the api has received of it: for its pages it is a Node."""

    old, started, moved = None, 1000.0, 0.0

    def __init__(self, text: str = POLICY, **how: Any) -> None:
        self.policy = policy(text)
        self.metrics = Metrics(NAMES.get)
        self.history, self.conditions = Records(self.metrics), Conditions()
        self.clock, self.people = SimpleNamespace(at=lambda at: at, now=lambda: 0.0), SimpleNamespace(known={})
        self.policy_errors: tuple[Any, ...] = ()
        self.policy_loaded: float | None = 1000.0
        self.gpus = SimpleNamespace(
            seen={}, at=None, problem=None, nvml=SimpleNamespace(xids={}, xids_seen={})
        )  # fmt: skip
        self.names = SimpleNamespace(
            known=lambda uid: Identity(uid, NAMES[uid]) if uid in NAMES else None, look_up=self._look_up,
            uid_of=self._uid_of,
        )  # fmt: skip
        found = instances.instances(self.policy, ())
        self.single, self.first = len(found) == 1, found[0].instance
        self.history.first = self.first
        self.played = [Instance(self, one, text, **how) for one in found]
        self.placing = SimpleNamespace(places=self._places)
        self.environment = instances.environment(found)
        self.environment_of = lambda name: self.environment
        self.backend = Everything(self)  # type: ignore[arg-type]

    @property
    def agents(self) -> list[Any]:
        return [one.agent for one in self.played]

    def up(self) -> Machine:
        for one in self.played:
            one.start_agent()
        return self.run(1.0)

    @property
    def one(self) -> Instance:
        return self.played[0]

    def run(self, seconds: float) -> Machine:
        for one in self.played:
            one.run(seconds)
        return self

    async def _look_up(self, uid: int) -> Identity:
        return Identity(uid, NAMES.get(uid))

    async def _uid_of(self, name: str) -> int | None:
        return next((uid for uid, known in NAMES.items() if known == name), None)

    def _places(self) -> list[placement.Place]:
        return [placement.place_of(one.policy, one.view()) for one in self.agents]

    def _look_at_api(self, now: float) -> None:
        """It is there."""

    @property
    def page(self) -> Any:
        return Node.page(self)  # type: ignore[arg-type]

    def _instances_shown(self) -> Any:
        return Node._instances_shown(self)  # type: ignore[arg-type]

    def _shown(self, agent: Any, key: Key) -> Any:
        return Node._shown(self, agent, key)  # type: ignore[arg-type]

    def now(self) -> float:
        return self.one.now

    def name(self, uid: int) -> str | None:
        known = self.identity(uid)
        return None if known is None else known.name

    def identity(self, uid: int | None) -> Identity | None:
        return next((one.identities[uid] for one in self.played if uid in one.identities), None)

    def all_conditions(self) -> Any:
        for one in self.played:
            one.note()
        return Node.all_conditions(self)  # type: ignore[arg-type]

    def reject(self, text: str) -> None:
        """A policy with mistakes is to be read."""
        from mpsagent.policy.files import load

        _, self.policy_errors = load([("policy.toml", text)])
        self.record = self.history.append
        Node._policy_rejected(self, self.policy_errors, "the old one is in force", self.one.now)  # type: ignore[arg-type]


class Agent:
    """What the API takes for an Agent."""

    def __init__(self, played: Instance) -> None:
        self._played, self.clock = played, SimpleNamespace(now=lambda: played.now)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._played, name)


class Instance(Stage):
    """One instance: the harness's, which also writes down what happens as the agent does."""

    core: Core

    def __init__(self, node: Machine, mine: Policy, text: str, **how: Any) -> None:
        self.node, self.mine = node, mine
        self.name = mine.instance
        super().__init__(text, together=mine.sharing != "turns", shared=mine.multiuser, **how)
        self.agent = Agent(self)
        self.history, self.conditions = node.history, Conditions()
        self._conditions: dict[Key, Conditions] = {None: self.conditions}
        node.started = self.now
        self.memory: dict[int, int] = {}
        self.observer = SimpleNamespace(memory=lambda: self.memory)
        self.bypass = SimpleNamespace(found={})
        self.people = SimpleNamespace(known=self.identities)
        self.names = node.names
        self.wire: list[str] = []
        """What gate and agent said to each other."""
        self._begun: dict[int, int] = {}

    def _policy(self, text: str) -> Policy:
        """The harness has the policy of one instance."""
        return instances.of(policy(text), self.mine.instance)

    @property
    def state(self) -> Any:
        return self.core.state

    @property
    def devices(self) -> Any:
        return self.state.devices

    def view(self) -> Any:
        return self.core.view()

    def computes_outside(self, *those: Outsider) -> None:
        self.bypass.found = {one.seen.pid: one for one in those}

    def record(self, kind: str, at: float, **fields: object) -> int:
        lane = fields.pop("lane", None)
        name = apart.daemon_name(self.name, lane if isinstance(lane, int) else None)
        return self.history.append(kind, at, **(fields if self.node.single else {"instance": name, **fields}))

    @property
    def lanes(self) -> dict[Key, Any]:
        """What the node takes for lanes."""
        return {
            key: SimpleNamespace(
                key=key,
                name=apart.daemon_name(self.name, key),
                conditions=self._conditions.setdefault(key, Conditions()),
            )
            for key in self.core.engines
        }

    def note(self) -> None:
        note_conditions(self.conditions, self.core, self.now)
        for key, lane in self.lanes.items():
            if key is not None:
                note_daemon(lane.conditions, self.core, key, self.now)

    def _open(self, action: act.OpenDaemon) -> None:
        self.node.single = False
        super()._open(action)

    def _carry(self, step: Step) -> None:
        for action in step.actions:
            if isinstance(action, act.Report):
                self.record(action.kind, self.now, lane=action.daemon, **action_record(action, self.policy))
        for one in step.transitions:
            self.record(one.kind, one.at, lane=one.daemon, **transition_fields(one))
        super()._carry(step)

    def _do(self, action: act.Action) -> None:
        if isinstance(action, act.TellGate):
            self._said("agent", action.message)
        elif not isinstance(action, act.Report | act.Freeze | act.Thaw | act.OpenDaemon | act.CloseDaemon):
            fields = {**action_record(action, self.policy), "lane": action.daemon}
            self._begun[id(action)] = self.record("action", self.now, action=type(action).__name__, **fields)
        super()._do(action)

    def feed(self, *events: inp.Input | act.Done) -> None:
        for one in events:
            if isinstance(one, act.Done) and (number := self._begun.get(id(one.action))) is not None:
                self.record(
                    "action.done" if one.ok else "action.failed", one.at, action=type(one.action).__name__,
                    begun=number, ok=one.ok, text=one.text, lane=one.action.daemon,
                    **action_record(one.action, self.policy),
                )  # fmt: skip
        super().feed(*events)

    def _look(self, core: Core) -> None:
        if self.core is core:
            self.note()
        super()._look(core)

    def ask_gpus(self, **memory: int) -> None:
        """NVML says what processes use: p100=…"""
        self.memory = {int(pid[1:]): size for pid, size in memory.items()}
        self.feed(inp.MemorySeen(self.now, {pid: {"GPU-0": size} for pid, size in self.memory.items()}))

    # --- the link -----------------------------------------------------------------------------------------------------

    def _soon(self, number: int, one: inp.Input) -> None:
        said = one.what if isinstance(one, inp.Of) else one
        if isinstance(said, inp.GateSaid):
            self._said("gate", said.what)
            said = said._replace(what=link.decode_from_gate(codec.encode(said.what)))
            one = inp.Of(one.daemon, said) if isinstance(one, inp.Of) else said
        super()._soon(number, one)

    def _said(self, who: str, message: link.FromGate | link.FromAgent) -> None:
        packet = codec.encode(message)
        (link.decode_from_gate if who == "gate" else link.decode_from_agent)(packet)  # type: ignore[operator]
        self.wire.append(f"{self.now:.3f} {who}: {packet.decode()}")


# --- what is seen -----------------------------------------------------------------------------------------------------

State = Callable[[], tuple[Machine, str]]
"""Plays a state; with the user for whom `explain` is asked."""


def seen(machine: Machine, who: str, whole: bool = False) -> str:
    """All of a state. ``whole``: `explain` with what every policy says."""
    with _fixed(machine):
        parts = []
        for words in ("status", "queue", "clients", "servers", "events -n 1000", f"policy explain {who}", "probe"):
            done = CliRunner().invoke(verbs.cli, words.split())
            assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
            lines = [one for one in done.output.splitlines() if whole or not one.endswith("built-in default")]
            text = "".join(f"{one}\n" for one in lines)
            parts.append(f"$ mpsagent-cli {words}\n{text}[exit status {done.exit_code}]\n")
        backend, event = machine.backend, machine.backend.event
        page = json.loads(json.dumps(backend.status()))
        for one in page["instances"]:  # with a single one most of it stands in the page
            for key in [key for key, value in one.items() if page.get(key) == value and key in page]:
                del one[key]
        parts.append("/v1/status\n" + _keys(page))
        for name in ("queue", "clients", "servers", "leases"):
            parts.append(f"/v1/{name}\n" + "".join(f"{json.dumps(one)}\n" for one in getattr(backend, name)()))
        rows = ({**event(row), "sentence": "…"} for row in machine.history.rows)  # it stands above
        parts.append("/v1/events\n" + "".join(f"{json.dumps(row)}\n" for row in rows))
        status, answer = _answer(machine, f"/v1/policy/explain?user={who}")
        whole = whole or status != 200
        parts.append(f"/v1/policy/explain {status}\n" + _keys(answer if whole else {"now": answer["now"]}))
        text = machine.metrics.text(backend.status(), 0, 0, 0).decode()
        lines = [one for one in text.splitlines() if not one.startswith("#") and not one.endswith(" 0.0")]
        parts.append("/metrics, without buckets and zeros\n" + "".join(f"{one}\n" for one in lines if _steady(one)))
    return "\n".join(parts)


def words_of_metrics(machine: Machine) -> str:
    """Names, kinds and help of all of them."""
    with _fixed(machine):
        text = machine.metrics.text(machine.backend.status(), 0, 0, 0).decode()
    return "".join(f"{one}\n" for one in text.splitlines() if one.startswith("#") and _steady(one))


def _steady(line: str) -> bool:
    """Not what the machine on which the test runs decides."""
    return not any(word in line for word in ("mpsagent_process_", "mpsagent_gpu_seconds_total{", "_bucket{"))


def _keys(page: dict[str, Any]) -> str:
    lines: list[str] = []
    for key, value in page.items():
        if isinstance(value, list) and value:
            lines += [f"{key}:", *(f"  {json.dumps(one)}" for one in value)]
        else:
            lines.append(f"{key}: {json.dumps(value)}")
    return "".join(f"{one}\n" for one in lines)


@contextmanager
def _fixed(machine: Machine) -> Iterator[None]:
    """One moment, one user who asks, and this machine as the agent that is asked."""

    def now() -> datetime:
        return datetime.fromtimestamp(machine.one.now, UTC)

    def request(path: str, target: str, timeout: float = 0.0) -> tuple[int, bytes]:
        status, found = _answer(machine, target)
        return status, json.dumps(found).encode()

    with ExitStack() as fixed:
        for where, name, value in (
            (client, "request", request), (ask, "now", now), (event_lines, "now", now),
            (os, "getuid", lambda: 0), (os, "getpid", lambda: 40), (mpsagent, "__version__", "0.0-net"),
        ):  # fmt: skip
            fixed.enter_context(patch.object(where, name, value))
        yield


def _answer(machine: Machine, target: str) -> tuple[int, Any]:
    backend, asked = machine.backend, urlsplit(target)
    match asked.path.removeprefix("/v1/"):
        case "status":
            return 200, backend.status()
        case "queue" | "clients" | "servers" as name:
            return 200, {name: list(getattr(backend, name)())}
        case "events":
            return 200, {"events": [backend.event(one) for one in machine.history.rows], "cursor": machine.history.last}
        case "/healthz":
            ok, problems = backend.health()
            return 200 if ok else 503, {"ok": ok, "problems": problems}
        case "policy/explain":
            try:
                return 200, asyncio.run(backend.explain(parse_qs(asked.query)["user"][0]))
            except Problem as problem:
                return problem.status, problem.body()
    raise AssertionError(target)
