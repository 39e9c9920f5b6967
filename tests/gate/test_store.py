"""Names in the descriptor store, and the keeper's side of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpsagent.gate import keeper, state
from mpsagent.gate.store import ConnectionName, KnownName, parse_name
from mpsagent.mps.limits import Limits
from mpsagent.wire.link import Admissions, User


@given(st.integers(0, 1 << 60), st.integers(0, 1 << 40), st.booleans())
def test_a_connections_name_says_its_place_and_process(number: int, start: int, privileged: bool) -> None:
    name = ConnectionName(number, start, privileged)
    assert parse_name(str(name)) == name
    assert len(str(name)) < 24


def test_a_thousand_names_are_short() -> None:
    """All names come back in one environment variable, of which the kernel takes 128 KiB."""
    text = str(ConnectionName(1_763_758_000_000_000, 123_456_789))
    assert 7000 * (len(text) + 1) < keeper.NAME_SPACE


@given(
    st.integers(0, 1 << 32),
    st.integers(0, 1 << 32),
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 40),
    st.none()
    | st.tuples(
        st.integers(1, 1000),
        st.dictionaries(st.integers(0, 63), st.integers(0, 1 << 45), max_size=64),
        st.booleans(),
    ),
)
def test_a_known_processs_name_says_user_and_limits(
    uid: int, gid: int, start: int, since: int, said: tuple[int, dict[int, int], bool] | None
) -> None:
    limits = None if said is None else Limits(said[0] / 10, said[1], said[2])
    text = str(KnownName(uid, gid, start, since / 1000, limits))
    assert len(text) < 256
    found = parse_name(text)
    assert isinstance(found, KnownName)
    assert (found.uid, found.gid, found.start) == (uid, gid, start)
    assert found.since == pytest.approx(since / 1000)
    assert found.limits in (limits, None)
    if said is not None and len(said[1]) <= 8:
        assert found.limits == limits


@pytest.mark.parametrize(
    "text", ["", "c", "control", "control_privileged", "c.", "k1.2", "c1.2.3", "c1.§", "x1.2", "stored"]
)
def test_other_names_are_not_ours(text: str) -> None:
    assert parse_name(text) is None


def test_the_keeper_keeps_by_name_and_closes_what_it_does_not() -> None:
    kept = keeper.Kept()
    pipes = [os.pipe() for _ in range(3)]
    reads = [read for read, _ in pipes]

    def is_open(descriptor: int) -> bool:
        return Path(f"/proc/self/fd/{descriptor}").exists()

    kept.hear(b"FDSTORE=1\nFDNAME=c1.2", [reads[0]])
    kept.hear(b"READY=1\nSTATUS=FDSTORE", [])
    kept.hear(b"FDSTORE=1\nFDNAME=a:b", [reads[1]])
    assert kept.items() == [("c1.2", reads[0])]
    assert not is_open(reads[1])
    kept.hear(b"FDSTORE=1\nFDNAME=c1.2", [reads[2]])
    assert kept.items() == [("c1.2", reads[2])]
    assert not is_open(reads[0])
    kept.hear(b"FDSTOREREMOVE=1\nFDNAME=c1.2", [])
    kept.hear(b"FDSTOREREMOVE=1\nFDNAME=c1.2", [])
    assert kept.items() == []
    assert not is_open(reads[2])
    for _, write in pipes:
        os.close(write)


def test_the_last_admissions_are_kept_in_one_step(tmp_path: Path) -> None:
    assert state.load(tmp_path) is None
    said = Admissions(7, True, users={5: User(5, "all", Limits(20.0, {0: 1 << 30}))})
    state.save(tmp_path, said)
    state.save(tmp_path, said)
    assert state.load(tmp_path) == said
    assert [one.name for one in tmp_path.iterdir()] == ["admissions.json"]
    assert (tmp_path / "admissions.json").stat().st_mode & 0o777 == 0o600


def test_a_file_that_others_may_write_or_that_is_damaged_is_not_believed(tmp_path: Path) -> None:
    state.save(tmp_path, Admissions(open=True))
    path = tmp_path / "admissions.json"
    path.chmod(0o666)
    with pytest.raises(state.StateError, match="others could have written it"):
        state.load(tmp_path)
    path.chmod(0o600)
    path.write_text("{")
    with pytest.raises(state.StateError, match="not JSON"):
        state.load(tmp_path)
    path.write_text('{"kind":"release","pid":1,"start":2}')
    with pytest.raises(state.StateError, match="no table"):
        state.load(tmp_path)
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(state.StateError, match="cannot be read"):
        state.load(tmp_path)


@given(st.integers(0, 1 << 32), st.integers(0, 1 << 40), st.dictionaries(st.integers(0, 63), st.integers(0, 1 << 45)))
def test_a_name_that_was_read_is_written_the_same(uid: int, since: int, memory: dict[int, int]) -> None:
    """It is by its name that something is taken out of the store again."""
    text = str(KnownName(uid, uid, 5, since / 1000, Limits(12.5, memory)))
    assert str(parse_name(text)) == text
