"""``mpsagent-cli policy``: what a reload would say, before it says it; the policy in force as people write it."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mpsagent.cli import policy_check, policy_text
from mpsagent.policy.files import load
from tests.cli.program import PROGRAM, read_on_terminal

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
DEVICES = [{"ordinal": 0, "uuid": "GPU-1", "name": "H200", "memory": 140 << 30, "multiprocessors": 132}]
DOUBTFUL = '[limits]\nactive_threads = 500\nmemory_limit = "300G"\n[user.rooot]\nactive_threads = "5%"\n'


def check(*words: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}
    command = [PROGRAM, "policy", "check", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def devices(tmp_path: Path) -> str:
    path = tmp_path / "devices.json"
    path.write_text(json.dumps(DEVICES))
    return str(path)


def put(path: Path, text: str, mode: int = 0o644) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_warnings_are_printed_and_do_not_fail(tmp_path: Path, devices: str) -> None:
    """Each with its line and what was meant; the last line says how many."""
    path = put(tmp_path / "p.toml", DOUBTFUL)
    done = check(path, "--devices", devices)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{path}:2: warning: limits.active_threads: 500 multiprocessors")
    assert lines[2].startswith(f"{path}:3: warning: limits.memory_limit: 300G is more than GPU 0 has (140G)")
    assert lines[4] == f"{path}:4: warning: user.rooot: there is no user rooot here"
    assert 'did you mean "root"?' in lines[5]
    assert lines[-1] == f"{path}: OK, with 3 warnings"
    assert not [line for line in lines if line.startswith("sharing")], "no lecture"


def test_on_a_terminal_it_fits_and_in_a_pipe_each_is_one_line(tmp_path: Path, devices: str) -> None:
    """Seen: what `sharing` means in 271 columns, the keys that are possible in 130. Editors and grep read lines."""
    wrong = put(tmp_path / "wrong.toml", "[limits]\nsms = 500\n")
    for words in ([put(tmp_path / "p.toml", DOUBTFUL), "--devices", devices], [wrong]):
        lines, whole = on_terminal(*words), check(*words).stdout
        assert max(map(len, lines)) <= max(80, len(str(tmp_path)) + 20), lines
        assert len(lines) > len(whole.splitlines())
        assert " ".join(" ".join(lines).split()) == " ".join(whole.split())


def on_terminal(*words: str) -> list[str]:
    return read_on_terminal("policy", "check", *words)


def test_parts_that_are_not_named_are_a_note(tmp_path: Path) -> None:
    """Seen: `policy check policy.toml` said "good", and the reload refused a part in policy.d."""
    path = put(tmp_path / "policy.toml", '[timeouts]\ncontrol_daemon = "5s"\n')
    assert "note:" not in check(path).stdout
    (tmp_path / "policy.d").mkdir()
    assert "note:" not in check(path).stdout
    part = put(tmp_path / "policy.d" / "10-a.toml", "[limits]\nthreads = six\n")
    done = check(path)
    assert (done.returncode, done.stdout.splitlines()[0]) == (
        0, f"note: {tmp_path}/policy.d is not read: name its files too",
    )  # fmt: skip
    done = check(path, part)
    assert (done.returncode, "note:" in done.stdout) == (2, False)
    assert "note:" not in check(put(tmp_path / "draft", "")).stdout


def test_strict_makes_warnings_mistakes(tmp_path: Path, devices: str) -> None:
    """For a pipeline that installs policies."""
    path = put(tmp_path / "p.toml", DOUBTFUL)
    done = check(path, "--devices", devices, "--strict")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (2, "3 warnings (not good because of --strict)")
    body = json.loads(check(path, "--devices", devices, "--strict", "--json").stdout)
    assert (body["ok"], body["errors"], body["digest"]) == (False, [], None)
    assert [one["line"] for one in body["warnings"]] == [2, 3, 4]
    good = put(tmp_path / "good.toml", "[limits]\nactive_threads = 26\n")
    assert check(good, "--devices", devices, "--strict").returncode == 0


def test_without_a_gpu_it_says_what_was_not_compared(tmp_path: Path) -> None:
    """On the machine of the person who writes it, or with a driver that hangs. (Here there may be a GPU.)"""
    body = json.loads(check(put(tmp_path / "p.toml", DOUBTFUL), "--json").stdout)
    compared = any(one["key"] == "limits.active_threads" for one in body["warnings"])
    assert compared is not any("not compared with GPUs" in str(one) for one in body["notes"])
    assert json.loads(check(put(tmp_path / "p.toml", '[turn]\ntime_limit = "1m"\n'), "--json").stdout)["notes"] == []


def test_a_file_that_a_reload_refuses_is_refused(tmp_path: Path) -> None:
    """Mode 0666: the check said good, and the reload of the same file refused it."""
    path = put(tmp_path / "p.toml", "[limits]\n", 0o666)
    done = check(path)
    if os.geteuid() == 0:
        assert (done.returncode, "may be written by everybody" in done.stdout) == (2, True)
    else:  # a draft of one's own
        assert (done.returncode, "an agent that runs as root refuses this file" in done.stdout) == (0, True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    """The same for the owner."""
    path = put(tmp_path / "p.toml", "[limits]\n")
    os.chown(path, 65534, 65534)
    done = check(path)
    assert (done.returncode, "belongs to uid 65534" in done.stdout) == (2, True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root reads what its mode forbids")
def test_a_file_that_the_agent_may_not_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mode 0000, root's: the check said good, because root reads everything, and the reload of it failed."""
    monkeypatch.setattr(policy_check, "DIRECTORY", tmp_path)
    path = Path(put(tmp_path / "policy.toml", "[limits]\n", 0o000))
    assert policy_check.check((), as_json=False) == 2
    assert "chmod 0644: the agent has no right to read" in capsys.readouterr().out
    assert path.read_text(), "this process has its rights again"
    path.chmod(0o600)
    assert policy_check.check((), as_json=False) == 0
    directory = tmp_path / "policy.d"
    directory.mkdir(0o000)
    assert policy_check.check((), as_json=False) == 2


def test_a_fifo_or_a_device_does_not_hang_it(tmp_path: Path) -> None:
    """Each is named, and the files beside them are checked."""
    fifo, good = tmp_path / "f.toml", put(tmp_path / "good.toml", "[limits]\nactive_threads = '0%'\n")
    os.mkfifo(fifo)
    done = check(str(fifo), "/dev/zero", "/dev/tty", str(tmp_path), good)
    assert done.returncode == 2
    assert done.stdout.count("is not a regular file") == 4
    assert f"{good}:2: limits.active_threads" in done.stdout
    assert done.stdout.splitlines()[-1] == "5 mistakes"


def test_what_is_wrong_and_what_is_missing(tmp_path: Path) -> None:
    """A file with a mistake has no warnings yet: they come when it is right."""
    bad = put(tmp_path / "bad.toml", "[limits]\nactive_threads = '500%'\n[user.rooot]\n")
    body = json.loads(check(bad, str(tmp_path / "none.toml"), "--json").stdout)
    assert [(one["line"], one["key"]) for one in body["errors"]] == [(0, ""), (2, "limits.active_threads")]
    assert body["warnings"] == []
    done = check(bad, "--devices", bad)
    assert done.returncode == 2


@pytest.mark.skipif(Path("/etc/mpsagent").exists(), reason="mpsagent is installed here")
def test_a_policy_that_is_not_there_is_a_mistake() -> None:
    """Without FILES the agent's own are checked; none at all is what the agent refuses, too."""
    done = check()
    assert done.returncode == 2
    assert done.stdout.startswith("/etc/mpsagent/policy.toml: is missing")


def test_devices_that_make_no_sense_are_said(tmp_path: Path) -> None:
    """Not a traceback."""
    path = put(tmp_path / "p.toml", DOUBTFUL)
    done = check(path, "--devices", put(tmp_path / "d.json", "[1]"))
    assert (done.returncode, "expected an object" in done.stderr) == (2, True)


def test_totals_are_told_in_their_own_words() -> None:
    from mpsagent.cli.policy_text import explained
    from mpsagent.policy.identity import Identity

    text = '[limits]\nactive_threads = 26\nmemory_limit = "1G"\ntotal_active_threads = {}\ntotal_memory_limit = {}\n'
    for written, shown in (
        (("52", '"40G"'), ("52 multiprocessors", "40G on each GPU")),
        (('"60%"', '"50%"'), ("60%", "50% on each GPU")),
    ):
        policy, errors = load([("p.toml", text.format(*written))])
        assert policy is not None, errors
        lines = explained(json.loads(json.dumps(policy.rules(Identity(7)).explain([]))), NOW)
        for key, words in zip(("total_active_threads", "total_memory_limit"), shown, strict=True):
            assert any(line.startswith(key) and words in line for line in lines), lines


def test_a_priority_is_a_number_and_no_time() -> None:
    from mpsagent.cli.policy_text import explained

    lines = explained({"user": "alice", "uid": 7, "queue_priority": {"value": 5, "from": "built-in default"}}, NOW)
    assert [line.split()[:2] for line in lines if line.startswith("queue_priority")] == [["queue_priority", "5"]]


def test_the_policy_is_shown_as_a_table() -> None:
    """A line for each key, with its place; it was seven lines for each."""
    policy, errors = load(
        [("/etc/p.toml", '[limits]\nactive_threads = "20%"\nmemory_limit = "2G"\n[turn]\ntime_limit = "10m"\n')]
    )
    assert policy is not None, errors
    body = {
        "digest": policy.digest,
        "loaded": None,
        "files": ["/etc/p.toml"],
        "errors": [],
        "sections": policy.sections(),
    }
    assert policy_text.shown(body, datetime(2026, 11, 21, tzinfo=UTC)) == [
        f"{policy.digest[:12]}, from /etc/p.toml",
        "",
        "KEY                    VALUE   FROM",
        "limits.active_threads  20%     /etc/p.toml:2",
        "limits.memory_limit    2G      /etc/p.toml:3",
        "turn.time_limit        10m00s  /etc/p.toml:5",
    ]


def test_values_are_shown_as_people_write_them() -> None:
    """Seen: 26 multiprocessors as "1M", a weight of 3 as "3.0", 9 users as "9.0s", a size of 1G as "12427d13h", and
    a table by device and a list as Python has them."""
    text = """
[limits]
active_threads = 26
memory_limit = { 0 = "20G", 1 = "3.5G", "GPU-1" = "10%" }
max_runtime = "never"
[user.a]
active_threads = { weight = 3 }
memory_limit = { 0 = "1G", 1 = "1G" }
[user.b]
active_threads = { clients = 4, rule = "double" }
memory_limit = { 1 = "1G" }
max_clients = 7
[instance.one]
devices = ["GPU-1", "GPU-2"]
users = ["a", "b"]
outside_mps_exempt = []
max_users = 9
log_size = "1G"
"""
    policy, errors = load([("p.toml", text)])
    assert policy is not None, errors
    body = {"digest": policy.digest, "loaded": None, "files": ["p.toml"], "errors": [], "sections": policy.sections()}
    lines = policy_text.shown(json.loads(json.dumps(body)), datetime(2026, 11, 22, tzinfo=UTC))[3:]
    assert [" ".join(line.split()[1:-1]) for line in lines] == [
        "26 multiprocessors", "0=20G 1=3584M GPU-1=10%", "never",
        "weight 3", "1G on each of 2 GPUs",
        "for 4 clients, double", "1=1G", "7",
        "GPU-1, GPU-2", "a, b", "none", "9", "1G",
    ]  # fmt: skip


def test_every_count_of_a_policy_is_shown_as_one() -> None:
    """A key that is added later, too."""
    from mpsagent.cli.policy_text import COUNTS, NEVER
    from mpsagent.policy.keys import KEYS

    counts = {key.path[-1] for key in KEYS if key.kind.schema.get("type") == "integer"}
    never = {key.path[-1] for key in KEYS if {"const": "never"} in key.kind.schema.get("anyOf", [])}
    assert (counts, never) == (set(COUNTS), set(NEVER))
