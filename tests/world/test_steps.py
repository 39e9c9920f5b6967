"""The world's model of MPS says in every step what NVIDIA's programs said (tests/conformance/real)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance import report, scenarios
from tests.world import steps

REFERENCES = report.references()
REAL = {gpu: Path(__file__).with_name(f"handovers-{gpu.lower()}.txt") for gpu in ("H100", "H200")}


@pytest.mark.parametrize(
    "name", [name for name in scenarios.ALL if name in REFERENCES.real and name not in steps.LEFT_OUT]
)
def test_a_scene_is_as_it_was_on_real_mps(name: str) -> None:
    raw = steps.play(name)
    if raw is None:
        assert name in ("X2", "X10", "X25", "X27")  # what no world has
        return
    said, good, differences = steps.row(name, report.played(raw)[name], REFERENCES)
    assert good, "\n".join([said, *differences])


HANDOVERS = report.References(
    {
        name: [(f"an {gpu}", whole)]
        for gpu, raw in REAL.items()
        for name, whole in report.wholes(steps.as_here(raw)).items()
    },
    {},
    REFERENCES.known,
)


@pytest.mark.parametrize("name", HANDOVERS.real)
def test_a_death_in_a_hand_over_is_as_it_was_on_real_mps(name: str) -> None:
    """On an H100 and an H200 with driver 580."""
    raw = steps.play(name)
    assert raw is not None
    said, good, differences = steps.row(name, report.played(raw)[name], HANDOVERS)
    assert said, name
    assert good, "\n".join([said, *differences])


def test_a_model_that_says_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "mpsagent_sim.texts.EXITING_CLIENT", "Client {{PID: {pid}, Context ID: {context}}} went {count}"
    )
    raw = steps.play("X3")
    assert raw is not None
    assert not steps.row("X3", report.played(raw)["X3"], REFERENCES)[1]
