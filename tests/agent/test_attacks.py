"""What a user without rights may try on a node where everything runs; docs/security.md has the whole list."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from tests.agent.stage import A, B, Stage
from tests.gate.rig import introduce, raw

POLICY = (
    f'[limits]\nactive_threads = "10%"\nmemory_limit = "2G"\n[user.{A}]\nactive_threads = "40%"\n[user.{B}]\n'
    'active_threads = "20%"\n'
)
HIGH = 3_000_000_000
"""A uid that is negative where it is taken for a signed number of 32 bits."""


def test_a_log_that_another_user_has_planted_is_not_written_to(stage: Stage) -> None:
    """The log directory was open to all once: root's daemon would append to what a link in it leads to."""
    victim = stage.place.with_name("victim")
    victim.write_text("precious\n")
    stage.rig.log.mkdir(exist_ok=True)
    stage.rig.log.chmod(0o777)
    link = stage.rig.log / "control.log"
    link.unlink(missing_ok=True)
    link.symlink_to(victim)
    os.lchown(link, B, B)
    stage.policy(POLICY)
    agent = stage.again(ready=False)
    problem = stage.problem(agent, "would append to")
    assert f"rm {link}" in problem
    assert f"uid {B}" in problem
    assert victim.read_text() == "precious\n"
    link.unlink()
    stage.until(lambda: not stage.waits_for(agent), "it starts when the link has gone")
    stage.exact(A, 40)
    assert victim.read_text() == "precious\n"


def test_a_uid_above_two_thousand_million_is_a_user_as_any_other(stage: Stage) -> None:
    """Its own limits, its own turn, and its own number everywhere."""
    agent = stage.with_agent(f'{POLICY}[user."{HIGH}"]\nactive_threads = "50%"\n')
    holder = stage.client(HIGH, "sleep", 600)
    holder.known()
    assert agent.api.status()["turn"]["uid"] == HIGH
    (client,) = agent.api.get("/v1/clients")["clients"]
    assert (client["uid"], client["limits"]["threads"]) == (HIGH, 50.0)
    other = stage.client(HIGH + 1)
    stage.waiting(other)
    assert [one["uid"] for one in agent.api.get("/v1/queue")["queue"]] == [HIGH + 1]
    assert str(HIGH) in stage.cli(agent, "clients")[1]
    holder.kill()
    assert other.ended() == 0
    assert other.inside(10), other.text()
    assert not [one for one in stage.records() if isinstance(one.get("uid"), int) and one["uid"] < 0]


def test_of_those_whom_the_gate_refuses_the_agent_keeps_no_descriptor(stage: Stage) -> None:
    """Each that was held and said something left its pidfd: a program in a loop took all that the agent may have."""
    agent = stage.with_agent(POLICY)
    stage.client(A, "sleep", 600).known()

    def pidfds() -> int:
        found = 0
        for one in Path(f"/proc/{agent.pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # it is closed just now
                found += "pidfd" in os.readlink(one)
        return found

    before = pidfds()
    for count in range(10):
        with introduce(raw(stage.rig.pipe / "control")) as sock:
            stage.until(lambda: agent.api.get("/v1/queue")["queue"], f"{count} is held")
            sock.send(b"let me in")
            assert sock.recv(64) == b""
        stage.until(lambda: not agent.api.get("/v1/queue")["queue"], "it is held no more")
    stage.until(lambda: pidfds() <= before, "they are closed")


def test_lines_of_a_later_year_keep_nobody_waiting(stage: Stage) -> None:
    """Clients write to server.log, too. A server that exits in 2099 by its log was not shut down, nor ended for that it
    did not exit, and who came next waited for as long."""
    agent = stage.with_agent()
    first, second = stage.client(A, "sleep", 600), stage.client(B, "query")
    first.known()
    stage.waiting(second)
    server = agent.api.status()["servers"][0]["pid"]
    said = (f"Client process {first.pid} disconnected", "Server has been notified to shutdown", "Exiting")
    with (stage.rig.log / "server.log").open("a") as log:
        log.writelines(f"[2099-01-01 00:00:00.000 Server {server}] {words}\n" for words in said)
    first.kill()
    assert second.ended() == 0, stage.last_words()
