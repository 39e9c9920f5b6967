"""What the logs already say when the agent comes: both in order of time, nothing missed, nothing written twice."""

from __future__ import annotations

import os
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest

from mpsagent.agent import catch_up as catching
from mpsagent.agent.catch_up import Caught, foreign
from mpsagent.api.without_agent import not_yet_written
from mpsagent.core import transitions as tr
from mpsagent.core.coordinator import Core
from mpsagent.mps import events as ev
from mpsagent.mps.loglines import LogParser
from mpsagent.mps.skim import Skimmer
from tests import recordings

SOCKET = "/p/control"


class Everything(Skimmer):
    """Leaves nothing out."""

    def take(self, data: bytes) -> bytes:
        return data

    def end(self) -> bytes:
        return b""


def caught(place: Path, control: LogParser | None = None) -> Caught:
    first, second = control or LogParser("control", UTC), LogParser("server", UTC)
    return catching.catch_up(str(place / "control.log"), str(place / "server.log"), first, second, SOCKET)


def story(found: Caught) -> Any:
    """The state in the end, what happened, and how far the logs were read."""
    core = Core()
    happened = core.absorb(found.events)
    return core.state, happened, found.control, found.server


@pytest.mark.parametrize("name", [name for name in recordings.names() if any(recordings.sections(name).values())])
@pytest.mark.parametrize("step", [100, 1000])
def test_skimmed_or_not_both_recorded_logs_give_the_same(
    name: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in small steps; also after a rotation (the first lines gone)."""
    monkeypatch.setattr(catching, "STEP", step)
    for logs in recordings.sections(name).values():
        (tmp_path / "server.log").write_bytes(logs.server)
        for gone in (0, len(logs.control) // 3):
            (tmp_path / "control.log").write_bytes(logs.control[gone:])
            with monkeypatch.context() as patch:
                patch.setattr(catching, "Skimmer", Everything)
                whole = story(caught(tmp_path))
            assert story(caught(tmp_path)) == whole


LINES = (
    "[2026-11-20 23:56:21.000 Control    40] Starting control daemon using socket /p/control\n"
    "[2026-11-20 23:56:21.100 Control    61] Starting new server 61 for user 1000\n"
    "[2026-11-20 23:56:21.200 Control    99] Starting control daemon using socket /q/control\n"
    "[2026-11-20 23:56:21.300 Control    62] Starting new server 62 for us"
)


def test_reading_goes_on_inside_a_line(tmp_path: Path) -> None:
    """The agent starts while MPS writes: the line that was half there must not be lost, nor another daemon's start end
    what is known of ours."""
    (tmp_path / "control.log").write_text(LINES)
    parser = LogParser("control", UTC)
    found = caught(tmp_path, parser)
    assert found.control is not None
    assert found.control.offset == len(LINES)
    assert found.server is None
    assert [event.what for event in found.events] == [ev.ControlStarted, ev.ServerStarting]
    (event,) = parser.feed(b"er 1001\n")
    assert event == ev.ServerStarting(event.at, 62, 1001)


def test_only_the_last_daemon_of_our_directory_counts(tmp_path: Path) -> None:
    """What an earlier one said is over: its servers are gone."""
    again = LINES.replace("23:56:2", "23:57:2").replace("61", "71")
    (tmp_path / "control.log").write_text(LINES + "er 1001\n" + again)
    assert [event.server for event in caught(tmp_path).events if event.what is ev.ServerStarting] == [71]


def test_on_a_tie_a_servers_own_line_comes_first(tmp_path: Path) -> None:
    """Its last one belongs before `Server S exited`."""
    (tmp_path / "control.log").write_text(
        "[2026-11-20 23:56:21.000 Control    40] Starting control daemon using socket /p/control\n"
        "[2026-11-20 23:56:21.500 Control    40] Server 61 exited with status 0\n"
    )
    (tmp_path / "server.log").write_text("[2026-11-20 23:56:21.500 Server    61] Client process 7 disconnected\n")
    kinds = [event.what for event in caught(tmp_path).events]
    assert kinds == [ev.ControlStarted, ev.ClientDisconnected, ev.ServerExited]


def test_logs_that_are_missing_say_nothing(tmp_path: Path) -> None:
    """The follower says that they are."""
    assert caught(tmp_path) == Caught([], None, None)


@pytest.mark.parametrize("marked", [True, False])
def test_ten_gigabytes_of_nothing_do_not_hold_up_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marked: bool
) -> None:
    """Files with a hole: what stands before and behind it is read, of the rest a bounded part."""
    start, server = LINES.splitlines(keepends=True)[:2]
    said = "[2026-11-20 23:56:22.000 Server    61] Startup\n"
    for name, first, last in (("control", start if marked else "", server), ("server", said, said)):
        with (tmp_path / f"{name}.log").open("w") as file:
            file.write(first)
            file.truncate(10 << 30)
            file.seek(0, os.SEEK_END)
            file.write(f"\n{last}")
    pread, total = os.pread, 0

    def counted(fd: int, size: int, offset: int) -> bytes:
        nonlocal total
        total += size
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    found = caught(tmp_path)
    assert [event.what for event in found.events if event.what is not ev.Unknown][-2:] == [
        ev.ServerStarting, ev.ServerStartup,
    ]  # fmt: skip
    assert total < 4 * (catching.CONTROL_MOST + catching.SERVER_MOST)
    assert found.passed_over > 9 << 30


@pytest.mark.parametrize("most", [1, 100, 200, 300, 10_000])
def test_of_a_long_log_the_last_lines_are_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """No line is taken up in its middle: half of one might say something else."""
    monkeypatch.setattr(catching, "CONTROL_MOST", most)
    monkeypatch.setattr(catching, "SERVER_MOST", most)
    text = LINES.replace("/q/control", "/p/control") + "er 1001\n"
    server = "".join(f"[2026-11-20 23:56:21.{at}00 Server    61] Client process {at} disconnected\n" for at in range(9))
    (tmp_path / "control.log").write_text(text)
    (tmp_path / "server.log").write_text(server)
    found = caught(tmp_path)
    assert not any(event.what is ev.Unknown for event in found.events)
    assert (found.passed_over == 0) is (most == 10_000)
    said = [event.pid for event in found.events if event.what is ev.ClientDisconnected]
    assert said == list(range(9))[9 - len(said) :]


def test_a_path_with_a_link_is_still_ours(tmp_path: Path) -> None:
    """/var/run and /run."""
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    ours = f"{tmp_path}/run/control"
    assert not foreign(ev.ControlStarted(1.0, 5, ours), ours)
    assert not foreign(ev.ControlStarted(1.0, 5, f"{tmp_path}/link/control"), ours)
    assert foreign(ev.ControlStarted(1.0, 5, f"{tmp_path}/other/control"), ours)
    assert not foreign(ev.ServerReady(1.0, 5), ours)


def test_two_equal_lines_are_two_and_a_written_one_is_not_written_again() -> None:
    one, other = tr.ServerReady(10.001, 4, 1001), tr.ServerReady(10.002, 5, 1001)
    known = [{"seq": 1, "at": 10.001, "kind": "server.ready", "pid": 4}]
    assert not_yet_written([one, one, other], known) == [one, other]
    assert not_yet_written([one], known) == []
