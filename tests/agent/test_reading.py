"""What an administrator reads, from a real agent with several users, on a terminal of 80 columns."""

from __future__ import annotations

import re

from tests.agent.stage import A, B, C, Stage
from tests.cli.program import PROGRAM, on_terminal

PYTHON = re.compile(r"\b(None|True|False|nan|inf)\b|[{}\[\]]|\(begun\)|<\w+|\w+Error\(|\buid \d|\d{10}\.\d")
"""Values as Python writes them, enumerations, times as seconds since 1970, and uids where users are meant."""


def asked(stage: Stage, *words: str) -> tuple[int, list[str]]:
    """The exit status, and the lines."""
    socket = str(stage.place / "agent.sock")
    status, out = on_terminal([PROGRAM, *words], typed=True, NO_COLOR="1", MPSAGENT_SOCKET=socket)
    return status, out.decode().replace("\r\n", "\n").splitlines()


def read(stage: Stage, *words: str, columns: int = 80) -> str:
    status, lines = asked(stage, *words)
    assert status in (0, 1), (words, lines)
    assert max(map(len, lines)) <= columns, (words, lines)
    # an action that is under way just now is told as begun, and that is right
    told = [line.removesuffix("(begun)") if words[0] == "events" else line for line in lines]
    assert not [line for line in told if PYTHON.search(line)], (words, lines)
    return "\n".join(lines)


def test_everything_is_in_words_and_fits(stage: Stage) -> None:
    """While two users wait for a third, one client is ended, one is turned away and one has a fault."""
    policy = f'[limits]\nthreads = 20\nmemory = "2G"\n[user.{C + 1}]\naccess = "deny"\n'
    agent = stage.with_agent(policy + '[hang]\nfault = "1s"\nkill_grace = "1s"\n')
    first, second = stage.client(A, "sleep", 600), stage.client(A, "sleep", 600)
    first.known()
    second.known()
    waiting = []
    for uid in (B, C):  # one after the other: who came first is next
        waiting.append(stage.client(uid, "sleep", 600))
        stage.waiting(waiting[-1])
    refused = stage.client(C + 1, "query")
    refused.ended()
    stage.record("client.refused", pid=refused.pid)
    status, lines = asked(stage, "client", "terminate", str(first.pid))
    assert (status, f"client {first.pid} of user {A} ended after" in " ".join(lines[-2:])) == (0, True)
    assert len([line for line in lines if "asked MPS to end" in line]) == 1

    page = read(stage, "status")
    assert len(page.splitlines()) < 24
    for words in (f"by user {A} since", "1 process", f"user {B} since", f"it is the turn of user {A}", "at the latest",
                  "not sure", "change"):  # fmt: skip
        assert words in " ".join(page.split()), page
    clients = read(stage, "clients")
    assert f"{second.pid}" in clients
    assert re.search(rf"{second.pid} .* (MiB|GiB|-) +20 %, 2G +\S", clients)
    queue = " ".join(read(stage, "queue").split())  # around midnight dates are in it, and the reason has two lines
    assert queue.count(f"it is the turn of user {A}") == 2
    assert "20 %, 2G" in read(stage, "servers")

    second.kill()
    culprit = waiting[0]
    culprit.working()
    stage.client(B, "oob", 0.1).ended()
    stage.record("server.fault")
    stage.record("server.fault_over")
    told = " ".join(read(stage, "events", "-n", "200", columns=100).split())
    for words in (f"process {refused.pid} of user {C + 1} was refused: the policy denies user {C + 1} MPS",
                  f"root ordered the end of client {first.pid} of user {A}",
                  "is in FAULT and takes no new clients", "recovered from its fault after"):  # fmt: skip
        assert words in told, told
    assert re.search(r"fault +\d\d:\d\d:\d\d on server", read(stage, "status"))
    log = agent.log().splitlines()
    assert not [line for line in log if PYTHON.search(line)], log
