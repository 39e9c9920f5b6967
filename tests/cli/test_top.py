"""`mpsagent-cli top` on real terminals: driven in tmux, at 80x24 and 200x50."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mpsagent.cli import ask, top_page, top_screen
from mpsagent.cli.top_page import TopView, page
from mpsagent.core.inputs import Peer
from mpsagent.core.model import Client
from mpsagent.mps.limits import Limits
from tests.api.stand_in import ADMIN, OTHER, START, USER, Served, serve
from tests.cli.program import PROGRAM, run

with_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Screen:
    """A terminal of this size in a tmux server of its own."""

    def __init__(self, path: Path, width: int, height: int, **environ: str) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="top", dir="/tmp"))
        env = {"MPSAGENT_SOCKET": str(path), "LC_ALL": "C.UTF-8", **environ}
        words = [*(f"{name}={value}" for name, value in env.items()), PROGRAM, "top", "--every", "0.3"]
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height),
                   f"env {shlex.join(words)}; echo status $?; sleep 600")  # fmt: skip

    def _tmux(self, *words: str) -> str:
        command = ["tmux", "-S", str(self._place / "socket"), *words]
        env = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "HOME": "/"}
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=env).stdout

    def keys(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def lines(self) -> list[str]:
        return self._tmux("capture-pane", "-p").splitlines()

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def shows(self, wanted: Callable[[list[str]], object], what: str) -> list[str]:
        """Waits until the screen is so."""
        end = time.monotonic() + 60
        while True:
            lines = self.lines()
            with suppress(LookupError, ValueError):  # it is being drawn: half of it may be there
                if wanted(lines):
                    return lines
            assert time.monotonic() < end, f"{what}:\n" + "\n".join(lines)
            time.sleep(0.05)

    def has(self, words: str) -> list[str]:
        return self.shows(lambda lines: any(words in line for line in lines), words)

    def close(self) -> None:
        self._tmux("kill-server")
        shutil.rmtree(self._place, ignore_errors=True)


def client(number: int, uid: int, threads: float = 20.0) -> Client:
    peer = Peer(1000 + number, uid, uid, 10_000 + number, command=f"python work-{number}.py")
    return Client(peer, since=START + 5 - number / 10, waited=number / 2, limits=Limits(threads, {0: 1 << 30}))


@pytest.fixture
def served() -> Iterator[Served]:
    """Client 501 of alice, three processes that wait, and forty more of alice."""
    with serve() as one:
        state = one.backend.state
        more = {1000 + number: client(number, USER) for number in range(40)}
        one.backend.state = replace(state, clients={**state.clients, **more})
        one.backend.memory = {1000 + number: (number + 1) << 30 for number in range(40)}
        yield one


@pytest.fixture(params=[(80, 24), (200, 50)], ids=["80x24", "200x50"])
def screen(request: pytest.FixtureRequest, served: Served) -> Iterator[Screen]:
    one = Screen(served.path, *request.param)
    try:
        yield one
    finally:
        one.close()


def rows(lines: list[str]) -> list[str]:
    """Those of the table; raises ValueError while there is none."""
    heads = (["STATE", "PID"], ["USER", "CLIENTS"])
    first = [line.split()[:2] in heads for line in lines].index(True)
    return [line for line in lines[first + 1 : -1] if line.strip()]


@with_tmux
def test_it_is_driven_by_keys(served: Served, screen: Screen) -> None:
    """Sorted, filtered, by user, ended after a question, left; what is not ended is not."""
    lines = screen.has("q quit")
    assert "healthy" in lines[0]
    assert lines[2].startswith("in use  by alice since")
    assert any(line.startswith("waiting 2 users with 3 processes; first bob") for line in lines)
    first = next(number for number, line in enumerate(lines) if line.startswith("STATE"))
    assert "44 clients, by state" in lines[first - 1]
    assert len(rows(lines)) == min(44, len(lines) - first - 2)

    for _ in range(5):
        screen.keys("s")
    screen.has("by memory")
    screen.shows(lambda lines: "40.0 GiB" in rows(lines)[0], "the largest first")
    screen.keys("r")
    screen.has("by memory reversed")
    screen.shows(lambda lines: "40.0 GiB" not in rows(lines)[0], "the largest last")

    screen.keys("/", *"bob")
    screen.has("only with “bob”")
    screen.keys("Enter")
    screen.has("q quit")
    screen.shows(lambda lines: {line.split()[2] for line in rows(lines)} == {"bob"}, "bob's alone")
    screen.keys("Escape")
    screen.has("44 clients")

    screen.keys("u")
    screen.has("WHY IT WAITS")
    screen.shows(
        lambda lines: (
            [line.split()[:3] for line in rows(lines) if "alice" in line.split()[0]] == [["alice", "41", "0"]]
        ),
        "alice in one row",
    )
    screen.keys("k")
    screen.has("u shows clients")
    screen.keys("u", "r", "/", *"501", "Enter")
    screen.has("1 client, by memory")
    screen.keys("k")
    screen.has("y/N: end client 501 of alice? Its work is lost. (python train.py)")
    screen.keys("n")
    screen.has("client 501 was left alone")
    assert served.backend.asked == []
    screen.keys("k")
    screen.has("y/N:")
    screen.keys("y")
    screen.has("client 501 is being ended")
    assert served.backend.asked == [("terminate", 501, False, False, os.getuid())]
    screen.keys("q")
    screen.has("status 0")


@with_tmux
def test_arrows_scroll_and_the_size_may_change(served: Served) -> None:
    """The chosen row stays in sight; the page is that of the terminal as it is now."""
    one = Screen(served.path, 80, 24)
    try:
        one.has("q quit")
        one.keys("End")
        one.shows(lambda lines: "waiting" in rows(lines)[-1], "the last row")
        one.keys("Home")
        one.shows(lambda lines: "running" in rows(lines)[0] or "starting" in rows(lines)[0], "the first row")
        one.keys("NPage", "NPage")
        one.resize(60, 12)
        lines = one.shows(lambda lines: len(lines) == 12 and lines[-1].startswith("↑↓"), "12 lines")
        assert max(map(len, lines)) <= 60
        one.resize(120, 40)
        one.shows(lambda lines: len(rows(lines)) >= 31, "31 rows")
        one.resize(20, 3)
        one.shows(lambda lines: len(lines) == 3, "3 lines")
        one.keys("q")
        one.resize(80, 24)
        one.has("status 0")
    finally:
        one.close()


@with_tmux
def test_an_agent_that_goes_away_is_said_and_comes_back(served: Served) -> None:
    """What was there stays readable; nothing is to be started again."""
    with serve() as other:
        one = Screen(other.path, 80, 24, NO_COLOR="1")
        one.has("3 processes")
        path = other.path
        moved = path.with_name("away")
        path.rename(moved)
        administrators = path.with_name("mpsagent-admin.sock")
        administrators.rename(path.with_name("away-admin"))
        lines = one.has("mpsagent does not answer")
        assert any("train.py" in line for line in lines)
        moved.rename(path)
        one.has("q quit")
        one.keys("C-c")
        one.has("status 0")
        one.close()


def test_into_a_pipe_it_is_one_page(served: Served) -> None:
    """For scripts and mails: all rows, no control characters."""
    done = run(served, "top")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(rows([*done.stdout.splitlines(), ""])) == 44
    assert "\x1b" not in done.stdout
    assert run(None, "--socket", "/nonexistent", "top").returncode == 3


def test_the_keys_stay_when_an_end_was_refused(served: Served) -> None:
    """The line of keys was gone until escape."""
    backend, view = served.backend, TopView()
    view.message = "not ended: uid 20002 may not end client 1"
    from datetime import UTC, datetime

    for height in (24, 60):
        page = top_page.page(backend.status(), list(backend.clients()), view, datetime.now(UTC), 120, height)
        assert [one.text for one in page[-2:]] == [view.message, top_page.KEYS[:120]]
        assert len(page) == height


def test_the_page_never_exceeds_the_terminal(served: Served) -> None:
    """Any size, also with hostile names; and each column can be sorted by."""
    backend = served.backend
    backend.state = replace(backend.state, clients={1: client(1, ADMIN), 2: client(2, OTHER)})
    status, clients = backend.status(), list(backend.clients())
    clients[0]["command"] = "\x1b[2Jrm \u202e" + "x" * 500
    from datetime import UTC, datetime

    now = datetime(2026, 11, 22, tzinfo=UTC)
    for users in (False, True):
        view = TopView()
        view.users = users
        view.message = "refused" * users
        for column in range(len(view.columns)):
            for width, height in ((1, 1), (20, 3), (80, 24), (500, 200)):
                view.sort[users], view.reverse = column, column % 2 == 1
                lines = top_page.page(status, clients, view, now, width, height)
                assert len(lines) == height
                assert max(len(line.text) for line in lines) <= width
                assert "\x1b" not in "".join(line.text for line in lines)


@pytest.mark.parametrize(("words", "shown"), [
    ("python3 -IS /usr/local/bin/cuda-client sleep 600", "cuda-client sleep 600"),
    ("/usr/bin/python3.11 train.py --lr 1", "train.py --lr 1"),
    ("/usr/bin/python3 -m torch.distributed.run x.py", "python3 -m torch.distributed.run x.py"),
    ("/bin/sh -c true", "sh -c true"),
    ("/opt/nvidia/bin/nvcc x", "nvcc x"),
    ("python3", "python3"),
    ("", ""),
])  # fmt: skip
def test_the_command_is_the_program_and_not_its_interpreter(words: str, shown: str) -> None:
    """All rows looked the same: `python3 -IS /usr/lo…`."""
    assert ask.shown_command(words.split(" ")) == shown


def test_at_80_columns_nothing_that_matters_is_cut(served: Served) -> None:
    """The end of the question before a kill was, and until when, and why."""
    now = datetime(2026, 11, 21, 12, tzinfo=UTC)
    view = TopView()
    lines = [one.text for one in page(served.backend.status(), list(served.backend.clients()), view, now, 80, 24)]
    text = " ".join(" ".join(lines).split())
    assert "until 00:31:10 at the latest, then its clients are ended" in text.replace("2026-11-21 ", "")
    assert "first bob" in text
    assert "it is the turn of alice" in text
    screen = top_screen.Screen("x", 1.0)
    screen._clients = [{**next(iter(served.backend.clients())), "pid": 4194303, "state": "running",
                        "command": "cuda-client " + 80 * "x"}]  # fmt: skip
    screen._view.chosen = 4194303
    screen._ask()
    assert screen._view.question[:80].startswith("y/N: end client 4194303 of alice? Its work is lost.")


def test_the_filter_looks_into_the_columns_that_it_names(served: Served) -> None:
    """In the users' view bob stayed for "ali", because he waits for alice."""
    view = TopView()
    view.users, view.filter = True, "ali"
    found = top_page.rows(served.backend.status(), list(served.backend.clients()), view)
    assert [one["user"] for one in found] == ["alice"]


def test_users_who_work_at_once_are_named(served: Served) -> None:
    """With the default there is no turn: "in use  by no user" was the summary while alice and bob worked."""
    status = served.backend.status()
    users = [{"uid": uid, "user": name} for uid, name in ((1001, "alice"), (1002, "bob"), (1001, "alice"), (0, None))]
    status |= {"turn": None, "users": users, "clients_by_uid": {"1001": 3, "1002": 1, "0": 1}}

    def in_use() -> str:
        lines = page(status, [], TopView(), datetime(2026, 11, 21, 12, tzinfo=UTC), 80, 24)
        return next(one.text for one in lines if one.text.startswith("in use"))

    assert in_use() == "in use  by alice, bob and root"
    status["users"] = users[:1]
    assert in_use() == "in use  by alice and 2 more users"
    status |= {"users": [], "clients_by_uid": {}}
    assert in_use() == "in use  by no user"
