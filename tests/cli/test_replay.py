"""``mpsagent-cli replay`` on real logs, with the real program."""

from __future__ import annotations

import io
import itertools
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mpsagent.cli.replay import merged, story_json
from mpsagent.core.story import tell
from mpsagent.mps import events as ev
from tests import recordings

PROGRAM = str(Path(sys.executable).with_name("mpsagent-cli"))


def files(directory: Path, name: str, *sections: str) -> list[str]:
    logs = recordings.logs(name, *sections)
    (directory / "control.log").write_bytes(logs.control)
    (directory / "server.log").write_bytes(logs.server)
    return ["--control", str(directory / "control.log"), "--server", str(directory / "server.log")]


def replay(*words: str) -> Any:
    done = subprocess.run([PROGRAM, "replay", *words, "--json"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_json_has_the_promised_shape(tmp_path: Path) -> None:
    """Recording 02, R4, with every promised key, ISO times that parse, and one of six outcomes."""
    body = replay(*files(tmp_path, "02", "R4"), "--zone", "UTC")
    assert set(body) == {"servers", "clients", "faults", "refused", "unknown_lines", "clients_named"}
    assert body["unknown_lines"] == 0
    (server,) = body["servers"]
    assert set(server) == {
        "pid", "uid", "started", "ready", "exited", "exit_status", "forced", "limits", "faults",
    }  # fmt: skip
    assert server["limits"] == {"threads": 100.0, "memory": {}}
    assert datetime.fromisoformat(server["ready"]) == datetime(2026, 11, 21, 0, 0, 28, 932000, UTC)
    assert {key for one in body["clients"] for key in one} == {
        "pid", "uid", "server", "queued", "connected", "disconnected", "wait_seconds", "outcome",
    }  # fmt: skip
    outcomes = {one["pid"]: one["outcome"] for one in body["clients"]}
    assert outcomes == {976: "faulted", 987: "faulted", 988: "faulted", 1009: "refused", 1021: "ok"}
    (fault,) = body["faults"]
    assert (fault["server"], fault["sticky"]) == (978, [976, 987, 988])
    assert fault["recovered"] == "2026-11-21T00:00:35.308+00:00"
    assert [(one["pid"], one["reason"]) for one in body["refused"]] == [(1009, "status 807")]


def test_a_time_zone_moves_all_times(tmp_path: Path) -> None:
    """The logs have local time and do not say of where."""
    words = files(tmp_path, "06", "V3")
    assert replay(*words, "--zone", "Europe/Berlin")["servers"][1]["started"] == "2026-11-20T23:53:24.291+00:00"
    done = subprocess.run([PROGRAM, "replay", *words, "--zone", "Mars"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "is not a time zone" in done.stderr) == (2, True)


def test_one_log_alone_tells_what_it_can(tmp_path: Path) -> None:
    """control.log knows users and waits, server.log clients and faults."""
    words = files(tmp_path, "02", "R4")
    control, server = replay(*words[:2]), replay(*words[2:])
    assert {one["uid"] for one in control["clients"]} == {1001}
    assert len(server["faults"]) == 1
    assert subprocess.run([PROGRAM, "replay"], capture_output=True, timeout=60).returncode == 2


def test_a_daemon_in_the_foreground_tells_the_same_story(tmp_path: Path) -> None:
    """``-f`` prints the lines of both logs as they come."""
    words = files(tmp_path, "02", "R4")
    lines = [line for name in ("server", "control") for line in (tmp_path / f"{name}.log").read_bytes().splitlines()]
    printed = tmp_path / "printed"
    printed.write_bytes(b"\n".join(sorted(lines, key=lambda line: line[:24])) + b"\n")
    assert replay("--both", str(printed)) == replay(*words)
    assert subprocess.run([PROGRAM, "replay", "--both", str(printed), *words], capture_output=True).returncode == 2


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
    assert got == want


def test_a_hundred_megabytes_need_little_memory(tmp_path: Path) -> None:
    """A control.log that was polled for months: the memory is that of the records, not of the lines."""
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
        "import sys\nfrom mpsagent.cli.main import cli\n"
        "try: cli(sys.argv[1:], standalone_mode=False)\n"
        "finally: print([l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')][0], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "replay", *words, "--json"], capture_output=True, text=True, timeout=280
    )
    assert len(json.loads(done.stdout)["servers"]) == 2
    assert int(done.stderr) < 100 * 1024, "KiB at its peak"


def test_on_a_tie_the_server_speaks_first() -> None:
    """Recording 02, R4: at 28.932 the server writes its limits and control.log says Ready; limits belong to Ready."""
    logs = recordings.logs("02", "R4")
    order = list(merged(io.BytesIO(logs.control), io.BytesIO(logs.server), UTC))
    ready = next(i for i, event in enumerate(order) if event.what is ev.ServerReady)
    limits = next(i for i, event in enumerate(order) if event.what is ev.ThreadsSet)
    assert order[ready].at == order[limits].at
    assert limits < ready
    assert all(left.at <= right.at for left, right in itertools.pairwise(order))


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_any_chunking_tells_the_same_story(size: int) -> None:
    """A pipe gives what it has; the story must not depend on it."""

    class Drip(io.BytesIO):
        def read(self, _: int | None = -1, /) -> bytes:
            return super().read(size)

    logs = recordings.logs("06", "V3", "V4")
    whole = tell(merged(io.BytesIO(logs.control), io.BytesIO(logs.server), UTC))
    drips = tell(merged(Drip(logs.control), Drip(logs.server), UTC))
    assert story_json(whole) == story_json(drips)


def test_a_clock_set_back_keeps_the_order_of_the_lines() -> None:
    """One hour back in both logs, between two servers: the second is not told before the first."""
    first, second = recordings.logs("06", "V3"), recordings.logs("06", "V4")
    control = first.control + second.control.replace(b" 00:53:", b" 00:13:")
    server = first.server + second.server.replace(b" 00:53:", b" 00:13:")
    story = story_json(tell(merged(io.BytesIO(control), io.BytesIO(server), UTC)))
    assert [one["pid"] for one in story["servers"]] == [542, 553, 571, 581, 604]
    assert [one["outcome"] for one in story["clients"]] == ["lost", "ok", "lost", "ok"]


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
    known; user 1000 was not. What mpsagent would have done is not told: nothing is decided on a guess."""
    (tmp_path / "control.log").write_bytes(control)
    (tmp_path / "server.log").write_bytes(OLD_SERVER)
    (tmp_path / "policy.toml").write_text('[switch]\nafter = "1s"\ngrace = "0s"\n')
    words = ["--control", str(tmp_path / "control.log"), "--server", str(tmp_path / "server.log")]
    body = replay(*words, "--policy", str(tmp_path / "policy.toml"))
    assert [(one["pid"], one["uid"], one["outcome"], one["wait_seconds"]) for one in body["clients"]] == [
        (first, 0, "unknown", 0.621),
        (second, 1000, "never_served", 31.167),
    ]
    assert (body["clients_named"], body["would"]) == (False, None)
    page = subprocess.run([PROGRAM, "replay", *words], capture_output=True, text=True, timeout=60).stdout
    assert "does not name all clients" in page
