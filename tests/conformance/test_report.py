"""The comparer must find what differs: a yardstick that always agrees would be worse than none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import recordings
from tests.conformance import compare, report
from tests.conformance.normalise import Section, sections


def section(**streams: list[str]) -> Section:
    steps = streams.pop("steps", [])
    return Section("S9", "something", steps, streams, {})


def test_same_other_order_and_different_are_told_apart() -> None:
    real = section(control=["a", "b", "c"])
    assert compare.with_real(real, section(control=["a", "b", "c"])).level == compare.SAME
    knock, ask = "Control D1: Accepting connection...", "Control D1: NEW UI"
    moved = compare.with_real(section(control=[knock, ask]), section(control=[ask, knock]))
    assert (moved.level, moved.size) == (compare.ORDER, 0)
    assert moved.differences[0] == "S9 control.log"
    assert moved.differences[1] in (f"~ {knock}", f"~ {ask}")
    more = compare.with_real(real, section(control=["a", "b", "c", "b"]))
    assert more.differences == ("S9 control.log", "+ b")
    changed = compare.with_real(real, section(control=["a", "x", "c"]))
    assert changed.level == compare.DIFFERS
    assert changed.differences == ("S9 control.log", "- b", "+ x")


def test_a_whole_stream_that_is_missing_is_a_difference() -> None:
    verdict = compare.with_real(section(control=["a"], server=["s"]), section(control=["a"]))
    assert verdict.differences == ("S9 server.log", "- s")


def test_the_nearest_of_several_real_runs_counts() -> None:
    near, far = section(control=["a", "b"]), section(control=["a", "c", "d"])
    ours = report.Played(near, [near])
    kept = report.References({"S9": [("here", far), ("here", near)]})
    (result,) = report.judge(ours, kept)
    assert (result.level, result.against) == (compare.SAME, "real here")


def test_threads_may_overtake_each_other_but_not_themselves() -> None:
    knock = ["Control D1: Accepting connection...", "Control D1: NEW CLIENT c1 from user A: Server already exists"]
    ask = ["Control D1: NEW UI", "Control D1: Cmd:ps", "Control D1: UI closed"]
    real = section(control=[*knock, *ask])
    assert compare.with_real(real, section(control=[ask[0], *knock, *ask[1:]])).level == compare.ORDER
    assert compare.with_real(real, section(control=[*knock, ask[1], ask[0], ask[2]])).level == compare.DIFFERS
    lost = ["Server S1: Client {PID: c1, Context ID: 1} exiting.", "Server S1: Client process c1 disconnected"]
    other = ["Server S1: Client {PID: c2, Context ID: 1} exiting."]
    server = Section("S9", "", [], {"server": [*lost, *other]}, {})
    overtaken = Section("S9", "", [], {"server": [lost[0], *other, lost[1]]}, {})
    assert compare.with_real(server, overtaken).level == compare.ORDER
    turned = Section("S9", "", [], {"server": [*lost[::-1], *other]}, {})
    assert compare.with_real(server, turned).level == compare.DIFFERS


def test_answers_keep_their_order() -> None:
    assert compare.with_real(section(steps=["a", "b"]), section(steps=["b", "a"])).level == compare.DIFFERS


def test_a_scenario_that_was_broken_off_is_no_yardstick() -> None:
    text = "[   0.000] ==================== S9 something\n[   0.001] a\n"
    assert list(report.wholes(text)) == ["S9"]
    assert report.wholes(text + "[  60.001] BROKEN OFF: signal SIGALRM\n") == {}


def test_where_a_log_line_falls_at_the_cut_does_not_matter() -> None:
    line = "[   1.000]    server.log| [2026-11-21 00:00:00.000 Server   608] Client process 606 disconnected\n"
    before, after = "[   0.000] ==================== S9 before\n", "[   1.000] ==================== S9 something\n"
    assert report.wholes(before + line + after) == report.wholes(before + after + line)


@pytest.fixture(scope="module")
def found() -> report.References:
    return report.references(real=Path("/nonexistent"))


@pytest.fixture(scope="module")
def recorded() -> dict[str, Section]:
    texts = (recordings.path(name).read_text(errors="replace") for name in recordings.transcripts())
    parts = (sections(text, one_run=True) for text in texts)
    return {each.name: each for part in parts for each in part}


def test_every_recording_agrees_with_itself(found: report.References, recorded: dict[str, Section]) -> None:
    assert len(recorded) > 45
    for each in recorded.values():
        assert compare.with_recording(each, [each], found.known).differences == ()


def test_a_line_that_mps_never_wrote_and_one_that_is_missing_are_found(
    found: report.References, recorded: dict[str, Section]
) -> None:
    real = recorded["R4"]
    lines = [line for line in real.logs["server"] if "sticky error" not in line]
    ours = Section("R4", real.title, real.steps, {**real.logs, "server": [*lines, "Server S1: Hello"]}, real.clients)
    assert compare.with_recording(real, [ours], found.known).differences == (
        "R4 server.log",
        "- Server S: The following client process have a sticky error set:",
        "+ Server S: Hello",
    )


def test_an_answer_that_differs_is_found(found: report.References, recorded: dict[str, Section]) -> None:
    real = recorded["R4"]
    steps = [step.replace("FAULT", "ACTIVE") for step in real.steps]
    verdict = compare.with_recording(real, [Section("R4", "", steps, real.logs, real.clients)], found.known)
    assert "- ctl get_server_status S -> rc=0 | FAULT" in verdict.differences


def test_kept_real_transcripts_are_found_and_compared(tmp_path: Path) -> None:
    text = "[   0.000] ==================== S9 something\n[   0.001] ctl> 'foo' rc=0 1.1ms out='Unknown\\n' err=''\n"
    folder = tmp_path / "2026-01-01-580"
    folder.mkdir()
    (folder / "raw.txt").write_text(text)
    known = report.references(real=tmp_path, recordings=tmp_path)
    lines, good = report.report(report.played(text), known)
    assert good
    assert lines[0].startswith("S9   real 2026-01-01-580 agrees")
    lines, good = report.report(report.played(text.replace("Unknown", "Known")), known)
    assert not good
    assert [line.strip() for line in lines if line.strip()[:1] in "-+"][:2] == ["-   Unknown", "+   Known"]


def test_every_recorded_scenario_has_a_script_or_is_named() -> None:
    """What is recorded and cannot be played is listed here, so that a new recording is not forgotten."""
    from tests.conformance import scenarios

    played_otherwise = {
        "R14": "empty in the recording",
        "M4": "a benchmark, not MPS's behaviour",
    }
    names = {name for each in recordings.transcripts() for name in recordings.sections(each)}
    assert names - set(scenarios.ALL) == set(played_otherwise)
