"""The directories of an instance: whoever can write there owns everybody's GPU work."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mpsagent.system import directories as dirs
from mpsagent.system.directories import DirectoryRefused, directories
from mpsagent.system.prepare import entry_problem

ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="needs to be root to give files to another user")
OTHER = 20001


def mode(path: Path | str) -> int:
    return stat.S_IMODE(Path(path).lstat().st_mode)


def as_user(*command: str, group: int = OTHER) -> int:
    """The exit status of a command of another user."""
    return subprocess.run(
        command, user=OTHER, group=group, extra_groups=[], capture_output=True, check=False
    ).returncode


def test_the_hidden_directory_is_closed_to_users_whatever_the_umask(base: Path) -> None:
    """Who can enter it goes around the gate; modes that were changed are put right again."""
    where = directories("gpu0", "/tmp/nvidia-mps", "/var/log/nvidia-mps", str(base))
    assert where.hidden == f"{base}/instances/gpu0/pipe"
    for mask in (0o000, 0o077):
        before = os.umask(mask)
        try:
            assert dirs.prepare_hidden(where) == []
        finally:
            os.umask(before)
        for path in (base / "instances", where.home, where.hidden):
            assert mode(path) == 0o710
        Path(where.hidden).chmod(0o700)
    Path(where.hidden).chmod(0o777)
    (note,) = dirs.prepare_hidden(where)
    assert "0777" in note
    assert mode(where.hidden) == 0o710


@needs_root
def test_servers_may_enter_the_hidden_directory_and_users_may_not(base: Path) -> None:
    """A server runs with its user's uid and group 0 (recording 08, G1)."""
    where = directories("gpu0", "/tmp/nvidia-mps", "/var/log/nvidia-mps", str(base))
    dirs.prepare_hidden(where)
    Path(where.hidden, "control").touch()
    assert as_user("cat", f"{where.hidden}/control", group=0) == 0
    assert as_user("cat", f"{where.hidden}/control") != 0
    assert as_user("ls", where.hidden, group=0) != 0, "entering is enough for a server; it need not see the others"
    Path(where.hidden).chmod(0o700)
    assert as_user("cat", f"{where.hidden}/control", group=0) != 0, "the test notices a mode that keeps servers out"


def test_the_public_directory_is_made_for_everyone_and_below_a_strict_umask(base: Path) -> None:
    """A parent made with the umask of a systemd service (0077) would keep every client out."""
    path = base / "a" / "b" / "nvidia-mps"
    before = os.umask(0o077)
    try:
        assert dirs.prepare_public(str(path)) == []
    finally:
        os.umask(before)
    assert [mode(one) for one in (path, path.parent, path.parent.parent)] == [0o755] * 3
    assert entry_problem(str(path)) is None
    assert dirs.refusal(str(path)) is None
    path.parent.chmod(0o700)
    assert f"chmod o+x {path.parent}" in (entry_problem(str(path)) or "")


def test_what_a_dead_daemon_left_in_the_public_directory_goes(base: Path) -> None:
    """Hand-started once, with mode 0777: its sockets, its FIFO and its lock are in the gate's way."""
    path = base / "nvidia-mps"
    path.mkdir()
    path.chmod(0o777)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        control.bind(str(path / "control"))
    os.mkfifo(path / "log")
    (path / "control_lock").touch()
    (path / "notes.txt").write_text("keep me")
    assert any("0777" in note for note in dirs.prepare_public(str(path)))
    assert os.listdir(path) == ["notes.txt"]
    assert mode(path) == 0o755


@needs_root
def test_what_another_user_put_into_an_open_directory_goes_and_is_said(base: Path) -> None:
    """His socket would have answered everybody's clients; a link of his must not be followed."""
    path = base / "nvidia-mps"
    path.mkdir()
    path.chmod(0o777)
    (base / "precious").write_text("x")
    (path / "control").symlink_to(base / "precious")
    os.lchown(path / "control", OTHER, OTHER)
    notes = dirs.prepare_public(str(path))
    assert any(f"control of uid {OTHER} was removed" in note for note in notes)
    assert not (path / "control").is_symlink()
    assert (base / "precious").read_text() == "x"
    (path / "control").mkdir()
    with pytest.raises(DirectoryRefused, match=r"is a directory.*rm -r"):
        dirs.prepare_public(str(path))


def test_a_public_directory_that_is_served_is_refused_with_the_process(base: Path) -> None:
    """A daemon that was started by hand, with people's work: its sockets must not be taken away."""
    path = base / "nvidia-mps"
    path.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        control.bind(str(path / "control"))
        control.listen()
        with pytest.raises(DirectoryRefused, match=rf"process {os.getpid()} of .*echo quit"):
            dirs.prepare_public(str(path))
        assert dirs.listener_of(str(path / "control")) == (os.getpid(), os.getuid())
    assert dirs.listener_of(str(path / "control")) is None
    assert (path / "control").exists()
    dirs.prepare_public(str(path))
    assert not (path / "control").exists()


@needs_root
@pytest.mark.parametrize("bits", [0o755, 0o777, 0o700])
def test_another_users_directory_is_refused_with_the_command_that_helps(base: Path, bits: int) -> None:
    """In sticky /tmp any user may have made it first."""
    path = base / "pipe"
    path.mkdir()
    path.chmod(bits)
    os.chown(path, OTHER, OTHER)
    for action in (dirs.prepare_public, dirs.prepare_log, dirs.clean):
        with pytest.raises(DirectoryRefused) as refused:
            action(str(path))
        assert f"uid {OTHER}" in str(refused.value)
        assert f"{bits:04o}" in str(refused.value)
        assert f"rm -r {path}" in str(refused.value)
    assert f"uid {OTHER}" in (dirs.refusal(str(path)) or "")
    assert path.stat().st_uid == OTHER
    assert mode(path) == bits


def test_links_and_files_are_refused(base: Path) -> None:
    """A link to /etc must not become world-readable sockets in /etc, nor its mode be changed."""
    target = base / "target"
    target.mkdir(mode=0o700)
    link = base / "pipe"
    link.symlink_to(target)
    for action in (dirs.prepare_public, dirs.prepare_log, dirs.clean):
        with pytest.raises(DirectoryRefused, match="symbolic link"):
            action(str(link))
    assert mode(target) == 0o700
    link.unlink()
    link.write_text("a file")
    with pytest.raises(DirectoryRefused, match="not a directory"):
        dirs.prepare_public(str(link))


@needs_root
def test_unsafe_parents_are_refused(base: Path) -> None:
    """Who owns or can write to a parent can replace everything below it."""
    theirs = base / "theirs"
    theirs.mkdir()
    os.chown(theirs, OTHER, OTHER)
    with pytest.raises(DirectoryRefused, match="chown root"):
        dirs.prepare_public(str(theirs / "pipe"))
    loose = base / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    with pytest.raises(DirectoryRefused, match="chmod go-w"):
        dirs.prepare_public(str(loose / "pipe"))
    loose.chmod(0o1777)
    assert dirs.prepare_public(str(loose / "pipe")) == [], "sticky, like /tmp"
    assert not (theirs / "pipe").exists()


def test_the_directory_of_all_instances_is_ours(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No policy may name it, and the agent makes it."""
    monkeypatch.setattr(dirs, "SHARED", {str(base / "instances")})
    dirs.prepare_hidden(directories("default", "/tmp/x", "/tmp/y", str(base)))
    assert (base / "instances/default/pipe").is_dir()


@needs_root
@pytest.mark.parametrize("prepare", [dirs.prepare_public, dirs.prepare_log])
def test_a_directory_that_others_use_is_left_as_it_is(base: Path, prepare: Callable[[str], list[str]]) -> None:
    """`pipe_directory = "/tmp"`: it had mode 0755 then, and no user of the machine could make a file there."""
    shared = base / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    with pytest.raises(DirectoryRefused, match="shared/nvidia-mps"):
        prepare(str(shared))
    assert shared.stat().st_mode & 0o7777 == 0o1777
    before = Path("/var").stat()
    with pytest.raises(DirectoryRefused, match="/var/nvidia-mps"):
        prepare("/var")
    assert Path("/var").stat().st_mode == before.st_mode


@needs_root
def test_a_users_link_in_the_path_is_refused_and_roots_is_followed(base: Path) -> None:
    """/var/run is root's link; in sticky /tmp a link may be anyone's."""
    real = base / "real"
    real.mkdir()
    link = base / "link"
    link.symlink_to(real)
    dirs.prepare_public(str(link / "pipe"))
    assert (real / "pipe").is_dir()
    os.lchown(link, OTHER, OTHER)
    with pytest.raises(DirectoryRefused, match=f"uid {OTHER}"):
        dirs.prepare_public(str(link / "other"))
    assert not (real / "other").exists()


@pytest.mark.parametrize("path", ["pipe", "./pipe", "/tmp/../etc", "/tmp//x", "//tmp/x", "/tmp/x/", "/", ""])
def test_paths_that_are_not_plain_are_refused(path: str) -> None:
    """What is checked must be what is used."""
    with pytest.raises(DirectoryRefused):
        dirs.prepare_public(path)


def test_a_path_too_long_for_a_socket_is_refused(base: Path) -> None:
    """The daemon would fail later, with a text that helps no one."""
    with pytest.raises(DirectoryRefused, match="too long"):
        dirs.prepare_public(str(base / ("x" * 90)))
    with pytest.raises(DirectoryRefused, match="too long"):
        dirs.prepare_hidden(directories("x" * 64, "/p", "/l", str(base)))


def test_log_files_that_others_could_have_planted_are_refused(base: Path) -> None:
    """Root's control daemon appends to control.log and server.log by name: a link there would lead it anywhere."""
    path = base / "log"
    assert dirs.prepare_log(str(path)) == []
    assert mode(path) == 0o755
    victim = base / "passwd"
    victim.write_text("root:x:0:0\n")
    log = path / "control.log"
    log.symlink_to(victim)
    with pytest.raises(DirectoryRefused, match=rf"symbolic link.*passwd.*rm {log}"):
        dirs.prepare_log(str(path))
    log.unlink()
    os.link(victim, log)
    with pytest.raises(DirectoryRefused, match="2 names"):
        dirs.prepare_log(str(path))
    log.unlink()
    os.mkfifo(log)
    with pytest.raises(DirectoryRefused, match="not a plain file"):
        dirs.prepare_log(str(path))
    log.unlink()
    log.write_text("a line of MPS\n")
    log.chmod(0o666)
    (note,) = dirs.prepare_log(str(path))
    assert "control.log" in note
    assert mode(log) == 0o644
    assert log.read_text() == "a line of MPS\n"
    if ROOT:
        os.chown(log, OTHER, OTHER)
        with pytest.raises(DirectoryRefused, match=f"belongs to uid {OTHER}"):
            dirs.prepare_log(str(path))


@needs_root
def test_a_log_directory_that_cannot_be_written_to_is_refused_at_once(base: Path) -> None:
    """Otherwise the start fails after its whole deadline, with another reason."""
    path = base / "log"
    path.mkdir()
    script = (
        f"mount --make-rprivate / && mount -t tmpfs -o ro,mode=755 tmpfs {path} && exec {shutil.which('python3')} -c "
        f"'import sys; sys.path.insert(0, sys.argv[1]); from mpsagent.system import directories as d\n"
        f"try: d.prepare_log(sys.argv[2])\nexcept d.DirectoryRefused as e: print(e)' "
        f"{Path(__file__).parents[2]} {path}"
    )
    done = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False)
    if "unshare" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert "read-only" in done.stdout, done.stderr


def test_clean_removes_what_mps_left_and_nothing_else(base: Path) -> None:
    """After a SIGKILL of the daemon: sockets, FIFO, lock and pid file; a stranger's file and a directory stay."""
    where = directories("gpu0", "/tmp/nvidia-mps", "/var/log/nvidia-mps", str(base))
    assert dirs.clean(where.hidden) == []
    dirs.prepare_hidden(where)
    path = Path(where.hidden)
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(path / "control"))
    os.mkfifo(path / "log")
    (path / "control_lock").symlink_to(base)
    (path / "nvidia-cuda-mps-control.pid").write_text("1\n")
    (path / "control_privileged").mkdir()
    (path / "notes.txt").write_text("keep me")
    assert sorted(dirs.clean(str(path))) == ["control", "control_lock", "log", "nvidia-cuda-mps-control.pid"]
    assert sorted(os.listdir(path)) == ["control_privileged", "notes.txt"]
    assert base.is_dir(), "a link goes, what it points to stays"
    assert dirs.clean(str(path)) == []
