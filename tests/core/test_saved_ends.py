"""Ends of clients that the agent before had begun go on under the section of the policy that ordered them."""

from __future__ import annotations

import pytest

from mpsagent.core.coordinator import _section


@pytest.mark.parametrize(
    ("rule", "section"),
    [
        ("turn.time_limit", "turn"),
        ("user.alice.turn.time_limit", "turn"),
        ("group.lab.turn.on_expiry", "turn"),
        ("user.turn.turn.time_limit", "turn"),
        ("user.turn.max_runtime", "limits"),
        ("user.timeouts.max_runtime", "limits"),
        ("limits.on_limit_exceeded", "limits"),
        ("timeouts.fault_recovery", "timeouts"),
        ("order", "order"),
        ("drain", "order"),
    ],
)
def test_a_resumed_end_has_the_section_of_its_rule(rule: str, section: str) -> None:
    """A user with the name of a section lost work, though limits were only reported: the name was taken for it."""
    assert _section(rule) == section
