"""From the package in which the agent was its own API to this one, and back, with clients at work and users waiting."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.booted.machine import Machine
from tests.booted.package import NotBuilt, build, build_before
from tests.booted.service import (
    ALICE,
    BOB,
    CLIENT,
    MULTIPROCESSORS,
    SHARES,
    Worker,
    agent_pid,
    api,
    assert_served_exactly,
    configure,
    enable,
    install,
    installer,
    multiprocessors,
    ready,
    until,
)


@pytest.fixture(params=["deb", "rpm"])
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == "rpm" and not (shutil.which("rpmbuild") and shutil.which("rpm")):
        pytest.skip("rpm and rpmbuild are not installed")
    return str(request.param)


@pytest.fixture
def before(machine: Machine, tmp_path: Path, kind: str) -> Machine:
    """With the package of before, configured and enabled."""
    try:
        old = build_before(tmp_path / "before", kind)
    except NotBuilt as why:
        pytest.skip(str(why))
    install(machine, old)
    enable(machine, words=before_the_names)
    return machine


def before_the_names(text: str) -> str:
    """The policy in the words of the edition before (docs/develop/names.md)."""
    return re.sub(r"active_threads = ['\"](\d+)%['\"]", r"threads = \1", text)


MOST = 24
"""Processes of bob's that wait: on a busy machine an installation takes minutes."""


class Busy:
    """Alice works, and two processes of bob wait for their turn."""

    def __init__(self, node: Machine) -> None:
        self._node = node
        self._worker = Worker(node, ALICE)
        self._waiting = [self._bob() for _ in range(2)]
        until("they wait", self._all_wait)

    def _bob(self) -> subprocess.Popen[str]:
        return self._node.start(CLIENT, "query", user=BOB)

    def _all_wait(self) -> bool:
        queue = api(self._node, "/v1/queue")["queue"]
        return [(one["uid"], len(one["clients"])) for one in queue] == [(int(BOB), len(self._waiting))]

    def install(self, package: str, words: Callable[[str], str] = str) -> str:
        """What the installation says. More processes of bob come while it runs. The policy is written in the ``words``
        of that edition first, because neither knows the other's."""
        agent = agent_pid(self._node)
        configure(self._node, words)
        installing = self._node.start(*installer(Path(package).suffix), package)
        while installing.poll() is None:
            if len(self._waiting) < MOST:
                self._waiting.append(self._bob())
            time.sleep(0.5)
        said = installing.communicate()[0]
        assert installing.returncode == 0, said
        until("another agent", lambda: agent_pid(self._node) not in ("0", agent))
        until("ready for users", lambda: ready(self._node))
        return said

    def assert_undisturbed(self) -> None:
        """Alice's client works on, bob's wait, and all come to a good end with exactly their limits."""
        clients = api(self._node, "/v1/clients")["clients"]
        assert [one["uid"] for one in clients if one["state"] == "running"] == [int(ALICE)]
        until("all of bob's wait", self._all_wait)
        self._worker.finish()
        for one in self._waiting:
            served(one)
        assert self._node.systemctl("is-system-running", check=False) == "running", self._node.systemctl("--failed")


def served(client: subprocess.Popen[str]) -> None:
    said = client.communicate(timeout=60)[0]
    assert client.returncode == 0, said
    assert multiprocessors(said) == MULTIPROCESSORS * SHARES[BOB] // 200 * 2


def kinds(node: Machine, uid: str) -> list[str]:
    """What the history has of a user, oldest first."""
    events = api(node, "/v1/events?cursor=0&limit=1000")["events"]
    return [event["kind"] for event in events if event.get("uid") == int(uid)]


def histories(node: Machine) -> list[str]:
    """What an agent has of its own."""
    return sorted(file.name for file in node.path("/var/lib/mpsagent").glob("history.db*"))


def daemon(node: Machine) -> str:
    return node.show("mpsagent-control@default.service", "MainPID")["MainPID"]


@pytest.mark.timeout(600)
def test_an_upgrade_from_an_agent_that_was_its_own_api_and_back(before: Machine, kind: str) -> None:
    """Nobody notices either; the api has the history of before, and the way back says that it does not."""
    node = before
    new = f"/root/new.{kind}"
    shutil.copyfile(build(kind), node.path(new))
    assert_served_exactly(node, BOB)
    told, busy, mps = kinds(node, BOB), Busy(node), daemon(node)
    busy.install(new)
    until("the history of before", lambda: told and kinds(node, BOB)[: len(told)] == told)
    busy.assert_undisturbed()
    found = node.path("/var/lib/mpsagent-api/history.db").stat()
    assert (found.st_uid, found.st_mode & 0o777) == (int(node.run("id", "-u", "mpsagent-api").stdout), 0o600)
    assert not histories(node)

    told, busy = kinds(node, BOB), Busy(node)
    said = busy.install(f"/root/mpsagent.{kind}", before_the_names)
    assert "does not read /var/lib/mpsagent-api/history.db" in said
    busy.assert_undisturbed()
    assert node.run("pgrep", "-f", "mpsagent-api", check=False).returncode == 1

    busy = Busy(node)
    busy.install(new)
    busy.assert_undisturbed()
    until("the history of before", lambda: kinds(node, BOB)[: len(told)] == told)
    assert daemon(node) == mps
    # What an agent that was killed leaves is no log of the history that is there.
    node.write("/var/lib/mpsagent/history.db-wal", "of another history")
    node.systemctl("restart", "mpsagent-api.service")
    assert kinds(node, BOB)[: len(told)] == told
    assert histories(node) == ["history.db", "history.db-wal"]
    assert "history.db, of an agent before mpsagent-api, is not taken" in node.journal("-u", "mpsagent-api")
