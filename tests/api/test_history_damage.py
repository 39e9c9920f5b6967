"""The history where its file or disk is no good: broken, not ours, full, slow."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsagent.api import database
from mpsagent.api import history as module
from mpsagent.api.database import NAME
from mpsagent.api.history import History
from tests.api.history_files import lines, numbers
from tests.coroutines import until

pytestmark = pytest.mark.usefixtures("no_leak")


@pytest.mark.parametrize("junk", [b"no database", b"\0" * 70_000, b"SQLite format 3\0" + b"\xff" * 9000, b""])
def test_a_file_that_is_no_database_is_set_aside_and_said(tmp_path: Path, junk: bytes) -> None:
    """After a crash of the machine files hold anything: a new one is begun, and the old one is still there."""
    (tmp_path / NAME).write_bytes(junk)
    (tmp_path / NAME).chmod(0o640)
    history = History(str(tmp_path))
    assert history.append("next", 0.0) == 1
    history.close()
    assert [record["kind"] for record in lines(tmp_path / NAME)] == ["next"]
    aside = [path for path in tmp_path.iterdir() if "broken" in path.name and not path.name.endswith(("-wal", "-shm"))]
    assert [path.read_bytes() for path in aside] == ([junk] if junk else [])
    assert len(history.notes) == len(aside)


def test_numbers_go_on_when_a_file_is_broken_in_the_middle(tmp_path: Path) -> None:
    """What can be read is read, so that a follower's cursor keeps its meaning."""
    history = History(str(tmp_path))
    for number in range(2000):
        history.append("a", float(number), text="x" * 100)
    history.close()
    with open(tmp_path / NAME, "r+b") as file:  # the last page of the table stays, what lies before does not
        file.seek(3 * 4096)
        file.write(b"\xff" * 20 * 4096)
    history = History(str(tmp_path), capacity=5000)
    for _ in range(3):
        history.append("next", 0.0)
    assert history.last == 2003
    assert len(history.notes) == 1
    history.close()
    assert [record["seq"] for record in lines(tmp_path / NAME)] == [2001, 2002, 2003]


async def test_a_file_that_breaks_while_it_is_in_use_is_set_aside(tmp_path: Path) -> None:
    """The agent goes on, with the next number, and what it had not yet written is in the new file."""
    history = History(str(tmp_path))
    history.append("before", 1.0)
    await history.wait(0)
    history._database.close()  # type: ignore[union-attr]
    history._database = None
    (tmp_path / NAME).write_bytes(b"\xff" * 5000)
    history.append("after", 2.0)
    await history.wait(1)
    assert history.problem is None
    assert len(history.notes) == 1
    assert numbers(history) == [1, 2]
    history.close()
    assert [record["seq"] for record in lines(tmp_path / NAME)] == [2]


@pytest.mark.parametrize("how", ["later version", "others may write", "no tables"])
def test_a_file_that_is_not_ours_is_set_aside(tmp_path: Path, how: str) -> None:
    """Of an agent to come, or planted: never trusted and never lost."""
    path = tmp_path / NAME
    with sqlite3.connect(path) as other:
        other.execute(f"PRAGMA user_version={99 if how == 'later version' else 1 if how == 'no tables' else 0}")
        other.execute("CREATE TABLE mine (x)")
    other.close()
    path.chmod(0o666 if how == "others may write" else 0o640)
    history = History(str(tmp_path))
    assert len(history.notes) == 1
    assert history.append("a", 0.0) == 1
    history.close()
    assert len(lines(path)) == 1
    assert len(list(tmp_path.glob(f"{NAME}.broken-*"))) >= 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system with 1 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs to be root to mount a small file system")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(path)], capture_output=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"no mount here: {done.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.mark.root
async def test_a_full_disk_is_said_and_nothing_within_capacity_is_lost(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Followers see everything all the same, and once there is room again the file is complete."""
    monkeypatch.setattr(module, "RETRY_FIRST", 0.02)
    (small_disk / "ballast").write_bytes(b"x" * 900_000)
    history = History(str(small_disk))
    for number in range(500):
        history.append("a", float(number), text="z" * 500)
        if number % 10 == 0:
            await asyncio.sleep(0)
    await until(lambda: history.problem)
    assert "full" in (history.problem or "")
    history.append("b", 0.0)
    assert numbers(history) == list(range(1, 502)), "followers do not wait for the disk"
    (small_disk / "ballast").unlink()
    (small_disk / "ballast").write_bytes(b"")
    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    await until(lambda: history.problem is None)
    await until(lambda: not history._pending)
    assert history.lost == 0
    history.close()
    assert [record["seq"] for record in lines(small_disk / NAME)] == list(range(1, 502))


@pytest.mark.root
async def test_beyond_capacity_the_loss_is_counted(small_disk: Path) -> None:
    """Bounded memory even when the disk stays full for ever; the file stays readable."""
    history = History(str(small_disk), capacity=50)
    (small_disk / "ballast").write_bytes(b"")
    subprocess.run(["dd", "if=/dev/zero", f"of={small_disk}/ballast", "bs=4096"], capture_output=True, check=False)
    for number in range(2000):
        history.append("a", float(number), text="z" * 1000)
        await asyncio.sleep(0)
    await until(lambda: history.problem)  # its thread may begin only now
    assert history.lost >= 1000
    assert len(history._pending) <= 50
    (small_disk / "ballast").unlink()
    history.close()
    found = [int(str(record["seq"])) for record in lines(small_disk / NAME)]
    assert found == sorted(set(found))
    assert found[-1] == 2000
    assert len(found) + history.lost == 2000


async def test_a_directory_that_cannot_be_made_leaves_memory(tmp_path: Path) -> None:
    """A file where the directory should be: said, and the agent works on."""
    (tmp_path / "file").write_text("")
    history = History(str(tmp_path / "file" / "history"))
    assert history.problem
    assert history.append("a", 0.0) == 1
    assert numbers(history) == [1]
    history.close()


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    """Nobody can have root write to a file of their choice."""
    (tmp_path / "target").write_text("")
    (tmp_path / NAME).symlink_to(tmp_path / "target")
    history = History(str(tmp_path))
    history.append("a", 0.0)
    history.close()
    assert (tmp_path / "target").read_text() == ""
    assert len(lines(tmp_path / NAME)) == 1


async def test_a_disk_that_does_not_answer_does_not_hold_up_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program holds the file, so that the write waits for as long as the test likes: it lets go only when the
    loop has had its turns, so a loop that waited too would wait for ever."""
    monkeypatch.setattr(database, "BUSY", 1000.0)
    monkeypatch.setattr(module, "SLOW", 0.2)
    history = History(str(tmp_path), capacity=4000)
    other = sqlite3.connect(tmp_path / NAME, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    while history.problem is None or len(history._pending) <= 100:
        history.append("a", 0.0, text="z" * 1000)
        await asyncio.sleep(0.001)
    assert history._writing is not None  # it does wait
    assert "does not answer" in history.problem
    assert history.newest == history.last, "followers do not wait for the disk"
    other.execute("COMMIT")
    other.close()
    await until(lambda: not history._pending)
    assert history.problem is None
    history.close()
    assert [one["seq"] for one in lines(tmp_path / NAME)] == list(range(1, history.last + 1))
