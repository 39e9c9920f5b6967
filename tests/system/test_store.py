"""What the agent remembers beyond its own life: after any death the file is whole, and a wrong one is never trusted."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mpsagent.system import store as module
from mpsagent.system.store import Store
from tests.coroutines import until
from tests.system.conftest import Play

ROOT = Path(__file__).resolve().parents[2]


def kept(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())["values"]
    return values


def test_what_was_put_is_there_for_the_next_agent(tmp_path: Path, play: Play) -> None:
    """A drain and a client that is being ended, private to root."""
    path = tmp_path / "state.json"

    async def scenario() -> None:
        store = Store(path)
        assert store.load() == {}
        store.put("drain", {"at": 1.5, "until": None})
        store.put("ending", [{"pid": 5, "start": 6, "uid": 2001, "step": "sigterm"}])
        store.put("gone", 1)
        store.put("gone", None)
        assert await store.flushed(60)
        assert path.stat().st_mode & 0o777 == 0o600
        assert os.listdir(tmp_path) == ["state.json"]
        store.close()
        again = Store(path)
        assert again.load() == {"drain": {"at": 1.5, "until": None}, "ending": store.get("ending")}
        assert again.notes == []
        assert again.get("gone", "nothing") == "nothing"
        again.close()

    play(scenario())


def test_many_changes_become_few_writes_and_the_loop_never_waits(
    tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes its time: 1,000 positions in a log are not 1,000 writes."""
    writes: list[str] = []
    real = module.atomic_file.write

    def slow(path: Path, text: str, *, lasting: bool) -> None:
        writes.append(text)
        time.sleep(0.05)
        real(path, text, lasting=lasting)

    monkeypatch.setattr(module.atomic_file, "write", slow)

    async def scenario() -> None:
        store = Store(tmp_path / "state.json")
        store.load()
        for number in range(1000):
            store.put("position", number)
        assert await store.flushed(60)
        assert kept(tmp_path / "state.json") == {"position": 999}
        assert len(writes) < 20
        before = len(writes)
        store.put("position", 999)
        assert await store.flushed(60)
        assert len(writes) == before, "nothing has changed"
        store.close()

    play(scenario())


def test_close_writes_the_last_change(tmp_path: Path) -> None:
    """What is ordered in the moment of the end counts."""
    store = Store(tmp_path / "state.json")
    store.load()
    store.put("drain", True)
    store.close()
    assert kept(tmp_path / "state.json") == {"drain": True}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a file of this agent"),
        ('{"version":1}', "not a file of this agent"),
        ('{"version":2,"values":{}}', "version 2"),
        ("\0" * (65 << 20), "bytes"),
    ],
)
def test_a_broken_file_is_put_aside_and_said(tmp_path: Path, text: str, words: str) -> None:
    """A power cut, an older agent, a bad disk: start without it, keep it for whoever wants to look."""
    path = tmp_path / "state.json"
    path.write_text(text)
    path.chmod(0o600)
    store = Store(path)
    assert store.load() == {}
    (note,) = store.notes
    assert words in note
    (aside,) = tmp_path.iterdir()
    assert aside.name.startswith("state.json.broken-")
    assert str(aside) in note
    store.put("drain", True)
    store.close()
    assert Store(path).load() == {"drain": True}


def test_a_file_that_others_could_have_made_is_not_believed(tmp_path: Path) -> None:
    """It says whom to end: a link, a FIFO, a file that a group may write."""
    path = tmp_path / "state.json"
    good = json.dumps({"version": 1, "values": {"drain": True}})
    path.write_text(good)
    path.chmod(0o620)
    store = Store(path)
    assert store.load() == {}
    assert "0620" in store.notes[0]
    os.mkfifo(path)
    assert Store(path).load() == {}
    (tmp_path / "other").write_text(good)
    path.symlink_to(tmp_path / "other")
    assert Store(path).load() == {}
    assert (tmp_path / "other").read_text() == good
    if os.geteuid() == 0:
        path.write_text(good)
        os.chown(path, 20001, 20001)
        store = Store(path)
        assert store.load() == {}
        assert "owner 20001" in store.notes[0]


def test_a_full_disk_is_said_and_overcome(tmp_path: Path, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent goes on; as soon as there is room the newest values are written."""
    monkeypatch.setattr(module, "AGAIN", 0.02)
    path = tmp_path / "not-yet" / "state.json"

    async def scenario() -> None:
        store = Store(path)
        assert store.load() == {}
        store.put("drain", 1)
        await until(lambda: store.problem)
        assert str(path) in (store.problem or "")
        assert not await store.flushed(0.01)
        store.put("drain", 2)
        path.parent.mkdir()
        assert await store.flushed(60)
        assert store.problem is None
        assert kept(path) == {"drain": 2}
        store.close()

    play(scenario())


def test_what_json_cannot_hold_changes_nothing(tmp_path: Path) -> None:
    """A mistake of ours must not cost what was remembered before."""
    store = Store(tmp_path / "state.json")
    store.load()
    store.put("good", 1)
    for bad in (object(), float("nan")):
        with pytest.raises((TypeError, ValueError)):
            store.put("bad", bad)
    store.close()
    assert kept(tmp_path / "state.json") == {"good": 1}


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo and what-if runs."""
    monkeypatch.chdir(tmp_path)
    store = Store(None)
    assert store.load() == {}
    store.put("drain", True)
    assert store.get("drain") is True
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_killed_at_any_moment_it_leaves_a_whole_file(tmp_path: Path) -> None:
    """SIGKILL while it writes, ten times: old or new, never half, and never going back."""

    def written(path: Path) -> int | None:
        return path.stat().st_mtime_ns if path.exists() else None

    path = tmp_path / "state.json"
    writer = textwrap.dedent(
        """
        import itertools, sys, time
        from mpsagent.system.store import Store
        store = Store(sys.argv[1])
        first = store.load().get("number", 0)
        print("begun", flush=True)
        for number in itertools.count(first):
            store.put("number", number)
            store.put("ballast", str(number) * 20000)
            time.sleep(0.0005)
        """
    )
    last, chance = 0, random.Random(4)
    for _ in range(10):
        before = written(path)
        child = subprocess.Popen([sys.executable, "-c", writer, path], stdout=subprocess.PIPE, cwd=ROOT)
        assert child.stdout is not None
        assert child.stdout.readline() == b"begun\n"
        while written(path) == before:
            time.sleep(0.002)
        time.sleep(0.02 * chance.random())
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        store = Store(path)
        values = store.load()
        assert store.notes == []
        if values:
            assert values["number"] >= last
            last = values["number"]
    assert last > 0


def test_forgetting_what_is_not_there_writes_nothing(tmp_path: Path) -> None:
    """Most of what an agent remembers is nothing, and it says so every second."""
    store = Store(tmp_path / "state.json")
    store.load()
    store.put("turn", None)
    store.close()
    assert not (tmp_path / "state.json").exists()


def test_a_change_is_made_into_text_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the whole file on the loop for each of them: with 3,072 leases that was 9.8 ms each time."""
    store = Store(tmp_path / "state.json")
    store.load()
    for number in range(8):
        store.put(f"gpu{number}/leases", [{"number": one, "name": "job"} for one in range(384)])
    sizes: list[int] = []
    dumps = json.dumps

    def measured(value: object, **more: Any) -> str:
        text = dumps(value, **more)
        if threading.current_thread() is threading.main_thread():
            sizes.append(len(text))
        return text

    monkeypatch.setattr(module.json, "dumps", measured)
    store.put("gpu0/turn", [1001, 5.0, None, None, None])
    store.put("gpu0/turn", None)
    assert max(sizes) < 100
    store.close()
    assert len(kept(tmp_path / "state.json")) == 8


def test_more_than_fits_is_a_problem_that_is_said_and_raises_nowhere(tmp_path: Path, play: Play) -> None:
    """It was raised where decisions are carried out, and the rest of them was dropped."""
    path = tmp_path / "state.json"

    async def scenario() -> None:
        store = Store(path)
        store.load()
        store.put("turn", 1)
        assert await store.flushed(60)
        store.put("leases", "x" * (module.LARGEST + 1))
        store.put("turn", 2)
        await until(lambda: store.problem is not None)
        assert "more than" in (store.problem or "")
        assert store.get("turn") == 2
        assert kept(path) == {"turn": 1}, "the last that did fit"
        store.put("leases", None)
        await until(lambda: store.problem is None)
        assert kept(path) == {"turn": 2}
        store.close()

    play(scenario())
