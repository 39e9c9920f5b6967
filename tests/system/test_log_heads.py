"""How much of a log is dropped from its beginning, and what is never dropped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsagent.system import log_heads

MIB = 1 << 20


@pytest.fixture
def log(tmp_path: Path) -> Iterator[int]:
    """A log of 9 MiB."""
    path = tmp_path / "server.log"
    path.write_bytes(b"x" * (9 * MIB))
    descriptor = os.open(path, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize(("most", "read", "length"), [
    (9 * MIB, 9 * MIB, 0),
    (8 * MIB, 9 * MIB, 3 * MIB),
    (8 * MIB, 9 * MIB - 1, 3 * MIB),
    (8 * MIB, 2 * MIB + MIB // 2, MIB),
    (8 * MIB, 2 * MIB - 1, 0),
    (8 * MIB, 0, 0),
    (9 * MIB - 1, 9 * MIB, 2 * MIB),
])  # fmt: skip
def test_a_quarter_of_the_bound_is_dropped_and_nothing_that_was_not_read(
    log: int, most: int, read: int, length: int
) -> None:
    """Whole steps only, and the last step before the reader's position stays."""
    assert log_heads.excess(log, most, read) == length


def test_a_hole_of_the_last_time_takes_no_room(log: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = log_heads._fallocate
    monkeypatch.setattr(log_heads, "_fallocate", lambda fd, mode, size: real(fd, mode, size) if mode & 2 else 95)
    assert log_heads.drop(log_heads.writable(log), 3 * MIB) is False
    assert (os.fstat(log).st_size, log_heads.excess(log, 8 * MIB, 9 * MIB)) == (9 * MIB, 0)
    assert log_heads.excess(log, 5 * MIB, 9 * MIB) == 5 * MIB, "the hole counts as dropped"
    os.truncate(log, 0)
    os.truncate(log, 9 * MIB)
    assert log_heads.excess(log, MIB, 9 * MIB) == 0, "nothing but a hole"


def test_a_failure_closes_the_descriptor_and_is_reported(log: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    monkeypatch.setattr(log_heads, "_fallocate", lambda _fd, mode, _size: tried.append(mode) or 28)
    descriptor = log_heads.writable(log)
    with pytest.raises(OSError, match="No space left"):
        log_heads.drop(descriptor, MIB)
    assert len(tried) == 1, "only a file system that cannot move up is asked for a hole"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
