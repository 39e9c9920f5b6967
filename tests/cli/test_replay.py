"""``mpsagent-cli replay`` on real logs. What is expected was read in the transcripts, not taken from the program."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsagent.core.sessions import Session
from mpsagent.mps import events as ev
from mpsagent_tools.log_files import merged
from mpsagent_tools.logged import Logged
from tests import recordings

PROGRAM = str(Path(sys.executable).with_name("mpsagent-cli"))


def logged(lines: Iterable[ev.Line]) -> tuple[list[Session], Logged]:
    found = Logged()
    for line in lines:
        found.feed(line)
    return found.finish(), found


def told(name: str, *sections: str) -> list[Session]:
    logs = recordings.logs(name, *sections)
    rows, found = logged(merged(io.BytesIO(logs.control), io.BytesIO(logs.server), UTC))
    assert (found.unknown_lines, found.unnamed and name != "09-public-lines.txt") == (0, False)
    return rows


def client(rows: list[Session], pid: int) -> Session:
    (one,) = [row for row in rows if (row.kind, row.pid) == ("client", pid)]
    return one


def at(text: str) -> float:
    return pytest.approx(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp(), abs=0.0005)  # type: ignore


def test_a_forced_shutdown_loses_the_holders_clients_and_serves_who_waited() -> None:
    """Recording 01, S6: 710 computes, 725 of another user waits, `shutdown_server 716 -f` takes the server away."""
    rows = told("01")
    assert (client(rows, 710).outcome, client(rows, 710).ended) == ("lost", at("2026-11-20 23:56:53.773"))
    served = client(rows, 725)
    assert (served.outcome, served.uid) == ("ok", 1002)
    assert (served.came, served.passed) == (at("2026-11-20 23:56:46.746"), at("2026-11-20 23:56:53.831"))


OUTCOMES = [
    ("01", ["S7"], {778: "ended", 763: "ok", 791: "ok"}),  # terminate_client 769 778, and its neighbours
    ("02", ["R4", "R5", "R6"], {1058: "lost", 1031: "faulted", 1036: "ok"}),  # a server that was killed, after a fault
    ("02", ["R10"], {1147: "lost", 1174: "ok"}),  # `quit -t 3`, and a plain `quit`, which waits
    ("03", ["Q3", "Q4"], {633: "faulted", 645: "faulted", 675: "ok"}),  # terminated after it: the first cause counts
    ("03", ["Q6"], {747: "ended", 742: "ok"}),  # stopped, asked, killed after 13 s
    ("05", ["M1", "M2"], {635: "ok", 618: "faulted", 669: "faulted", 678: "refused", 680: "refused"}),  # on two GPUs
    ("06", ["V3", "V4"], {551: "lost", 564: "ok", 579: "lost", 602: "ok"}),  # a stopped server; a killed daemon
]


@pytest.mark.parametrize(("name", "sections", "wanted"), OUTCOMES)
def test_how_clients_ended(name: str, sections: list[str], wanted: dict[int, str]) -> None:
    rows = told(name, *sections)
    assert {pid: client(rows, pid).outcome for pid in wanted} == wanted


def test_a_fault_its_sticky_clients_and_who_came_meanwhile() -> None:
    """Recording 02, R4: 988 did it, the log accuses 976, all three are listed; 1009 is refused until 976 is killed."""
    rows = told("02", "R4")
    (fault,) = [one for one in rows if one.kind == "fault"]
    assert (fault.pid, fault.came, fault.ended, fault.outcome) == (
        978, at("2026-11-21 00:00:31.147"), at("2026-11-21 00:00:35.308"), "recovered",
    )  # fmt: skip
    assert {client(rows, pid).outcome for pid in (976, 987, 988)} == {"faulted"}
    refused = client(rows, 1009)
    assert (refused.outcome, refused.why, refused.uid, refused.passed) == ("refused", "status 807", 1001, None)
    assert client(rows, 1021).outcome == "ok"


def test_limits_are_those_that_the_server_reported() -> None:
    """Recording 06, V3: 45 % and 0x80000000 bytes on device 0."""
    assert client(told("06", "V3"), 551).more["limits"] == {"threads": 45.0, "memory": {"0": 0x80000000}}


@pytest.mark.parametrize("name", recordings.names())
def test_every_client_of_every_recording_has_a_user_and_no_negative_wait(name: str) -> None:
    """Nobody is left out, and no line is unknown."""
    for one in told(name):
        assert one.uid is not None
        assert one.came <= (one.passed or one.came) <= (one.ended or one.passed or one.came)


def short(rows: list[Session]) -> list[tuple[object, ...]]:
    return [(one.pid, one.uid, one.came, one.passed, one.ended, one.outcome) for one in rows]


def test_who_still_waits_or_works_at_the_end_goes_on() -> None:
    rows, _ = logged([
        ev.ServerStarting(1.0, 10, 1001), ev.ServerReady(2.0, 10), ev.ContextConnected(3.0, 10, 7, 0),
        ev.ClientQueued(4.0, 8, 1002), ev.ShutdownTried(9.0, 10),
    ])  # fmt: skip
    assert short(rows) == [(7, 1001, 3.0, 3.0, None, None), (8, 1002, 4.0, None, None, None)]


def test_who_left_while_waiting_was_never_served() -> None:
    """All who wait are attached when the server becomes Ready; who was not had gone, and its pid may come again. When
    MPS gives a server up it drops who waits (`Removed Shm file at`)."""
    rows, _ = logged([
        ev.ClientQueued(1.0, 8, 1002), ev.ServerStarting(2.0, 10, 1002), ev.ServerReady(3.0, 10),
        ev.ServerExited(4.0, 10, 0), ev.ClientQueued(50.0, 8, 1002), ev.ServerStarting(50.1, 11, 1002),
        ev.ServerReady(50.2, 11), ev.ContextConnected(50.2, 11, 8, 0), ev.ClientDisconnected(51.0, 11, 8),
        ev.ClientQueued(60.0, 9, 1002), ev.ServerStarting(60.1, 12, 1002), ev.SharedMemoryRemoved(62.0, "/dev/shm/x"),
    ])  # fmt: skip
    assert short(rows) == [
        (8, 1002, 1.0, None, 3.0, "left"), (8, 1002, 50.0, 50.2, 51.0, "ok"), (9, 1002, 60.0, None, 62.0, "left"),
    ]  # fmt: skip


def test_a_client_without_a_context_on_a_full_server_was_refused() -> None:
    """Recording 02, R13: cuInit succeeded (a channel), the context got MPS_MAX_CLIENTS_REACHED."""
    rows, _ = logged([
        ev.ServerStarting(1.0, 10, 1001), ev.ServerReady(2.0, 10), ev.ContextConnected(3.0, 10, 8, 0),
        ev.ContextConnected(3.1, 10, 8, 1), ev.ContextConnected(3.2, 10, 7, 0), ev.ClientsFull(3.5, 10, 48),
        ev.ClientDisconnected(4.0, 10, 7),
    ])  # fmt: skip
    assert [(one.pid, one.why) for one in rows if one.outcome == "refused"] == [(7, "server full (48 clients)")]
    assert client(rows, 8).outcome is None


GATE, A, B = 900, 1001, 1002


def _second(server: int) -> list[ev.Line]:
    fresh: list[ev.Line] = [ev.ServerStarting(7.0, server, B), ev.ServerReady(7.5, server)] if server == 21 else []
    return [
        ev.ClientQueued(7.0, GATE, B), *fresh, ev.ContextConnected(7.61, server, 102, 0),
        ev.ClientAdmitted(7.7, GATE, B), ev.ContextConnected(7.71, server, 102, 1),
        ev.ClientDisconnected(60.0, server, 102),
    ]  # fmt: skip


@pytest.mark.parametrize("server", [A, 0], ids=["own", "shared"])
def test_the_gate_is_no_client_of_its_own_nodes_logs(server: int) -> None:
    """It announces each connection by its own pid. A server for all says nothing of users: whose a client is is what
    was announced last."""
    lines: list[ev.Line] = [
        ev.ControlStarted(1.0, 10, "/s"), ev.ClientQueued(2.0, GATE, A), ev.ServerStarting(2.0, 20, server),
        ev.ServerReady(2.5, 20), ev.ContextConnected(2.51, 20, 101, 0), ev.ClientAdmitted(2.6, GATE, A),
        ev.ContextConnected(2.61, 20, 101, 1), ev.ClientDisconnected(5.0, 20, 101),
    ]  # fmt: skip
    rows, _ = logged([*lines, ev.ServerExited(5.1, 20, 0), *_second(21)] if server else [*lines, *_second(20)])
    assert short(rows) == [(101, A, 2.51, 2.51, 5.0, "ok"), (102, B, 7.61, 7.61, 60.0, "ok")]


def test_a_tie_of_both_logs_makes_nobody_a_gate() -> None:
    """server.log goes first on a tie: a client may connect before it is announced, while another one waits in vain."""
    lines = [ev.ClientQueued(1.0, 10, A), ev.ContextConnected(2.0, 5, 20, 0), ev.ClientAdmitted(2.0, 20, B)]
    assert [one.pid for one in logged(lines)[0]] == [10, 20]


_PIDS = st.integers(1, 4)
_ANY = st.one_of(
    *(st.builds(what, st.just(0.0), _PIDS, _PIDS) for what in (
        ev.ClientQueued, ev.ClientAdmitted, ev.ServerStarting, ev.ClientDisconnected, ev.FaultDevice, ev.FaultClient,
        ev.ContextDestroyed, ev.TerminationAsked,
    )),
    *(st.builds(what, st.just(0.0), _PIDS) for what in (
        ev.ServerStartup, ev.ServerReady, ev.ShutdownForced, ev.FaultStarted,
    )),
    *(st.builds(what, st.just(0.0), _PIDS, st.just(48)) for what in (
        ev.ServerExited, ev.ClientsFull, ev.ControlExited,
    )),
    st.builds(ev.ContextConnected, st.just(0.0), _PIDS, _PIDS, st.integers(0, 2)),
    st.builds(ev.ClientRefused, st.just(0.0), _PIDS, _PIDS, st.just("status 807")),
    st.builds(ev.ControlStarted, st.just(0.0), _PIDS, st.just("s")),
    st.builds(ev.SharedMemoryRemoved, st.just(0.0), st.just("")),
)  # fmt: skip


@given(st.lists(_ANY, max_size=40))
def test_no_order_of_lines_breaks_it(lines: list[ev.Line]) -> None:
    """Logs are cut, rotated and hostile. A process is there once at a time, and ends after it came."""
    rows, _ = logged([line._replace(at=float(number)) for number, line in enumerate(lines)])
    assert all(one.came <= (one.ended or 99.0) for one in rows)
    alive = [one for one in rows if one.kind == "client" and one.ended is None]
    assert len({one.pid for one in alive}) == len(alive)


# --- the two logs -----------------------------------------------------------------------------------------------------


def test_on_a_tie_the_server_speaks_first() -> None:
    """Recording 02, R4: at 28.932 the server writes its limits and control.log says Ready; limits belong to Ready."""
    logs = recordings.logs("02", "R4")
    order = list(merged(io.BytesIO(logs.control), io.BytesIO(logs.server), UTC))
    ready = next(i for i, line in enumerate(order) if line.what is ev.ServerReady)
    limits = next(i for i, line in enumerate(order) if line.what is ev.ThreadsSet)
    assert order[ready].at == order[limits].at
    assert limits < ready
    assert all(left.at <= right.at for left, right in itertools.pairwise(order))


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_any_chunking_tells_the_same(size: int) -> None:
    """A pipe gives what it has."""

    class Drip(io.BytesIO):
        def read(self, _: int | None = -1, /) -> bytes:
            return super().read(size)

    logs = recordings.logs("06", "V3", "V4")
    assert logged(merged(Drip(logs.control), Drip(logs.server), UTC))[0] == told("06", "V3", "V4")


def test_a_clock_set_back_keeps_the_order_of_the_lines() -> None:
    """One hour back in both logs, between two servers: the second is not told before the first."""
    first, second = recordings.logs("06", "V3"), recordings.logs("06", "V4")
    control = first.control + second.control.replace(b" 00:53:", b" 00:13:")
    server = first.server + second.server.replace(b" 00:53:", b" 00:13:")
    rows, _ = logged(merged(io.BytesIO(control), io.BytesIO(server), UTC))
    assert [(one.pid, one.outcome) for one in rows] == [(551, "lost"), (564, "ok"), (579, "lost"), (602, "ok")]


# --- the program ------------------------------------------------------------------------------------------------------


def files(directory: Path, name: str, *sections: str) -> list[str]:
    logs = recordings.logs(name, *sections)
    (directory / "control.log").write_bytes(logs.control)
    (directory / "server.log").write_bytes(logs.server)
    return ["--control", str(directory / "control.log"), "--server", str(directory / "server.log")]


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environ}
    return subprocess.run([PROGRAM, "replay", *words], env=env, capture_output=True, text=True, timeout=280)


def replay(*words: str, **environ: str) -> Any:
    done = run(*words, "--json", **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_its_json_is_that_of_sessions_and_report(tmp_path: Path) -> None:
    """Of another time zone with TZ: the logs have local time and do not say of where."""
    words = files(tmp_path, "02", "R4")
    body = replay(*words, TZ="UTC")
    assert set(body) == {"sessions", "report", "unknown_lines", "clients_named"}
    first = body["sessions"][0]
    assert (first["pid"], first["uid"], first["began"]) == (976, 1001, "2026-11-21T00:00:28.932+00:00")
    assert (first["waited"], first["worked"], first["outcome"]) == (0.143, 6.437, "faulted")
    (row,) = body["report"]["rows"]
    assert {name: row[name] for name in ("uid", "clients", "refused", "faults")} == {
        "uid": 1001, "clients": 4, "refused": 1, "faults": 3,
    }  # fmt: skip
    assert replay(*words, TZ="Europe/Berlin")["sessions"][0]["began"] == "2026-11-20T23:00:28.932+00:00"


def test_one_log_alone_tells_what_it_can(tmp_path: Path) -> None:
    """control.log knows users and waits, server.log clients and faults. A daemon in the foreground (`-f`) prints both
    in one."""
    words = files(tmp_path, "02", "R4")
    assert {one["uid"] for one in replay(*words[:2])["sessions"]} == {1001}
    assert [one["kind"] for one in replay(*words[2:])["sessions"]].count("fault") == 1
    lines = [line for name in ("server", "control") for line in (tmp_path / f"{name}.log").read_bytes().splitlines()]
    printed = tmp_path / "printed"
    lines.sort(key=lambda line: line[:24])
    printed.write_bytes(b"\n".join(lines) + b"\n")
    assert replay("--both", str(printed)) == replay(*words)
    assert [run(*words).returncode for words in ([], ["--both", str(printed), *words])] == [2, 2]


def test_garbage_is_counted_and_changes_nothing(tmp_path: Path) -> None:
    """NUL bytes, half UTF-8, an endless line and a cut-off end in the middle of a real log."""
    words = files(tmp_path, "02", "R4")
    want = replay(*words)
    path = tmp_path / "server.log"
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(
        20, b"\x00\xff\xfe half \xe2\x82\n" + b"x" * 200_000 + b"\n[2026-13-45 25:61:61.999 Server 978] Startup\n"
    )
    path.write_bytes(b"".join(lines) + b"[2026-11-21 00:")
    got = replay(*words)
    assert got.pop("unknown_lines") == 4
    want.pop("unknown_lines")
    assert [{**one, "cursor": 0} for one in got["sessions"]] == [{**one, "cursor": 0} for one in want["sessions"]]


def test_a_hundred_megabytes_need_little_memory(tmp_path: Path) -> None:
    """A control.log that was polled for months: the memory is that of the sessions, not of the lines."""
    words = files(tmp_path, "01", "S2", "S3", "S4")
    block = b"".join(
        b"[2026-11-20 23:56:40.%03d Control   471] %s\n" % (number % 1000, text)
        for number in range(2000)
        for text in (b"Accepting connection...", b"NEW UI", b"Cmd:get_server_list", b"565", b"UI closed")
    )
    with (tmp_path / "control.log").open("ab") as file:
        for _ in range(100 * 1024 * 1024 // len(block)):
            file.write(block)
    # VmHWM, not ru_maxrss: that one survives fork and exec, so a big test runner would be counted.
    code = (
        "import sys\nfrom mpsagent.cli.verbs import cli\n"
        "try: cli(sys.argv[1:], standalone_mode=False)\n"
        "finally: print([l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')][0], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "replay", *words, "--json"], capture_output=True, text=True, timeout=280
    )
    assert json.loads(done.stdout)["sessions"]
    assert int(done.stderr) < 100 * 1024, "KiB at its peak"


CONTAINER = b"""\
[2021-06-27 07:30:26.216 Control     6] NEW CLIENT 0 from user 0: Server is not ready, push client to pending list
[2021-06-27 07:30:26.216 Control     6] Starting new server 17 for user 0
[2021-06-27 07:30:26.837 Control     6] NEW SERVER 17: Ready
[2021-06-27 07:30:26.838 Control     6] NEW CLIENT 0 from user 0: Server already exists
[2021-06-27 07:30:27.000 Control     6] NEW CLIENT 0 from user 1000: Server is not ready, push client to pending list
"""
OLD = CONTAINER.replace(b"CLIENT 0 from user 0", b"CLIENT 88 from user 0").replace(b"CLIENT 0 from", b"CLIENT 99 from")
OLD_SERVER = b"""\
[2021-06-27 07:30:26.837 Other    17] Volta MPS Server: Received new client request
[2021-06-27 07:30:58.167 Other    17] Volta MPS: Client process disconnected
"""


@pytest.mark.parametrize(("control", "first", "second"), [(CONTAINER, None, None), (OLD, 88, 99)])
def test_who_is_not_named_is_not_said_to_be_never_served(
    tmp_path: Path, control: bytes, first: int | None, second: int | None
) -> None:
    """Recording 09, driver 460 in a container: user 0 was let in when the server was ready, and for how long is not
    known; user 1000 was not. What another policy would have done is not told: nothing is decided on a guess."""
    (tmp_path / "control.log").write_bytes(control)
    (tmp_path / "server.log").write_bytes(OLD_SERVER)
    (tmp_path / "policy.toml").write_text('[turn]\ntime_limit = "1s"\ngrace = "0s"\n')
    words = ["--control", str(tmp_path / "control.log"), "--server", str(tmp_path / "server.log")]
    body = replay(*words, "--policy", str(tmp_path / "policy.toml"))
    assert [(one["pid"], one["uid"], one["outcome"], one["waited"]) for one in body["sessions"]] == [
        (first, 0, "unknown", 0.621),
        (second, 1000, None, 31.167),
    ]
    assert (body["clients_named"], body["would"]) == (False, None)
    assert "does not name all clients" in run(*words).stdout


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/New_York", "UTC"])
@pytest.mark.parametrize("written", ["UTC", "local"])
def test_the_times_of_a_log_are_those_of_its_last_change(tmp_path: Path, zone: str, written: str) -> None:
    """mpsagent starts MPS in UTC, and replay read its logs as local time: 04:01:52 in Tokyo was shown as 19:01:52."""
    moment = datetime(2026, 11, 20, 19, 1, 52, tzinfo=UTC)
    shown = moment if written == "UTC" else moment.astimezone(ZoneInfo(zone))
    line = f"[{shown:%Y-%m-%d %H:%M:%S}.000 Control   720] NEW CLIENT 726 from user 1001: Server already exists\n"
    log = tmp_path / "control.log"
    log.write_text(line)
    os.utime(log, (moment.timestamp() + 30, moment.timestamp() + 30))
    code = (
        "import sys; from pathlib import Path; from mpsagent_tools.log_files import lines_of; "
        "print([one.at for one in lines_of(Path(sys.argv[1]), None)])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(log)], env={**os.environ, "TZ": zone}, capture_output=True,
                          text=True, check=True, cwd=Path(__file__).parents[2])  # fmt: skip
    assert json.loads(done.stdout) == [moment.timestamp()]
