"""Every scenario, in the order in which they are played: those of the recordings, then open questions.

Each is independent of the others and selectable by name. A scenario of the recordings does the same commands in the
same order; where a recording started in the middle of something, what led there is played first and goes into a section
of its own (`NAME before`), so that the recorded section can be compared by itself. Pauses are shorter than in the
recordings where those waited without need.
"""

from __future__ import annotations

from tests.conformance.script import ALL, A, B, C, D, Scenario, play, scenario, sleeper, spinner, stop_all

# Importing them registers them.
from tests.conformance import recorded_commands, recorded_faults, recorded_recovery, recorded_limits  # isort: skip
from tests.conformance import questions, questions_ending, questions_starting, questions_waiting  # isort: skip
from tests.conformance import questions_handovers  # isort: skip

__all__ = ["ALL", "A", "B", "C", "D", "Scenario", "play", "scenario", "sleeper", "spinner", "stop_all"]
REGISTERED = (
    recorded_commands,
    recorded_faults,
    recorded_recovery,
    recorded_limits,
    questions,
    questions_ending,
    questions_starting,
    questions_waiting,
    questions_handovers,
)
