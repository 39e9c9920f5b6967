"""Who is outside MPS: by what NVML, the kernel and the gate say, never by a name or a number alone."""

from __future__ import annotations

import pytest

from mpsagent.core.outside import Ending, Facts, Outsider, Sighting, ended, may_have_passed, next_step, outside, reason
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy

ONE = Sighting(100, 5000, 1001, "GPU-1", 1 << 30)
PUBLIC = "/tmp/nvidia-mps"


def test_who_passed_the_gate_is_inside_and_one_with_the_same_number_later_is_not() -> None:
    assert outside([ONE], ["GPU-1"], {}) == (ONE,)
    assert outside([ONE], ["GPU-1"], {100: 5000}) == ()
    assert outside([ONE], ["GPU-1"], {100: 4000}) == (ONE,)
    assert outside([ONE], ["GPU-1"], {100: None}) == (), "a server, or one in its log: its start is not known"


def test_other_gpus_are_none_of_ours() -> None:
    assert outside([ONE], ["GPU-2"], {}) == ()


def test_a_process_that_also_draws_is_reported_and_never_ended() -> None:
    """A graphics context in the same process hid it: it was in no record and not in `status`."""
    drawing = ONE._replace(display=True)
    assert outside([drawing], ["GPU-1"], {}) == (drawing,)
    policy = Policy(bypass="terminate")
    assert ended(FOUND._replace(seen=drawing), policy, Identity(1001, "bob"), 999.0) == (None, None)


def test_a_process_on_several_gpus_is_one() -> None:
    assert outside([ONE, ONE._replace(device="GPU-2")], ["GPU-1", "GPU-2"], {}) == (ONE,)


def test_a_client_of_a_daemon_that_is_not_ours_is_outside() -> None:
    private = ONE._replace(mps=True)
    assert outside([private], ["GPU-1"], {}) == (private,)
    assert "another MPS control daemon" in reason(private, Facts(), PUBLIC, None)
    assert "/home/u/mps" in reason(private, Facts(directory="/home/u/mps"), PUBLIC, None)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (Facts(directory="/elsewhere"), "its CUDA_MPS_PIPE_DIRECTORY is /elsewhere"),
        (Facts(directory="", reaches=False), "cannot be reached from it"),
        (Facts(directory=PUBLIC + "/", reaches=True, began=50.0), "started before"),
        (Facts(directory="", reaches=True, began=150.0), "not known"),
        (Facts(), "not known"),
    ],
)
def test_the_likely_reason(facts: Facts, words: str) -> None:
    assert words in reason(ONE, facts, PUBLIC, 100.0)


def test_without_a_variable_only_nvidias_directory_is_found() -> None:
    assert "no CUDA_MPS_PIPE_DIRECTORY" in reason(ONE, Facts(directory=""), "/run/mps", None)


# --- what becomes of them

POLICY = Policy(bypass="terminate", bypass_grace=60.0, kill_grace=5.0)
FOUND = Outsider(ONE, Facts(), 100.0, "the reason is not known")


def test_a_process_is_warned_of_then_asked_then_killed() -> None:
    ending, signal = ended(FOUND, POLICY, None, 100.0)
    assert (ending, signal) == (Ending(160.0), None)
    warned = FOUND._replace(ending=ending)
    assert ended(warned, POLICY, None, 159.0) == (ending, None)
    assert next_step(warned, POLICY) == 160.0
    asked, signal = ended(warned, POLICY, None, 161.0)
    assert (asked, signal) == (Ending(160.0, 161.0), 15)
    again = FOUND._replace(ending=asked)
    assert (ended(again, POLICY, None, 165.0), next_step(again, POLICY)) == ((asked, None), 166.0)
    killed, signal = ended(again, POLICY, None, 166.0)
    assert (killed, signal) == (Ending(160.0, 161.0, killed=True), 9)
    last = FOUND._replace(ending=killed)
    assert (ended(last, POLICY, None, 999.0), next_step(last, POLICY)) == ((killed, None), None)


@pytest.mark.parametrize(
    ("seen", "policy", "who"),
    [
        (ONE, Policy(), None),
        (ONE._replace(uid=0), POLICY, None),
        (ONE._replace(mps=True), POLICY, None),
        (ONE, Policy(bypass="terminate", bypass_exempt=("dcgm",)), Identity(1001, "dcgm")),
        (ONE, Policy(bypass="terminate", bypass_exempt=("1001",)), Identity(1001, "dcgm")),
        (ONE, Policy(bypass="terminate", bypass_exempt=("dcgm",)), None),
    ],
)
def test_who_is_never_ended(seen: Sighting, policy: Policy, who: Identity | None) -> None:
    """Under a policy that reports; root's; another daemon's client, whose end hurts others; an exempt user's."""
    assert ended(FOUND._replace(seen=seen, ending=Ending(0.0)), policy, who, 999.0) == (None, None)


def test_others_are_ended_though_somebody_is_exempt() -> None:
    policy = Policy(bypass="terminate", bypass_exempt=("dcgm",))
    assert ended(FOUND, policy, Identity(1001, "bob"), 0.0)[0] is not None


def test_a_client_of_mps_without_memory_is_not_outside_yet() -> None:
    """Between cuInit and its context NVML lists a client of any control daemon on every GPU, with memory 0: clients of
    another GPU's daemon were reported as outside MPS, and `status` ended with 1 for seconds in a rush of them."""
    for memory, mps, found in ((0, True, False), (1, True, True), (None, True, True), (0, False, True)):
        one = Sighting(5, 50, 1001, "GPU-0", memory, mps=mps)
        assert bool(outside([one], ["GPU-0"], {})) is found


@pytest.mark.parametrize(
    ("change", "directory", "since", "may"),
    [
        ({}, PUBLIC + "/", 5001, True),
        ({}, "", 5001, True),
        ({}, None, 5001, True),
        ({}, "/home/u/mps", 5001, False),
        ({}, PUBLIC, 5000, False),
        ({}, PUBLIC, None, False),
        ({"mps": False}, PUBLIC, 5001, False),
    ],
)
def test_a_client_of_mps_from_before_an_agent_without_records_may_have_passed_the_gate(
    change: dict[str, bool], directory: str | None, since: int | None, may: bool
) -> None:
    """Unknown is not outside. An agent with records, or a process that came later, leaves nothing unknown."""
    one = ONE._replace(**{"mps": True, **change})
    assert may_have_passed(one, Facts(directory=directory), PUBLIC, since) is may


def test_without_a_variable_only_nvidias_directory_may_have_led_to_the_gate() -> None:
    assert not may_have_passed(ONE._replace(mps=True), Facts(directory=""), "/run/mps", 9000)
