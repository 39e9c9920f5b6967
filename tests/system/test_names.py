"""Names from a service that may hang: the agent never waits longer than it said."""

from __future__ import annotations

import asyncio
import grp
import os
import pwd
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mpsagent.linux import threads
from mpsagent.linux.threads import in_thread
from mpsagent.policy.identity import Identity
from mpsagent.system import names as module
from mpsagent.system.names import Names
from tests.coroutines import until
from tests.system.conftest import Play


async def test_a_real_user_with_his_groups() -> None:
    """From this machine's own files: name, primary group first."""
    names = Names(deadline=60)
    assert names.known(os.getuid()) is None
    identity = await names.look_up(os.getuid())
    entry = pwd.getpwuid(os.getuid())
    assert identity.name == entry.pw_name
    assert identity.groups[0] == grp.getgrgid(entry.pw_gid).gr_name
    assert len(set(identity.groups)) == len(identity.groups)
    assert names.known(os.getuid()) == identity
    assert await names.uid_of(entry.pw_name) == os.getuid()
    assert await names.uid_of("no-such-user-here") is None
    assert await names.uid_of("nul\0") is None
    assert await names.look_up(3_999_999_999) == Identity(3_999_999_999)
    assert names.known(3_999_999_999) == Identity(3_999_999_999), "that there is no entry is an answer too"


class Service:
    """A name service whose answers can be held back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.asked = 0
        self.groups: tuple[str, ...] = ("students",)
        self.broken = False
        monkeypatch.setattr(module, "identity_of", self.answer)

    def answer(self, uid: int) -> Identity:
        self.asked += 1
        self.gate.wait(60)
        if self.broken:
            raise OSError("no server reachable")
        return Identity(uid, f"user{uid}", self.groups)


async def test_a_hanging_service_costs_the_deadline_and_its_late_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop runs on meanwhile; ten callers ask one question; the answer is kept when it comes."""
    service = Service(monkeypatch)
    service.gate.clear()
    names = Names(deadline=0.2)
    found = await asyncio.gather(*(names.look_up(1001) for _ in range(10)))
    assert found == [Identity(1001)] * 10
    assert names.known(1001) is None, "no answer is not an answer"
    await until(lambda: service.asked)  # its thread may begin only now
    service.gate.set()
    await until(lambda: names.known(1001) is not None)
    assert names.known(1001) == Identity(1001, "user1001", ("students",))
    assert service.asked == 1


async def test_an_old_answer_is_renewed_behind_the_scenes_and_kept_while_nobody_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A user with limits of his own must not become nobody because LDAP is down."""
    service = Service(monkeypatch)
    names = Names(deadline=60, age=0.0)
    await names.look_up(1001)
    service.groups = ("staff",)
    assert names.known(1001) == Identity(1001, "user1001", ("students",))
    await until(lambda: names.known(1001) == Identity(1001, "user1001", ("staff",)))
    await asyncio.sleep(0.05)
    service.broken = True
    assert (await names.look_up(1001)).groups == ("staff",)
    service.gate.clear()
    names.deadline = 0.2
    names.forget()
    assert (await names.look_up(1001)).groups == ("staff",)
    names.deadline = 60
    service.gate.set()
    names.forget()
    service.broken = False
    assert (await names.look_up(1001)).groups == ("staff",)


async def test_an_account_that_is_renumbered_is_asked_about_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its uid is another's from then on, with that one's limits."""
    passwd = tmp_path / "passwd"
    passwd.write_text("")
    monkeypatch.setattr(module, "FILES", (str(passwd),))
    monkeypatch.setattr(module, "LOOK", 0.0)
    service = Service(monkeypatch)
    names = Names(deadline=60)
    await names.look_up(1001)
    await names.look_up(1001)
    assert service.asked == 1
    service.groups = ("staff",)
    os.utime(passwd, ns=(1, 1))
    assert (await names.look_up(1001)).groups == ("staff",)
    await names.look_up(1001)
    assert service.asked == 2


async def test_what_was_asked_before_a_change_is_asked_again_when_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow service says who it was; that was taken for new, for 300 s."""
    service = Service(monkeypatch)
    service.gate.clear()
    names = Names(deadline=60)
    asked = asyncio.create_task(names.look_up(1001))
    await until(lambda: service.asked)
    names.forget()
    service.gate.set()
    await asked
    service.groups = ("staff",)
    assert (await names.look_up(1001)).groups == ("staff",)


async def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of uids may show up over the months."""
    Service(monkeypatch)
    monkeypatch.setattr(module, "CAPACITY", 3)
    names = Names(deadline=60)
    for uid in range(10):
        await names.look_up(uid)
    assert [uid for uid in range(10) if names.known(uid)] == [7, 8, 9]


def test_a_hanging_name_service_does_not_take_the_threads_of_all_else(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user may ask about names that nobody has; after 32 of them no user was known and no history written."""
    answers = threading.Event()
    monkeypatch.setattr(module.pwd, "getpwnam", lambda name: answers.wait(60))

    async def scenario() -> None:
        names = Names(deadline=0.002)
        for number in range(threads.THREADS):
            with pytest.raises(TimeoutError):
                await names.uid_of(f"nobody-{number}")
        assert await in_thread(len, "four", deadline=60) == 4
        assert (await Names(deadline=60).look_up(os.getuid())).name is not None

    try:
        play(scenario())
    finally:
        answers.set()


async def test_stuck_threads_are_bounded_and_come_back() -> None:
    """A service that hangs for hours must not pile up threads; when it answers again, so does the agent."""
    gate = threading.Event()
    for _ in range(threads.THREADS):
        with pytest.raises(TimeoutError):
            await in_thread(gate.wait, 60, deadline=0.001)
    before = len(os.listdir("/proc/self/task"))
    with pytest.raises(TimeoutError, match="earlier calls"):
        await in_thread(gate.wait, 60, deadline=5)
    assert len(os.listdir("/proc/self/task")) <= before
    gate.set()
    while True:  # the test's own bound is one for failing
        try:
            assert await in_thread(len, "four", deadline=60) == 4
            break
        except TimeoutError:
            await asyncio.sleep(0.01)
    with pytest.raises(ZeroDivisionError):
        await in_thread(divmod, 1, 0, deadline=60)


AS_AGENT = """
import asyncio, ctypes, sys
from mpsagent.system import names as module

module.NSSWITCH, services, age = sys.argv[1], sys.argv[2], float(sys.argv[3])
for database in (b"passwd", b"group"):
    ctypes.CDLL(None).__nss_configure_lookup(database, services.encode())

async def main():
    names = module.Names(deadline=60, age=age)
    module.AGAIN = 0.0
    for line in sys.stdin:
        if line.strip() == "forget":
            names.forget()
        uid = 4243 if line.strip() == "another" else 4242
        who = await names.look_up(uid)
        print(who.name, *who.groups, uid in names._known, flush=True)

asyncio.run(main())
"""


class Agent:
    """Asks who zoe is, in a process of its own in which glibc has these services."""

    def __init__(self, place: Path, services: str, age: float = 0.0) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("needs a C compiler, for the name service")
        source = Path(__file__).with_name("nss.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", place / "libnss_stand.so.2", source, "-ldl"], check=True)
        switch = place / "nsswitch.conf"
        switch.write_text(f"# passwd: ldap\npasswd: {services} # local\ngroup:\t{services}\n")
        self.process = subprocess.Popen(
            [sys.executable, "-c", AS_AGENT, str(switch), services, str(age)], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "LD_LIBRARY_PATH": str(place)},
        )  # fmt: skip

    def ask(self, what: str = "") -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(what, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


@pytest.mark.parametrize("services", ["files stand", "files stand [NOTFOUND=return] files", "stand files missing"])
@pytest.mark.parametrize("down", ["passwd", "group"])
def test_a_name_service_that_is_down_has_not_said_that_there_is_no_such_user(
    tmp_path: Path, services: str, down: str
) -> None:
    """glibc's own: a service that does not answer looks to Python like a user, or a group, that does not exist, and
    when another one is asked after it, to glibc, too. What was known stays, also over a reload, until it has answered;
    who was not known is not taken for a user without a name."""
    with Agent(tmp_path, services) as agent:
        zoe = f"zoe {grp.getgrgid(0).gr_name} club True"
        assert agent.ask() == zoe
        (tmp_path / f"{down}.down").touch()
        assert [agent.ask(), agent.ask("forget"), agent.ask()] == [zoe, zoe, zoe]
        assert agent.ask("another") == "None False"
        (tmp_path / "deleted").touch()
        (tmp_path / f"{down}.down").unlink()
        assert agent.ask() == "None True", "that there is no such user is an answer"
        assert agent.ask("another") == "None True"
        (tmp_path / "deleted").unlink()
        assert agent.ask() == zoe


def test_nobody_waits_for_a_name_service_that_is_installed_and_not_in_use(tmp_path: Path) -> None:
    """``sss`` stands in many machines' nsswitch.conf without a daemon behind it; containers have uids without names."""
    (tmp_path / "passwd.down").touch()
    (tmp_path / "group.down").touch()
    with Agent(tmp_path, "files stand") as agent:
        assert agent.ask("another") == "None True"


@pytest.mark.parametrize("down", ["passwd", "group"])
def test_what_a_name_service_says_that_came_up_after_the_agent_counts_soon(tmp_path: Path, down: str) -> None:
    """Not when the answer that was without it is 300 s old; and for all, whoever is asked about first."""
    (tmp_path / f"{down}.down").touch()
    with Agent(tmp_path, "files stand", age=300) as agent:
        zoe = f"zoe {grp.getgrgid(0).gr_name} club True"
        before = agent.ask(), agent.ask("another")
        assert before[0] != zoe
        assert (agent.ask(), agent.ask("another")) == before
        (tmp_path / f"{down}.down").unlink()
        agent.ask("another")
        assert agent.ask() == zoe
