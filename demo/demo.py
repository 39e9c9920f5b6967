"""Half a minute of agent and gate: four users do ordinary and harmful things on a simulated GPU.

The first scene shows the default, which is an empty policy. The other scenes show one policy with memory limits and
turns, and the agent's own events as they happen. The output and the exit statuses of the users' programs decide the
summary. Exit status 0: the default and the four promises were kept. Exit status 1: one of them was not.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo.show import Show
from demo.stage import Client, Stage, StageError, until
from demo.verdict import Facts, judge, judge_default

ALICE, BOB, CAROL, DAVE = 20001, 20002, 20003, 20004
NAMES = {ALICE: "alice", BOB: "bob", CAROL: "carol", DAVE: "dave"}
LIMITS: dict[int, tuple[float, str]] = {
    ALICE: (100.0, "25%"),
    BOB: (100.0, "3G"),
    CAROL: (100.0, "2G"),
    DAVE: (100.0, "1G"),
}
"""Percent of the multiprocessors, and device memory as the policy has it. With turns each user has the whole GPU: a
smaller share would leave the rest of it idle."""
POLICY = """\
[limits]
memory_limit = "1G"
{users}
[turn]
time_limit = "{after}s"
grace = "{grace}s"
[timeouts]
control_daemon = "2s"
server = "2s"
fault_recovery = "1s"
sigkill_delay = "1s"
[agent]
on_stop = "quit"
"""


class Demo:
    """The scenes. Without root all four are one user to the kernel: there are no turns, and the demo says so."""

    def __init__(self, stage: Stage, show: Show, facts: Facts, *, quick: bool) -> None:
        self.stage, self.show, self.facts, self.quick = stage, show, facts, quick
        self.root = os.geteuid() == 0

    def start(self, uid: int, *arguments: str, doing: str = "") -> Client:
        client = self.stage.client(uid, *arguments)
        self.facts.clients.append(client)
        if doing:
            self.show.deed(uid, f"{doing}  (cuda-client {' '.join(arguments)}, pid {client.pid})")
        return client

    def play(self) -> None:
        scenes = [self.works, self.waits, self.blocks, self.starves, self.stops, self.faults, self.kills, self.gates]
        for scene in scenes:
            if self.root or scene not in (self.waits, self.starves):
                scene()

    def works(self) -> None:
        self.show.scene("Ordinary work: a program has its user's limits from its start")
        client = self.start(ALICE, "sleep", "0.5", doing="starts to work")
        client.wait()
        sms, free = client.limits() or (0, 0)
        self.show.deed(ALICE, f"could use {sms} of 132 multiprocessors and {free} MiB")

    def waits(self) -> None:
        self.show.scene(
            "Two users: the second waits, sees why and until when, and is admitted as soon as the first has left"
        )
        first = self.start(ALICE, "work", "100" if self.quick else "150", doing="works")
        first.saw("^ctx")
        second = self.start(BOB, "sleep", "0.5", doing="wants the GPU as well")
        self.answered(second)
        first.wait()
        second.saw("^ctx")
        self.facts.changed(first, second)
        second.wait()

    def blocks(self) -> None:
        self.show.scene(
            "Silent connections and an open front-end: without mpsagent each of them blocks MPS for all users"
        )
        self.stage.guest(DAVE, "silent", 50)
        self.show.deed(DAVE, "opens fifty connections to the control socket and sends nothing")
        self.stage.guest(CAROL, "front-end")
        self.show.deed(CAROL, "starts nvidia-cuda-mps-control and leaves it open")
        client = self.start(BOB, "query", doing="wants the GPU")
        client.saw("^ctx")
        self.facts.blocked(client)
        client.wait()
        began = time.time()
        answer = self.stage.command("get_server_list", BOB).split()
        self.show.deed(BOB, f"asks for the servers, by nvidia-cuda-mps-control: {' '.join(answer) or 'none'}")
        self.facts.outage("a front-end beside an open one", time.time() - began, limit=1.0)

    def starves(self) -> None:
        self.show.scene(
            "Starvation: carol starts program after program and stops one. MPS alone would never serve dave"
        )
        greedy = [self.start(CAROL, "sleep", "1.5", doing="starts a program every half second without an end")]
        greedy[0].saw("^ctx")
        stopped = self.start(CAROL, "sleep", "600")
        stopped.saw("^ctx")
        stopped.signal(signal.SIGSTOP)
        self.show.deed(CAROL, f"stops one of them (SIGSTOP {stopped.pid})")
        patient = self.start(DAVE, "query", doing="waits for a turn")
        self.answered(patient)
        while patient.served() is None and patient.ended is None:
            if time.time() - patient.began > 60:
                raise StageError("dave was not served within a minute")
            if greedy[-1].began < time.time() - 0.5:
                greedy.append(self.start(CAROL, "sleep", "1.5"))
            time.sleep(0.02)
        self.facts.turn(patient)
        for one in (patient, stopped, *greedy):  # those that were ended, those that are served once more
            one.wait()
        self.show.deed(CAROL, f"gives up after {len(greedy) + 1} clients")

    def stops(self) -> None:
        self.show.scene(
            "root terminates a stopped program during a kernel. A plain SIGKILL would end its neighbour's work"
        )
        neighbour = self.start(BOB, "work", "150" if self.quick else "200", doing="works")
        neighbour.saw("^ctx")
        stuck = self.start(BOB, "spin", "600", doing="has a kernel that never ends")
        stuck.saw("^launch")
        time.sleep(0.2)
        stuck.signal(signal.SIGSTOP)
        self.show.deed(BOB, f"stops it (SIGSTOP {stuck.pid})")
        self.show.deed(0, f"mpsagent-cli terminate {stuck.pid}")
        self.stage.order("terminate", pid=stuck.pid)
        stuck.wait()
        self.facts.removed(stuck, [neighbour])
        neighbour.wait()

    def faults(self) -> None:
        self.show.scene("A fault, and a program that ignores it and SIGTERM: MPS alone refuses all new programs")
        leftover = self.start(ALICE, "sleep", "600", "--ignore-term", doing="has a client that ignores every error")
        leftover.saw("^ctx")
        culprit = self.start(ALICE, "oob", "0.2", doing="runs a kernel with an illegal access")
        culprit.wait()
        self.facts.outage("fault with a leftover", self.served(ALICE), limit=2.0)
        leftover.wait()

    def kills(self) -> None:
        self.show.scene("The control daemon is stopped while a program starts, then killed while a program works")
        pid = self.stage.control_pid()
        self.show.deed(0, f"kill -STOP {pid}, the control daemon")
        os.kill(pid, signal.SIGSTOP)
        self.facts.outage("stopped control daemon", self.served(CAROL), limit=2.0 + 2.0)
        victim = self.start(CAROL, "sleep", "600", doing="works")
        victim.saw("^ctx")
        pid = self.stage.control_pid()
        self.show.deed(0, f"kill -KILL {pid}, the control daemon")
        os.kill(pid, signal.SIGKILL)
        took = self.served(CAROL)
        self.facts.outage("killed control daemon", took, limit=2.0)
        victim.signal(signal.SIGTERM)
        victim.wait()

    def gates(self) -> None:
        self.show.scene("Gate and agent are killed while one program works and one waits. CUDA work continues")
        worker = self.start(ALICE, "work", "100", doing="works")  # a second; its turn lasts two once bob waits
        worker.saw("^ctx")
        held = self.start(BOB, "query", doing="waits")
        self.stage.held(held, served=not self.root)
        pid = self.stage.gate_pid()
        self.show.deed(0, f"kill -KILL {pid}, the gate")
        os.kill(pid, signal.SIGKILL)
        assert self.stage.agent is not None
        self.show.deed(0, f"kill -KILL {self.stage.agent.pid}, the agent")
        self.stage.stop_agent(signal.SIGKILL)
        mine = self.start(ALICE, "query", doing="starts another client")
        mine.saw("^ctx")
        self.facts.outage("killed gate and agent, one more client of the user at work", mine.waited(), limit=1.0)
        self.stage.start_agent()
        back = time.time()  # without the agent no other user gets the GPU
        worker.wait()
        held.saw("^ctx")
        if self.root:
            self.facts.changed(worker, held, back)
        self.facts.undisturbed.append(worker)
        for client in (mine, held):
            client.wait()

    def answered(self, client: Client) -> None:
        """Show the reason and the latest time that the queue has for the user of a waiting client."""
        rows: list[dict[str, Any]] = []

        def found() -> bool:
            rows[:] = [row for row in self.stage.ask("/v1/queue")["queue"] if client.pid in row["clients"]]
            return any(row["turn"] for row in rows) or client.served() is not None

        until("the answer of the queue", found)
        for row in rows[:1]:
            self.facts.answers.append((row["why"], row["turn_seconds"]))
            self.show.deed(client.uid, f"sees in mpsagent-cli queue: {row['why']}, {row['turn_seconds']:.1f} s at most")

    def served(self, uid: int) -> float:
        """Return the seconds from a new client's start until it is served. It is held while MPS is not there."""
        client = self.start(uid, "query", doing="wants the GPU")
        until("the client", lambda: client.served() or client.ended)
        client.wait()
        return client.waited()


def without_policy(show: Show) -> bool:
    """Show the default: users who work at once, and a fault of one of them. Return whether it kept its promise."""
    show.scene("Without a policy: four users work at once, each on the user's own control daemon")
    with Stage("", sharing="per-user") as stage:
        stage.start_agent()
        until("the gate", lambda: stage.ask("/v1/status")["gate"]["in_force"])
        clients = [stage.client(uid, "fault" if uid == DAVE else "sleep", "600") for uid in NAMES]
        for one in clients:
            one.saw("^ctx")
        at_once = all(one.ended is None for one in clients)
        for one in clients:
            show.deed(one.uid, f"works {one.waited():.2f} s after the start of the program (pid {one.pid})")
        *neighbours, faulty = clients
        faulty.saw("^armed")
        faulty.signal(signal.SIGUSR1)
        faulty.wait()
        show.deed(DAVE, f"runs a kernel with an illegal access, and the program fails (pid {faulty.pid})")
        until("the fault", lambda: any(one["kind"] == "server.fault" for one in stage.events()))
        for one in neighbours:
            one.signal(signal.SIGUSR1)
            one.wait()
            show.deed(one.uid, f"finishes with exit status {one.process.returncode} (pid {one.pid})")
        stage.stop_agent()
        stage.stop_gate()
    return judge_default(neighbours, faulty, show, at_once=at_once)


def main() -> int:
    parser = argparse.ArgumentParser(description="Show agent and gate on a simulated GPU.")
    parser.add_argument("--quick", action="store_true", help="use shorter waits and wide limits, for tests")
    quick = parser.parse_args().quick
    after, grace = (1.0, 0.5) if quick else (3.0, 1.0)
    users = "\n".join(f'[user.{uid}]  # {NAMES[uid]}\nmemory_limit = "{memory}"' for uid, (_, memory) in LIMITS.items())
    root, me = os.geteuid() == 0, os.geteuid()
    facts = Facts(LIMITS if root else dict.fromkeys(LIMITS, (100.0, "1G")), wait_limit=after + grace + 2.0)
    facts.allowance = 60.0 if quick else 0.0  # tests run side by side, and none of them is about speed
    show = Show(NAMES if root else {**NAMES, me: "you"})
    show.title("mpsagent at work. MPS and the GPU are SIMULATED; processes, users and signals are real.")
    if not root:
        show.title("Not root: alice, bob, carol and dave are all you, so there are no turns. Root sees all scenes.")
    began = time.monotonic()
    try:
        default_kept = without_policy(show)
        show.title("\nWith a policy from here on: memory limits for each user, and turns.")
        with Stage(POLICY.format(users=users if root else "", after=after, grace=grace)) as stage:
            stage.start_agent()
            with show.following(stage.socket) as events:
                stage.open()
                Demo(stage, show, facts, quick=quick).play()
                stage.stop_agent()
            stage.end_guests()
            stage.stop_gate()
            left = stage.processes()
    except StageError as error:
        show.title(f"The demo cannot continue: {error}")
        return 1
    except KeyboardInterrupt:
        show.title("Interrupted. All processes of the demo have been ended.")
        return 130
    kept = judge(facts, events, show, took=time.monotonic() - began, left=left)
    return 0 if kept and default_kept else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is ended then, too
    sys.exit(main())
