"""Every record reads as a sentence, with names where they are known, and none ever fails."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mpsagent.core import actions as act
from mpsagent.core import transitions as tr
from mpsagent.core.sentences import _PHRASES, _SENTENCES, named, sentence
from mpsagent.mps.limits import Limits

NAMES = {1001: "alice", 1002: "bob", 0: "root"}.get


def test_root_has_a_name_without_a_name_service() -> None:
    """Seen: "ordered by uid 0"."""
    action = {"kind": "action.done", "action": "SignalClient", "pid": 7, "uid": 1001, "signal": 15, "ok": True,
              "reason": "ordered by uid 0; SIGTERM to client 7 of user 1001"}  # fmt: skip
    assert sentence(action, {1001: "alice"}.get) == "sent SIGTERM to client 7 of alice: ordered by root"


def test_each_sentence_names_its_instance_where_there_are_several() -> None:
    """Seen: "new clients are admitted again", and at the other of two instances it was not."""
    for record in (
        {"kind": "drain.ended", "reason": "new clients are admitted again"},
        {"kind": "drain.resumed", "by": 0},
    ):
        assert sentence({**record, "instance": "gpu1"}, NAMES).startswith("gpu1: ")
        assert not sentence(record, NAMES).startswith("gpu1")


def test_a_rejected_policy_says_what_holds_instead() -> None:
    """Seen at a first start: "the one before stays in force", where there was none and no one was admitted."""
    record = {"kind": "policy.rejected", "errors": ["a.toml:1: x", "a.toml:2: y"]}
    first = {**record, "kept": "there is no earlier policy, so no one is admitted"}
    assert sentence(first, NAMES) == (
        "the policy was rejected; there is no earlier policy, so no one is admitted: a.toml:1: x (and 1 more)"
    )
    assert sentence(record, NAMES) == "the policy was rejected; the one before stays in force: a.toml:1: x (and 1 more)"
    short = {**record, "errors": ["a.toml:1: x; write y"], "first": "a.toml:1: x"}
    assert sentence(short, NAMES) == "the policy was rejected; the one before stays in force: a.toml:1: x"


def test_a_warning_for_computing_outside_mps_says_how_long_is_left() -> None:
    record = {"kind": "outside_mps.warned", "at": 10.0, "pid": 7, "uid": 1002, "ends": 70.0}
    assert sentence(record, NAMES) == "process 7 of bob uses the GPU outside MPS and is ended in 1m00s"


def of(one: tr.Transition) -> str:
    return sentence({"kind": one.kind, "at": one.at, **tr.transition_fields(one)}, NAMES)


@pytest.mark.parametrize(
    ("happened", "text"),
    [
        (tr.TurnBegan(1.0, 1002, 0.104), "the GPU goes to bob, 0.10s after the user before"),
        (tr.TurnBegan(1.0, 1003, None), "the GPU goes to user 1003"),
        (tr.TurnEnded(1.0, 1001, 90.0, False), "the turn of alice ended after 1m30s"),
        (
            tr.TurnEnded(1.0, 1001, 1830.0, True, "turn.time_limit = 30m, p.toml:4"),
            "the turn of alice expired after 30m30s (turn.time_limit = 30m, p.toml:4)",
        ),
        (
            tr.FaultClient(1.0, 5, 70, 1001),
            "client 70 of alice, on server 5, lost its CUDA context in a fault and has to exit",
        ),
        (
            tr.ClientConnected(1.0, 70, 1001, 3.2, Limits(20.0, {0: 1 << 30}), True),
            "process 70 of alice was admitted after 3.20s, limits: 20 % of threads, 1G (fallback limits)",
        ),
        (
            tr.ClientEnded(1.0, 70, 1001, 5, "lost", 12.0, 0.0),
            "client 70 of alice ended after 12.0s: its server exited first",
        ),
        (
            tr.FaultBegan(1.0, 5, None),
            "server 5 is in FAULT and takes no new clients: mpsagent recovers it, and waiting users keep their places",
        ),
        (tr.FaultOver(1.0, 5, 6.3, True), "server 5 recovered from its fault after 6.30s"),
        (
            tr.ServerStartFailed(1.0, 5, "", 3),
            "server 5 did not start (3 in a row): MPS gives no reason",
        ),
        (
            tr.HandoverFailed(1.0, 70, 1001, "connect", "no socket", False),
            "process 70 of alice was not handed over (connect: no socket); it waits and is tried again",
        ),
        (tr.FrontEndUsed(1.0, 9, 0, "quit"), "root (process 9) told the control daemon: quit"),
        (
            tr.FrontEndUsed(1.0, 9, 1001, "quit", refused=True),
            "alice (process 9) was not allowed to tell the control daemon: quit",
        ),
    ],
)
def test_what_happened_is_told(happened: tr.Transition, text: str) -> None:
    """Times worked out by hand."""
    assert of(happened) == text


def test_every_transition_has_a_sentence_of_its_own() -> None:
    """A new one without words would be told as its kind and numbers."""
    kinds = {one.kind for one in tr.Transition.__subclasses__()}
    assert kinds
    assert kinds <= _SENTENCES.keys()


def test_every_action_has_a_phrase_of_its_own() -> None:
    """But what the gate is told: what came of that is on record."""
    classes = {
        name
        for name, one in inspect.getmembers(act, dataclasses.is_dataclass)
        if isinstance(one, type) and issubclass(one, act.Action) and one not in (act.Action, act.Report, act.TellGate)
    }
    assert classes == set(_PHRASES)


def _done(action: act.Action, ok: bool = True, text: str = "", kind: str = "action.done") -> str:
    fields = act.action_fields(action)
    return sentence({"kind": kind, "action": type(action).__name__, "ok": ok, "text": text, **fields}, NAMES)


TERMINATE = act.TerminateClient(
    server=5, pid=70, uid=1001, start=3, deadline=5.0, reason="the turn of user 1001 is over", rule="turn.time_limit"
)


def test_an_action_and_its_outcome_are_one_sentence() -> None:
    """What was done, to whom, why; and when it failed, how."""
    assert _done(TERMINATE) == "asked MPS to terminate client 70 of alice: the turn of alice is over"
    assert _done(TERMINATE, False, "no answer") == (
        "asked MPS to terminate client 70 of alice: the turn of alice is over; it failed: no answer"
    )
    assert _done(TERMINATE, kind="action").endswith("(begun)")
    reported = dataclasses.replace(TERMINATE, enforce=False)
    assert _done(reported).startswith("report mode, would have asked MPS to terminate client 70")


def test_reports_are_told_by_their_reason_with_names() -> None:
    """The engine writes uids; who reads knows people."""
    text = "user 1001 has had the GPU for 30m00s while user 1002 waits; its turn ends in 30.0s"
    assert sentence({"kind": "turn.warning", "uid": 1001, "reason": text}, NAMES) == (
        "alice has had the GPU for 30m00s while bob waits; its turn ends in 30.0s"
    )
    assert named("admitted users: 1001, 1009, 1002", NAMES) == "admitted users: alice, 1009, bob"


_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=8), st.integers(), max_size=2),
)  # fmt: skip
_FIELDS = (
    "uid pid server reason text why at seconds waited limits outcome admissions action ok enforce signal count files "
    "digest errors lost stage gap forced timeout recovered by"
).split()


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # on a busy machine
@given(
    st.sampled_from([*_SENTENCES, "action", "action.done", "action.failed", "turn.warning", "of a later version", ""]),
    st.dictionaries(st.sampled_from(_FIELDS), _VALUES),
    st.sampled_from([*_PHRASES, "SomethingNew"]),
)
@example("policy.rejected", {"errors": ""}, "")
def test_no_record_is_too_strange_to_be_told(kind: str, fields: dict[str, Any], action: str) -> None:
    """Records outlive the version that wrote them, and the disk may have torn one."""
    text = sentence({"kind": kind, **({"action": action} if kind.startswith("action") else {}), **fields}, NAMES)
    assert isinstance(text, str)
    assert text
