"""The pipe directory: whoever can write there owns everybody's GPU work, so it is made, checked, opened with care."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpsagent.system import pipedir
from mpsagent.system.pipedir import PipeDirectoryRefused

ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="needs to be root to give files to another user")


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory that other users may enter; those of pytest may be closed to them."""
    path = Path(tempfile.mkdtemp(prefix="mps", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_new_directory_is_shut_until_the_door_is_opened(base: Path) -> None:
    """No moment in which a client could reach a daemon without limits; whatever the umask is."""
    path = base / "pipe"
    before = os.umask(0)
    try:
        assert pipedir.prepare(str(path)) == []
        assert mode(path) == 0o700
        assert not pipedir.is_open(str(path))
        pipedir.open_door(str(path))
        assert mode(path) == 0o755
        assert pipedir.is_open(str(path))
        assert pipedir.prepare(str(path)) == []
        assert mode(path) == 0o755, "a check must not shut out the clients of a daemon that runs"
        pipedir.shut_door(str(path))
        assert mode(path) == 0o700
        assert pipedir.prepare_log_directory(str(base / "log")) == []
        assert mode(base / "log") == 0o755
    finally:
        os.umask(before)


@needs_root
def test_a_directory_left_open_is_secured_if_nobody_has_used_it(base: Path) -> None:
    """A daemon started by hand makes it 0777; taking it over must not mean trusting what others put there."""
    path = base / "pipe"
    path.mkdir()
    path.chmod(0o777)
    (path / "control").touch()
    assert "0777" in (pipedir.secure(str(path)) or "")
    assert mode(path) == 0o755
    assert pipedir.secure(str(path)) is None
    path.chmod(0o777)
    os.chown(path / "control", 20001, 20001)
    with pytest.raises(PipeDirectoryRefused, match=r"control belongs to uid 20001.*rm -r"):
        pipedir.secure(str(path))
    assert pipedir.secure(str(base / "nothing")) is None


def test_a_daemon_without_its_socket_is_not_reachable(base: Path) -> None:
    """Somebody has cleaned /tmp: clients run outside MPS from then on."""
    assert not pipedir.reachable(str(base))
    (base / "control").touch()
    assert pipedir.reachable(str(base))


def test_missing_parents_are_made(base: Path) -> None:
    """/run/mpsagent/gpu0/pipe after a boot: all of it is made, not writable by others."""
    path = base / "a" / "b" / "pipe"
    before = os.umask(0o077)
    try:
        pipedir.prepare(str(path))
    finally:
        os.umask(before)
    assert mode(path) == 0o700
    assert all(not mode(parent) & 0o022 for parent in (base / "a", base / "a" / "b"))


@needs_root
@pytest.mark.parametrize("bits", [0o755, 0o777, 0o700])
def test_another_users_directory_is_refused_with_the_command_that_helps(base: Path, bits: int) -> None:
    """In sticky /tmp any user may have made it first."""
    path = base / "pipe"
    path.mkdir()
    path.chmod(bits)
    os.chown(path, 20001, 20001)
    for action in (pipedir.prepare, pipedir.open_door, pipedir.shut_door, pipedir.clean):
        with pytest.raises(PipeDirectoryRefused) as refused:
            action(str(path))
        assert "uid 20001" in str(refused.value)
        assert f"{bits:04o}" in str(refused.value)
        assert f"rm -r {path}" in str(refused.value)
    assert path.stat().st_uid == 20001
    assert mode(path) == bits


@pytest.mark.parametrize("bits", [0o777, 0o1777, 0o775, 0o757])
def test_a_directory_that_others_can_write_to_is_refused(base: Path, bits: int) -> None:
    """0777 is what MPS itself makes: somebody may have put his sockets there already."""
    path = base / "pipe"
    path.mkdir()
    path.chmod(bits)
    with pytest.raises(PipeDirectoryRefused, match=f"{bits:04o}"):
        pipedir.prepare(str(path))


def test_links_and_files_are_refused(base: Path) -> None:
    """A link to /etc must not become world-readable sockets in /etc, nor its mode be changed."""
    target = base / "target"
    target.mkdir(mode=0o700)
    link = base / "pipe"
    link.symlink_to(target)
    for action in (pipedir.prepare, pipedir.open_door, pipedir.clean):
        with pytest.raises(PipeDirectoryRefused, match="symbolic link"):
            action(str(link))
    assert mode(target) == 0o700
    link.unlink()
    link.write_text("a file")
    with pytest.raises(PipeDirectoryRefused, match="not a directory"):
        pipedir.prepare(str(link))


@needs_root
def test_unsafe_parents_are_refused(base: Path) -> None:
    """Who owns or can write to a parent can replace everything below it."""
    theirs = base / "theirs"
    theirs.mkdir()
    os.chown(theirs, 20001, 20001)
    with pytest.raises(PipeDirectoryRefused, match="chown root"):
        pipedir.prepare(str(theirs / "pipe"))
    loose = base / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    with pytest.raises(PipeDirectoryRefused, match="chmod go-w"):
        pipedir.prepare(str(loose / "pipe"))
    loose.chmod(0o1777)
    assert pipedir.prepare(str(loose / "pipe")) == [], "sticky, like /tmp"
    assert not (theirs / "pipe").exists()


@needs_root
def test_a_users_link_in_the_path_is_refused_and_roots_is_followed(base: Path) -> None:
    """/var/run is root's link; in sticky /tmp a link may be anybody's."""
    real = base / "real"
    real.mkdir()
    link = base / "link"
    link.symlink_to(real)
    pipedir.prepare(str(link / "pipe"))
    assert (real / "pipe").is_dir()
    os.lchown(link, 20001, 20001)
    with pytest.raises(PipeDirectoryRefused, match="uid 20001"):
        pipedir.prepare(str(link / "other"))
    assert not (real / "other").exists()


def test_a_parent_that_users_cannot_enter_is_a_warning(base: Path) -> None:
    """A known complaint: under a parent with mode 0700 no user's server can start. Safe, but useless."""
    closed = base / "closed"
    closed.mkdir(mode=0o700)
    (warning,) = pipedir.prepare(str(closed / "pipe"))
    assert f"chmod o+x {closed}" in warning


@pytest.mark.parametrize("path", ["pipe", "./pipe", "/tmp/../etc", "/tmp//x", "//tmp/x", "/tmp/x/", "/", ""])
def test_paths_that_are_not_plain_are_refused(path: str) -> None:
    """What is checked must be what is used."""
    with pytest.raises(PipeDirectoryRefused):
        pipedir.prepare(path)


def test_a_path_too_long_for_a_socket_is_refused(base: Path) -> None:
    """The daemon would fail later, with a text that helps nobody."""
    with pytest.raises(PipeDirectoryRefused, match="too long"):
        pipedir.prepare(str(base / ("x" * 90)))


def test_clean_removes_what_mps_left_and_nothing_else(base: Path) -> None:
    """After a SIGKILL of the daemon: sockets, FIFO, lock and pid file; a stranger's file and a directory stay."""
    path = base / "pipe"
    pipedir.prepare(str(path))
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(path / "control"))
    os.mkfifo(path / "log")
    (path / "control_lock").touch()
    (path / "nvidia-cuda-mps-control.pid").write_text("1\n")
    (path / "control_privileged").mkdir()
    (path / "notes.txt").write_text("keep me")
    assert sorted(pipedir.clean(str(path))) == ["control", "control_lock", "log", "nvidia-cuda-mps-control.pid"]
    assert sorted(os.listdir(path)) == ["control_privileged", "notes.txt"]
    assert pipedir.clean(str(path)) == []
    assert pipedir.clean(str(base / "never")) == []
    assert not (base / "never").exists()


def test_clean_does_not_follow_links(base: Path) -> None:
    """``control`` as a link: the link goes, what it points to stays."""
    path = base / "pipe"
    pipedir.prepare(str(path))
    (base / "precious").write_text("x")
    (path / "control").symlink_to(base / "precious")
    assert pipedir.clean(str(path)) == ["control"]
    assert (base / "precious").read_text() == "x"
