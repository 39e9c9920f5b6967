"""``mpsagent-cli clients``, ``servers`` and ``queue``: who works, who waits, why, and until when."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mpsagent.cli import answer_text, ask
from mpsagent.core import placement
from tests.api.stand_in import ADMIN, OTHER, USER, Served
from tests.cli.program import PROGRAM, run
from tests.never_comes import USER as NOBODYS
from tests.never_comes import process_that_cannot_be_read
from tests.waiting import until


def test_clients_and_queue_say_what_and_why(served: Served) -> None:
    """The command of each process, as the gate saw it; why each user is held, and until when at the latest."""
    out = run(served, "clients").stdout
    assert "python train.py" in out
    assert "python job-602.py" in out
    assert len(out.splitlines()) == 5
    rows = run(served, "queue", TZ="UTC").stdout.splitlines()
    assert rows[1].split(maxsplit=6)[:4] == ["1", "bob", "2", "30.0s"]
    assert rows[1].endswith("it is the turn of alice")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: to be another user")
@pytest.mark.parametrize(
    ("uid", "text"),
    [
        (OTHER, ["You are number 1 of 2, with 2 processes, since 00:00:10 (30.0s): it is the turn of",
                 "alice; served by 00:31:20 at the latest."]),
        (ADMIN, ["You are number 2 of 2, with 1 process, since 00:00:20 (20.0s): it is the turn of alice;",
                 "served by 01:02:30 at the latest."]),
        (USER, ["No process of yours waits."]),
    ],
)  # fmt: skip
def test_a_user_is_told_first_where_that_user_stands(served: Served, uid: int, text: list[str]) -> None:
    """Place, why, and the latest time; then the queue."""
    as_user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    reading = [
        "--inh-caps=+dac_read_search",
        "--ambient-caps=+dac_read_search",
    ]  # of a checkout that only root may read
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "TZ": "UTC", "MPSAGENT_SOCKET": str(served.path)}
    done = subprocess.run(
        [*as_user, *reading, PROGRAM, "queue"], env=env, capture_output=True, text=True, check=True, timeout=60
    )
    own, _, rest = done.stdout.partition("\n\n")
    assert " ".join(own.split()).replace("2026-11-21 ", "") == " ".join(text)
    assert max(map(len, own.splitlines())) <= 80
    assert rest.splitlines()[0].split() == ["#", "USER", "PROCESSES", "WAITING", "SERVED", "BY", "WHY"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root to start a process of another user")
def test_a_process_that_cannot_be_read_is_shown_by_its_name_and_holds_nobody_up() -> None:
    """`clients` and `top` of everybody would wait for as long as that process lives."""
    words = ["python3", "-c", "import time; time.sleep(600)"]
    with process_that_cannot_be_read() as pid, subprocess.Popen(words) as other:
        try:
            others = {"pid": other.pid, "uid": 0, "command": "python3"}
            until(lambda: Path(f"/proc/{other.pid}/comm").read_text().strip() == "python3")
            asked = [{"pid": pid, "uid": NOBODYS, "command": "python3"}, others]
            ended = queue.SimpleQueue[list[ask.Json]]()
            for _ in range(2):  # `top` asks again
                threading.Thread(target=lambda: ended.put(ask.command_lines(asked)), daemon=True).start()
                found = ended.get(timeout=60)
        finally:
            other.kill()
    assert [one["command"] for one in found] == ["python3", " ".join(words)]


def test_who_is_denied_is_told_where_the_policy_says_so() -> None:
    access = {"value": "deny", "from": {"key": "user.eve.access", "file": "/etc/mpsagent/policy.toml", "line": 7}}
    said = " ".join(answer_text.none_waits({"access": access}))
    assert "the policy denies you MPS (user.eve.access, /etc/mpsagent/policy.toml:7)" in said
    nowhere = {"value": "deny", "from": {"key": "limits.access", "file": "", "line": 0}}
    assert "denies you MPS, so" in " ".join(answer_text.none_waits({"access": nowhere}))
    no_instance = {"value": "deny", "from": placement.NOWHERE}
    assert "waits: the policy has no instance for this" in " ".join(answer_text.none_waits({"access": no_instance}))


def test_why_is_not_cut_off(served: Served) -> None:
    """A narrow terminal hid the end of the reason, which is the part that matters."""
    found = served.backend.queue()
    rows = [{**one, "why": "MPS's servers do not start: Driver initialization failed with: 100"} for one in found]
    lines = answer_text.queue(rows, datetime(2026, 11, 21, 12, tzinfo=UTC), 80)
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()).count("Driver initialization failed with: 100") == 2


def test_a_place_is_one_of_its_own_instance(served: Served) -> None:
    """Each instance has a queue: "number 1 of 2" was said to who stood alone, and two rows were numbered 1."""
    first, second = served.backend.queue()
    now = datetime(2026, 11, 21, 12, tzinfo=UTC)
    apart = [{**first, "instance": "gpu0"}, {**second, "position": 1, "instance": "gpu1"}]
    assert "You are number 1 of 1," in answer_text.own_place(apart, OTHER, now)[0]
    lines = answer_text.queue(apart, now)
    assert [line.split()[:3] for line in lines] == [
        ["#", "INSTANCE", "USER"],
        ["1", "gpu0", "bob"],
        ["1", "gpu1", "carol"],
    ]
    assert "INSTANCE" not in answer_text.queue([{**one, "instance": "gpu0"} for one in (first, second)], now)[0]


def test_the_command_line_is_shown_to_who_may_see_it(served: Served) -> None:
    """The agent knows the name of the program alone, and a node is full of `python`. What is no longer that process,
    or another's, is shown by that name."""
    with subprocess.Popen(["/bin/sleep", "61"]) as child:
        peer = served.backend.state.clients[501].peer._replace(pid=child.pid, uid=os.getuid(), command="sleep")
        for command, uid, shown in (("sleep", os.getuid(), "sleep 61"), ("train", os.getuid(), "train"),
                                    ("sleep", OTHER, "sleep")):  # fmt: skip
            client = replace(served.backend.state.clients[501], peer=peer._replace(command=command, uid=uid))
            served.backend.state = replace(served.backend.state, clients={501: client})
            row = run(served, "clients").stdout.splitlines()[1]
            assert row[row.index("G  ") + 3 :] == shown
        child.kill()


def test_a_program_on_the_command_line_is_cut(served: Served) -> None:
    """`python -c` was a screen long in a pipe."""
    script = "import time; time.sleep(61)  #" + " more" * 500
    with subprocess.Popen([sys.executable, "-c", script]) as child:
        name = Path(f"/proc/{child.pid}/comm").read_text().strip()
        peer = served.backend.state.clients[501].peer._replace(pid=child.pid, uid=os.getuid(), command=name)
        client = replace(served.backend.state.clients[501], peer=peer)
        served.backend.state = replace(served.backend.state, clients={501: client})
        row = run(served, "clients").stdout.splitlines()[1]
        assert " -c import time; time.sleep(61)" in row
        assert row.endswith("…")
        assert len(row) < 250
        child.kill()


def test_memory_of_clients(served: Served) -> None:
    """Of each process, and of all that have the GPU; what is not known is no zero."""
    served.backend.memory = {501: 570 << 20}
    rows = run(served, "clients").stdout.splitlines()
    column = rows[0].index("MEMORY")
    assert rows[1][column:].startswith("570 MiB  ")
    assert rows[2][column:].startswith("-  ")
    assert "1 process with 570 MiB, 20 %, 1G;" in " ".join(run(served, "status").stdout.split())
    served.backend.memory = {501: 21 << 30}
    assert "with 21.0 GiB" in run(served, "status").stdout
