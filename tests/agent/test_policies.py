"""The policy to start with: a file that is wrong or gone never means everything for everybody."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from mpsagent.agent import policies
from mpsagent.agent.policies import keep_fixed, last_good, read, start
from mpsagent.agent.settings import Settings
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy
from mpsagent.policy.values import Percent

ALICE = Identity(1001, "alice")
BROKEN = {
    "missing": None,
    "wrong": "[limits]\nactive_threads = '500%'\n",
    "torn": "[limits",
    "open to all": "[limits]\n",
}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "state").mkdir()
    return Settings(policy=str(tmp_path / "policy.toml"), state_directory=str(tmp_path / "state"))


def write(settings: Settings, text: str | None) -> None:
    path = Path(settings.policy)
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
        path.chmod(0o666 if text == BROKEN["open to all"] else 0o644)


def test_a_good_policy_is_taken_and_remembered(settings: Settings) -> None:
    """The common case."""
    write(settings, "[limits]\nactive_threads = '30%'\n")
    begun = asyncio.run(start(settings))
    assert (begun.policy.rules(ALICE).threads, begun.errors, begun.kept) == (Percent(30.0), (), "")
    assert asyncio.run(last_good(settings)) == begun.policy


@pytest.mark.parametrize("how", BROKEN)
def test_without_an_earlier_policy_no_one_is_admitted(settings: Settings, how: str) -> None:
    """A first start with a mistake: nobody can use the GPU, and the reason is said; before, everybody could use all."""
    write(settings, BROKEN[how])
    begun = asyncio.run(start(settings))
    assert begun.policy.rules(ALICE).access == begun.policy.rules(Identity(0, "root")).access == "deny"
    assert begun.policy.rules(ALICE).origin("access").file == settings.policy
    assert begun.errors
    assert begun.errors[0].file == settings.policy
    assert "no one is admitted" in begun.kept


def test_no_one_is_admitted_at_the_place_of_the_files(settings: Settings) -> None:
    """With a mistake elsewhere in the files the gate stood at NVIDIA's default place, and users whose environment
    names theirs ran outside MPS; put right, the policy took hold at the next start only."""
    places = '[instance.gpu0]\npipe_directory = "/run/there"\nlog_directory = "/srv/log"\n'
    write(settings, places + "[limits]\nactive_threads = '500%'\n")
    begun = asyncio.run(start(settings)).policy
    assert begun.rules(ALICE).access == "deny"
    assert (begun.instance, begun.pipe_directory, begun.log_directory) == ("gpu0", "/run/there", "/srv/log")
    right, errors = load([("p", places)])
    assert right is not None, errors
    assert keep_fixed(begun, right) == (right, None)


@pytest.mark.parametrize("how", BROKEN)
def test_the_last_good_policy_stays(settings: Settings, how: str) -> None:
    """A later start with the same mistake, and one more: the bad files have not replaced what was remembered."""
    write(settings, "[limits]\nactive_threads = '30%'\n")
    asyncio.run(start(settings))
    write(settings, BROKEN[how])
    for _ in range(2):
        begun = asyncio.run(start(settings))
        assert (begun.policy.rules(ALICE).threads, begun.policy.rules(ALICE).access) == (Percent(30.0), "allow")
        assert begun.errors
        assert "last good policy" in begun.kept
    assert asyncio.run(read(settings))[0] is None, "a reload refuses it too"


def test_a_part_that_is_wrong_is_as_bad_as_the_whole(settings: Settings, tmp_path: Path) -> None:
    """The parts in policy.d are the policy as much as the first file is."""
    write(settings, "[limits]\nactive_threads = '30%'\n")
    (tmp_path / "policy.d").mkdir(mode=0o755)
    (tmp_path / "policy.d" / "a.toml").symlink_to("/nowhere")
    policy, errors = asyncio.run(read(settings))
    assert policy is None
    assert [one.file for one in errors] == [str(tmp_path / "policy.d" / "a.toml")]
    assert asyncio.run(last_good(settings)) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '[["p", "[limits]\\nactive_threads = "500%"\\n"]]', '[["p"]]', "\x00"])
def test_a_damaged_memory_is_no_policy(settings: Settings, text: str) -> None:
    """Whatever a full disk left there. (An empty list is what an agent without files had; it is not one either.)"""
    Path(settings.state_directory or "", "last-policy.json").write_text(text)
    found = asyncio.run(last_good(settings))
    assert found is None
    assert asyncio.run(start(settings)).policy.rules(ALICE).access == "deny"


def test_a_file_system_that_hangs_is_an_error(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """/etc on a dead NFS server: the agent goes on with the policy that it has, and says why."""
    released = threading.Event()

    def hang(*_: object) -> object:
        released.wait(60)
        return [], []

    monkeypatch.setattr(policies, "read_policy", hang)
    monkeypatch.setattr(policies, "FILES", 0.05)
    try:
        policy, errors = asyncio.run(read(settings))
    finally:
        released.set()
    assert policy is None
    assert "could not be read within 0.05 s" in errors[0].problem


def test_what_a_daemon_was_started_with_waits_for_a_restart() -> None:
    """Its directories; the form of its servers changes by itself when nothing works."""
    text = '[instance.default]\nlog_directory = "/l"\nserver_scope = "all"\n[limits]\nactive_threads = "9%"\n'
    new, errors = load([("p", text)])
    assert new is not None, errors
    kept, said = keep_fixed(Policy(), new)
    assert (kept.log_directory, kept.server) == (Policy().log_directory, "all")
    assert kept.rules(ALICE).threads == Percent(9.0)
    assert said is not None
    assert said.startswith("log_directory changed")
    assert keep_fixed(Policy(), Policy()) == (Policy(), None)
