"""Every record reads as a sentence and none ever fails. The words are in tests/golden/journal.txt."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mpsagent.core.sentences import PHRASES, SENTENCES, sentence
from mpsagent.core.words import named

NAMES = {1001: "alice", 1002: "bob", 0: "root"}.get


def test_each_sentence_names_its_instance_where_there_are_several() -> None:
    """Seen: "new clients are admitted again", and at the other of two instances it was not."""
    for record in (
        {"kind": "drain.ended", "reason": "new clients are admitted again"},
        {"kind": "drain.resumed", "by": 0},
    ):
        assert sentence({**record, "instance": "gpu1"}, NAMES).startswith("gpu1: ")
        assert not sentence(record, NAMES).startswith("gpu1")


def test_an_unknown_uid_stays_a_number() -> None:
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
    st.sampled_from([*SENTENCES, "action", "action.done", "action.failed", "turn.warning", "of a later version", ""]),
    st.dictionaries(st.sampled_from(_FIELDS), _VALUES),
    st.sampled_from([*PHRASES, "SomethingNew"]),
)
@example("policy.rejected", {"errors": ""}, "")
@example("drain.ordered", {"by": 0, "timeout": float("inf")}, "")
def test_no_record_is_too_strange_to_be_told(kind: str, fields: dict[str, Any], action: str) -> None:
    """Records outlive the version that wrote them, and the disk may have torn one."""
    text = sentence({"kind": kind, **({"action": action} if kind.startswith("action") else {}), **fields}, NAMES)
    assert isinstance(text, str)
    assert text
