"""The normaliser: chance goes, what MPS decided stays. Were it to drop too much, every comparison would agree."""

from __future__ import annotations

import pytest

from tests import recordings
from tests.conformance import normalise, repeats
from tests.conformance.normalise import kinds, sections
from tests.conformance.repeats import squeeze

RUN = """[   0.000] ==================== S9 something
[   0.044] start ('-d',) rc=0 out='' err=''
[   0.044]    control.log| [2026-11-20 23:56:21.414 Control   {d}] Starting control daemon using socket {pipe}/control
[   0.525] spawn c1 pid {c} uid {u} ('sleep', {s})
[   1.000]    control.log| [2026-11-20 23:56:21.865 Control   {d}] NEW CLIENT {c} from user {u}: Server is not ready
[   1.000]    control.log| [2026-11-20 23:56:21.958 Control   {v}] Starting new server {v} for user {u}
[   1.000]    server.log| [2026-11-20 23:56:22.204 Server   {v}] Client {{PID: {c}, Context ID: 0}} connected
[   1.000]    server.log| [2026-11-20 0:0:0 Server   {v}] Received new client request for {{PID: {g}, Context ID: 7}}
[   1.500] ctl> 'get_client_list {v}' rc=0 {ms}ms out='{c}\\n' err=''
[   2.000] c1 pid {c} rc=0 output:
[   2.000]    c1| [   0.384 pid {c} uid {u}] devices 1 using {gpu}
[   2.000]    c1| [   0.384 pid {c} uid {u}] sms 38 meminfo CUDA_SUCCESS free {free} MiB total 143155 MiB
[   2.000]    c1| [   2.384 pid {c} uid {u}] done {n} iterations, last CUDA_SUCCESS
"""
ONE = {
    "d": "471", "c": "606", "v": "608", "u": "1001", "s": "6", "g": "-2147483648", "ms": "1.1", "pipe": "/tmp/mps/pipe",
    "gpu": "GPU-513e171f", "free": "1881", "n": "120",
}  # fmt: skip
OTHER = {
    "d": "31284", "c": "31285", "v": "31286", "u": "20001", "s": "2.5", "g": "5", "ms": "12.9", "pipe": "/x/S9/pipe",
    "gpu": "GPU-a0a1a2a3", "free": "1852", "n": "49",
}  # fmt: skip


def only(text: str) -> normalise.Section:
    (section,) = sections(text)
    return section


def test_two_runs_that_differ_by_chance_are_one() -> None:
    assert only(RUN.format(**ONE)) == only(RUN.format(**OTHER))


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("rc=0 output", "rc=14 output"),
        ("sms 38", "sms 132"),
        ("free 1881", "free 900"),
        ("free 1881", "free 142565"),
        ("last CUDA_SUCCESS", "last CUDA_ERROR_MPS_RPC_FAILURE"),
        ("from user 1001", "from user 1002"),
        ("Context ID: 0} connected", "Context ID: 1} connected"),
        ("Server is not ready", "Server already exists"),
        ("out='606\\n'", "out=''"),
        ("err=''\n[   2", "err='Cannot find MPS control daemon process\\n'\n[   2"),
        ("rc=0 1.1ms", "rc=1 1.1ms"),
        ("rc=0 1.1ms", "rc=0 2100.1ms"),
        ("Starting new server", "Started new server"),
    ],
)
def test_what_mps_decided_is_kept(line: str, changed: str) -> None:
    """Each change is one that a wrong simulator would make."""
    text = RUN.format(**ONE)
    assert line in text
    assert only(text) != only(text.replace(line, changed))


def test_names_are_given_by_role() -> None:
    section = only(RUN.format(**ONE))
    assert section.steps == [
        "start ('-d',) rc=0",
        "spawn c1 A sleep",
        "ctl get_client_list S1 -> rc=0",
        "  c1",
        "c1 ended 0",
    ]
    assert section.logs["control"][-1] == "Control S1: Starting new server S1 for user A"
    assert section.logs["server"] == [
        "Server S1: Client {PID: c1, Context ID: 0} connected",
        "Server S1: Received new client request for {...}",
    ]
    assert section.clients["c1"][-1] == "done, last CUDA_SUCCESS"


def test_a_scenario_and_what_came_before_share_what_is_known_but_not_the_names() -> None:
    """A server started before the recorded part is still a server in it, and its first."""
    text = (
        RUN.format(**ONE).replace("S9 something", "S9 before")
        + "[   0.0] ==================== S9 the recorded part\n"
        + "[   3.0] ctl> 'get_server_list' rc=0 1.0ms out='608\\n' err=''\n"
    )
    before, recorded = sections(text)
    assert (before.title, recorded.title) == ("before", "the recorded part")
    assert recorded.steps == ["ctl get_server_list -> rc=0", "  S1"]


def backoff(*waits: int, server: str = "S1") -> list[str]:
    lines = []
    for number, wait in enumerate(waits):
        lines += [
            f"Control D1: Try shutting down server {server}, backoff is {'enabled' if number else 'disabled'}",
            f"Control D1: Server {server} has {2 + number % 2} active worker threads. Server will not shutdown.",
            f"Control D1: Control will try shutting down server {server} again in at most {wait}ms",
        ]
    return lines


def test_the_back_off_is_there_once_however_long_it_went() -> None:
    short = repeats.backed_off(backoff(200, 400, 800))
    assert short == repeats.backed_off(backoff(200, 400, 800, 1600, 3200))
    assert short[-1] == "Control D1: (back-off of S1 goes on, enabled, doubling)"


@pytest.mark.parametrize("waits", [(200, 200, 200), (200, 400, 600), (100, 200, 400), (200,)])
def test_a_back_off_that_does_not_double_is_seen(waits: tuple[int, ...]) -> None:
    assert repeats.backed_off(backoff(*waits)) != repeats.backed_off(backoff(200, 400, 800))


def test_a_question_asked_again_and_again_is_there_once() -> None:
    block = ["NEW UI", "Cmd:get_server_list", "S1", "UI closed"]
    assert squeeze(["a", *block * 7, "b"]) == ["a", *block, "b"]
    assert squeeze(["a", "b", "a", "c"]) == ["a", "b", "a", "c"]


def test_other_repeats_count() -> None:
    """A client that connects for its context as well as for itself writes the same line twice, and must."""
    twice = ["Accepting connection...", "NEW CLIENT c1 from user A: Server already exists"] * 2
    assert squeeze(twice) == twice


@pytest.mark.parametrize(
    ("seconds", "name"),
    [
        (0.0, "at once"),
        (0.299, "at once"),
        (0.3, "under 1 s"),
        (1.0, "1 to 3 s"),
        (3.0, "3 to 10 s"),
        (10.0, "over 10 s"),
    ],
)
def test_delay_classes_at_their_edges(seconds: float, name: str) -> None:
    assert normalise.delay_class(seconds) == name


@pytest.mark.parametrize(
    ("free", "limit"),
    [(901, "1 GiB"), (806, "1 GiB"), (1881, "2 GiB"), (1534, "2 GiB"), (1808, "2 GiB"), (2757, "3 GiB"),
     (3582, "4 GiB"), (5829, "6 GiB"), (5630, "6 GiB"), (8805, "9 GiB"), (142565, "most"),
     (141467, "most"), (139486, "most")],
)  # fmt: skip
def test_free_memory_shows_the_limit_that_was_recorded_for_it(free: int, limit: str) -> None:
    """The values and limits of the recordings."""
    assert normalise._memory(free, 143155) == f"free {limit} total 143155 MiB"


def test_kinds_forget_particulars_only() -> None:
    assert kinds(["Server S1: Client {PID: c1, Context ID: 1} connected"]) == kinds(
        ["Server S2: Client {PID: c9, Context ID: 1} connected", "Server S1: Client {PID: c1, Context ID: 1} connected"]
    )
    assert kinds(["Server S1: Client {PID: c1, Context ID: 1} connected"]) != kinds(
        ["Server S1: Client {PID: c1, Context ID: 0} connected"]
    )


@pytest.mark.parametrize("name", recordings.transcripts())
def test_recordings_are_understood(name: str) -> None:
    """No process id, date or UUID may be left over in any section of a recording."""
    import re

    found = sections(recordings.path(name).read_text(errors="replace"), one_run=True)
    assert [section.name for section in found] == list(recordings.sections(name))
    for section in found:
        text = section.text().replace("99999", "")  # asked for on purpose
        assert not re.search(r"\[2026-|GPU-[0-9a-f]|\bPID: [1-9]\d*,|server [1-9]|pid \d", text), text
