"""How limits are told to the daemon, and which of its answers confirm them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsagent.gate.limits import Verdict, commands, judge, printed
from mpsagent.mps.limits import Limits
from mpsagent.mps.units import GIB, MIB

SMALL = Limits(20, {0: 20389 * MIB})


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (20389 * MIB, "19G"),
        (3333 * MIB, "3G"),
        (GIB, "1G"),
        (500 * MIB, "500M"),
        (1023 * MIB, "1023M"),
        (0, None),
        (1, "1M"),
    ],
)
def test_memory_is_printed_in_whole_gibibytes_rounded_down(size: int, text: str | None) -> None:
    assert printed(Limits(50, {0: size}), 0) == text


def test_the_session_names_both_defaults_and_servers() -> None:
    assert commands(SMALL, [0, 1], [77]) == [
        "get_server_list",
        "get_server_status 77",
        "set_default_active_thread_percentage 20.0",
        "set_default_device_pinned_mem_limit 0 20389M",
        "set_default_device_pinned_mem_limit 1 0G",
        "get_default_active_thread_percentage",
        "get_default_device_pinned_mem_limit 0",
        "get_default_active_thread_percentage",
        "get_default_device_pinned_mem_limit 1",
        "get_default_active_thread_percentage",
        "set_active_thread_percentage 77 20.0",
        "set_device_pinned_mem_limit 77 0 20389M",
        "set_device_pinned_mem_limit 77 1 0G",
        "get_active_thread_percentage 77",
        "get_device_pinned_mem_limit 77 0",
        "get_active_thread_percentage 77",
        "get_device_pinned_mem_limit 77 1",
        "get_active_thread_percentage 77",
    ]


GOOD = ["20.0", "20.0", "19G", "20.0"]


@pytest.mark.parametrize(
    ("answers", "verdict"),
    [
        (["77", *GOOD, *GOOD], Verdict((77,))),
        ([*GOOD], Verdict((), again=True)),
        ([*GOOD, "Server 77 not found", "Server 77 not found"], Verdict((), again=True)),
        (["78", *GOOD, *GOOD], Verdict((78,), again=True)),
        (["77\n78", *GOOD, *GOOD], Verdict((77, 78), again=True)),
    ],
)
def test_answers_of_a_daemon_that_did_it(answers: list[str], verdict: Verdict) -> None:
    assert judge(SMALL, [0], [77], answers) == verdict


@pytest.mark.parametrize("status", ["ACTIVE", 'Unknown command "get_server_status"'])
def test_a_server_that_works_or_cannot_say_takes_clients(status: str) -> None:
    """Drivers 470 and 535 do not know the command."""
    assert judge(SMALL, [0], [77], ["77", status, *GOOD, *GOOD]) == Verdict((77,))


def test_a_server_that_has_just_ended_is_no_answer_about_limits() -> None:
    assert judge(SMALL, [0], [77], ["Server 77 not found", *GOOD]) == Verdict((), again=True)


@pytest.mark.parametrize("rest", [[*GOOD, *GOOD], [*GOOD, "0.0"], []])
def test_a_server_in_fault_takes_no_one_whatever_its_limits(rest: list[str]) -> None:
    verdict = judge(SMALL, [0], [77, 78], ["77\n78", "ACTIVE", "FAULT", *rest])
    assert verdict.fault
    assert verdict.servers == (77, 78)


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (["77", "20.0", "20.0", "20.0", *GOOD], "memory limit of device 0 reads none, not 19G"),
        (["77", "20.0", "20.0", "20G", "20.0", *GOOD], "reads 20G, not 19G"),
        (["77", "20.0", "30.0", "19G", "20.0", *GOOD], "percentage reads 30.0"),
        (["77", *GOOD, "20.0", "20.0", "19G", "60.0"], "server 77's active thread percentage reads 60.0"),
        (["77", *GOOD, "Server 77 not found!"], "not found"),
        (["Insufficient privileges for UID 0."], "Insufficient privileges"),
        (["77", *GOOD, *GOOD, "more"], "nothing more was expected"),
        ([], 'answered "nothing"'),
        ([str(pid) for pid in range(100)], "100 servers"),
    ],
)
def test_anything_else_is_not_a_confirmation(answers: list[str], why: str) -> None:
    verdict = judge(SMALL, [0], [77], answers)
    assert verdict.why is not None
    assert why in verdict.why
    assert not verdict.never, "MPS may say otherwise the next time: the client waits for that"


def test_a_daemon_without_memory_limits_confirms_that_there_are_none() -> None:
    """Driver 470 does not know these commands. A limit that is wanted is not confirmed, and the reason is said."""
    no = [f'Unknown command "{word}_default_device_pinned_mem_limit"' for word in ("set", "get")]
    its = [f'Unknown command "{word}_device_pinned_mem_limit"' for word in ("set", "get")]
    answers = ["77", "20.0", no[0], "20.0", no[1], "20.0", "20.0", its[0], "20.0", its[1], "20.0"]
    assert judge(Limits(20.0), [0], [77], answers) == Verdict((77,))
    verdict = judge(SMALL, [0], [77], answers)
    assert (
        verdict.why == "the default memory limit of device 0 reads none, which this driver's MPS does not have, not 19G"
    )
    assert verdict.never, "it is no use to ask again"


@pytest.mark.parametrize("below_normal", [False, True])
def test_the_client_priority_is_told_last_and_read_back(below_normal: bool) -> None:
    wanted = Limits(20, {0: 20389 * MIB}, below_normal)
    told = commands(wanted, [0], [77], priority=True)
    number = str(int(below_normal))
    assert told == [
        *commands(SMALL, [0], [77]), f"set_default_client_priority {number}", "get_default_client_priority",
    ]  # fmt: skip
    assert judge(wanted, [0], [77], ["77", *GOOD, *GOOD, number], priority=True) == Verdict((77,))
    other = judge(wanted, [0], [77], ["77", *GOOD, *GOOD, str(1 - int(number))], priority=True)
    assert other.why == f"the default client priority reads {1 - int(number)}, not {number}"
    nothing = judge(wanted, [0], [77], ["77", *GOOD, *GOOD], priority=True)
    assert nothing.why == f"the default client priority reads nothing, not {number}"
    # driver 470
    no = [f'Unknown command "{word}_default_client_priority"' for word in ("set", "get")]
    verdict = judge(wanted, [0], [77], ["77", *GOOD, *GOOD, *no], priority=True)
    assert (verdict.why is not None, verdict.never) == (below_normal, below_normal)


@given(
    st.floats(0.01, 100),
    st.dictionaries(st.integers(0, 3), st.integers(0, 1 << 45)),
    st.sets(st.integers(1, 999), max_size=3),
)
def test_a_daemon_that_prints_as_mps_does_confirms_every_value(
    threads: float, memory: dict[int, int], servers: set[int]
) -> None:
    limits = Limits(threads, memory)
    values: dict[str, str] = {}
    answers = []
    for command in commands(limits, range(4), servers):
        word, *rest = command.split()
        if word == "get_server_list":
            answers += [str(server) for server in sorted(servers)]
            continue
        if word == "get_server_status":
            answers.append("ACTIVE")
            continue
        default = "default" in word
        target = "" if default else rest.pop(0)
        if "percentage" in word:
            if rest:
                values[target] = f"{float(rest[0]):.1f}"
            answers.append(values[target])
        elif word.startswith("set"):
            size = int(rest[1][:-1]) * (1024 if rest[1].endswith("G") else 1)
            values[f"{target} {rest[0]}"] = (f"{size // 1024}G" if size >= 1024 else f"{size}M") if size else ""
        else:
            answers += [text for text in [values[f"{target} {rest[0]}"]] if text]
    assert judge(limits, range(4), servers, answers) == Verdict(tuple(sorted(servers)))
