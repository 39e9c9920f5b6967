"""The policy's files are read as root: nothing there may block, fill the memory, or be another user's word."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from mpsagent.cli import policy_drafts
from mpsagent.cli.policy_drafts import read_files
from mpsagent.system import policy_files
from mpsagent.system.policy_files import read_policy


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """etc/policy.toml and an empty etc/policy.d, as an administrator makes them."""
    directory = tmp_path / "etc"
    (directory / "policy.d").mkdir(parents=True)
    for one in (directory, directory / "policy.d"):
        one.chmod(0o755)
    return put(directory / "policy.toml", "[limits]\nactive_threads = '50%'\n")


def put(path: Path, text: str | bytes, mode: int = 0o644) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def test_the_main_file_comes_first_and_the_others_in_the_order_of_their_names(policy: Path) -> None:
    """Which file wins must not depend on the order in which a file system lists them."""
    for name in ("20-b.toml", "10-a.toml", "9-z.toml", ".hidden.toml", "README", "30.toml~", "10-a.toml.bak"):
        put(policy.parent / "policy.d" / name, f"# {name}\n")
    texts, errors = read_policy(policy)
    assert errors == []
    assert [Path(name).name for name, _ in texts] == ["policy.toml", "10-a.toml", "20-b.toml", "9-z.toml"]
    assert texts[0] == (str(policy), "[limits]\nactive_threads = '50%'\n")


def test_a_policy_that_is_missing_is_an_error(policy: Path, tmp_path: Path) -> None:
    """The package brings one. One that has vanished must not mean everything for everybody."""
    for path in (tmp_path / "policy.toml", tmp_path / "nowhere" / "policy.toml"):
        texts, (error,) = read_policy(path)
        assert (texts, error.file, error.problem) == ([], str(path), "is missing")
        assert error.hint
    put(policy.parent / "policy.d" / "a.toml", "")
    policy.unlink()
    assert [one.problem for one in read_policy(policy)[1]] == ["is missing"], "the parts alone are not a policy"


def test_a_missing_directory_is_no_error(policy: Path) -> None:
    """Few nodes need one."""
    (policy.parent / "policy.d").rmdir()
    assert read_policy(policy) == ([(str(policy), "[limits]\nactive_threads = '50%'\n")], [])


def test_a_missing_file_that_is_named_is_an_error(tmp_path: Path) -> None:
    """`policy check TYPO.toml` must not answer that all is well."""
    texts, (error,), notes = read_files([tmp_path / "typo.toml"])
    assert (texts, notes) == ([], [])
    assert "no such file" in error.problem


def test_a_link_into_a_hidden_directory_is_named_where_its_target_does_not_exist_for_the_agent(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ProtectHome=yes shows an empty directory. With CAP_DAC_READ_SEARCH the agent may enter it and finds no file."""
    home = policy.parent / "home"
    home.mkdir()
    monkeypatch.setattr(policy_files, "HIDDEN", (str(home),))
    policy.unlink()
    policy.symlink_to(home / "site.toml")
    _, (error,) = read_policy(policy)
    assert "is a link to" in error.problem
    assert "its unit has ProtectHome=yes" in error.problem


def test_what_is_no_file_is_refused_and_not_waited_for(policy: Path) -> None:
    """A FIFO would hold the agent for ever, a device could be read without end."""
    directory = policy.parent / "policy.d"
    os.mkfifo(directory / "a.toml", 0o600)
    (directory / "b.toml").mkdir()
    (directory / "c.toml").symlink_to("/dev/zero")
    (directory / "d.toml").symlink_to("/nowhere/at/all")
    (directory / "e.toml").symlink_to("e.toml")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "f.toml"))
        texts, errors = read_policy(policy)
    assert [name for name, _ in texts] == [str(policy)]
    assert [Path(error.file).name for error in errors] == [f"{letter}.toml" for letter in "abcdef"]
    assert all(error.problem and error.hint for error in errors)


def test_a_link_to_a_file_is_followed(policy: Path) -> None:
    """Configuration management links files into /etc."""
    target = put(policy.parent / "elsewhere", "[limits]\n")
    (policy.parent / "policy.d" / "a.toml").symlink_to(target)
    texts, errors = read_policy(policy)
    assert (len(texts), errors) == (2, [])


def test_sizes_and_numbers_are_bounded(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of any size costs one MiB, a directory of any size a bounded number of files."""
    put(policy, b"#" * (policy_files.LARGEST + 1))
    (error,) = read_policy(policy)[1]
    assert "larger than 1024 KiB" in error.problem
    with policy.open("r+b") as file:
        file.truncate(1 << 40)  # sparse: reading it whole would take the memory of any machine
    (error,) = read_policy(policy)[1]
    assert "larger than 1024 KiB" in error.problem
    monkeypatch.setattr(policy_files, "MOST_FILES", 3)
    monkeypatch.setattr(policy_drafts, "MOST_FILES", 3)
    for number in range(5):
        put(policy.parent / "policy.d" / f"{number}.toml", "")
    texts, errors = read_policy(policy)
    assert len(texts) == 3
    assert "more than 3 files" in errors[-1].problem
    assert "more than 3 files" in read_files([policy] * 4)[1][-1].problem


def test_text_that_is_not_utf8_has_its_line(policy: Path) -> None:
    """An old editor's Latin-1 in a comment: the line is all that one needs to find it."""
    put(policy, b"[limits]\n# caf\xe9\nactive_threads = '5%'\n")
    texts, (error,) = read_policy(policy)
    assert (texts, error.line, error.problem) == ([], 2, "is not UTF-8 text")
    put(policy, "[limits]\n".encode("utf-16"))
    assert "UTF-16" in read_policy(policy)[1][0].problem


def test_names_of_files_cannot_upset_a_terminal(policy: Path) -> None:
    """Any byte may be in a file name, and errors are printed."""
    put(Path(os.fsdecode(os.fsencode(policy.parent / "policy.d") + b"/a\x1b[31m\xff.toml")), b"\xff")
    (error,) = read_policy(policy)[1]
    assert str(error).isprintable()
    assert error.file.endswith("a\\x1b[31m\\xff.toml")


@pytest.mark.parametrize("what", ["policy.toml", "policy.d/a.toml", "policy.d"])
@pytest.mark.parametrize(("mode", "refused"), [(0o002, True), (0o020, False), (0o000, False)])
def test_what_everybody_may_write_is_refused(policy: Path, what: str, mode: int, refused: bool) -> None:
    """The policy names a program that root runs: whoever can write it is root. The own group is as good as root."""
    put(policy.parent / "policy.d" / "a.toml", "")
    path = policy.parent / what
    path.chmod(path.stat().st_mode | mode)
    texts, errors = read_policy(policy)
    assert [error.file for error in errors] == ([str(path)] if refused else [])
    assert (len(texts) == 2) is not refused
    assert read_files([policy], judged=False)[1:] == ([], []), "a replay may assume any policy"


def test_a_directory_above_that_everybody_may_write_is_refused(policy: Path) -> None:
    """A user moved policy.d away, and the strict policy was gone at the next reload."""
    policy.parent.chmod(0o777)
    texts, (error,) = read_policy(policy)
    assert (texts, error.file) == ([], str(policy.parent))
    policy.parent.chmod(0o1777)
    assert read_policy(policy)[1] == [], "nobody replaces another user's file in a directory like /tmp"


def test_a_directory_on_a_read_only_file_system_may_have_any_mode(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ConfigMap's directory in a pod has mode 0777, and nobody can write to it."""
    policy.parent.chmod(0o777)
    real = os.statvfs

    def read_only(path: Path) -> os.statvfs_result:
        found = list(real(path))
        found[8] |= os.ST_RDONLY if path == policy.parent else 0
        return os.statvfs_result(found)

    monkeypatch.setattr(policy_files.os, "statvfs", read_only)
    assert read_policy(policy)[1] == []


def test_a_directory_above_the_file_that_a_link_leads_to_counts(policy: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    put(elsewhere / "mine.toml", "")
    (policy.parent / "policy.d" / "a.toml").symlink_to(elsewhere / "mine.toml")
    assert read_policy(policy)[1] == []
    elsewhere.chmod(0o777)
    texts, (error,) = read_policy(policy)
    assert (len(texts), error.file) == (1, str(elsewhere))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_directory_above_that_belongs_to_somebody_else_is_refused(policy: Path) -> None:
    os.chown(policy.parent, 65534, 0)
    (error,) = read_policy(policy)[1]
    assert (error.file, "belongs to uid 65534" in error.problem) == (str(policy.parent), True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
@pytest.mark.parametrize("what", ["policy.toml", "policy.d/a.toml", "policy.d"])
def test_what_belongs_to_somebody_else_is_refused(policy: Path, what: str) -> None:
    """The same for the owner, and for a group that may write."""
    put(policy.parent / "policy.d" / "a.toml", "")
    path = policy.parent / what
    os.chown(path, 65534, 0)
    (error,) = read_policy(policy)[1]
    assert (error.file, "belongs to uid 65534" in error.problem) == (str(path), True)
    os.chown(path, 0, 65534)
    path.chmod(path.stat().st_mode | 0o020)
    (error,) = read_policy(policy)[1]
    assert (error.file, "group 65534" in error.problem) == (str(path), True)
    if path == policy:
        assert read_files([policy])[1:] == ([error], []), "a check judges as the agent does"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_file_that_may_not_be_read_is_an_error(policy: Path) -> None:
    """`policy check` by a user who may not read the policy says so, instead of checking nothing."""
    policy.chmod(0o600)
    child = os.fork()
    if child == 0:  # in the child: exit status 0 when the answer is right
        status = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            texts, errors, _ = read_files([policy])
            status = 0 if texts == [] and "permission denied" in errors[0].problem else 1
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs two other users")
def test_a_draft_of_ones_own_is_checked_with_a_note() -> None:
    """Whoever writes a policy for root needs no root to check it, and hears what root's agent would say. A file of
    another user is refused to them as well."""
    cases = ((65534, ["the text", "a note"]), (65533, ["an error"]), (0, ["an error"]))
    for owner, expected in cases:
        place = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own directories are closed to other users
        place.chmod(0o755)
        policy = put(place / "policy.toml", "[limits]\n", 0o666)
        os.chown(policy, owner, owner)
        child = os.fork()
        if child == 0:  # in the child: exit status 0 when the answer is right
            status = 1
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                texts, errors, notes = read_files([policy])
                found = ["the text"] * len(texts) + ["an error"] * len(errors) + ["a note"] * len(notes)
                status = 0 if found == expected else 1
            finally:
                os._exit(status)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        shutil.rmtree(place)
        assert ended == 0, owner
