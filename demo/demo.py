"""Half a minute of the agent at work: four users do ordinary and nasty things on a simulated GPU.

What happens is shown as it happens, from the agent's own event stream; the summary at the end is computed from what the
clients printed and from those events. Exit status 0: the four promises were kept; 1: one was not.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo.show import Show
from demo.stage import Client, Stage, StageError, until
from demo.verdict import Facts, judge

ALICE, BOB, CAROL, DAVE = 20001, 20002, 20003, 20004
NAMES = {ALICE: "alice", BOB: "bob", CAROL: "carol", DAVE: "dave"}
LIMITS = {ALICE: (60.0, 6), BOB: (30.0, 3), CAROL: (20.0, 2), DAVE: (10.0, 1)}
"""Percent of the multiprocessors, GiB of device memory."""
POLICY = """\
[limits]
threads = 10
memory = "1G"
{users}
[switch]
after = "{after}s"
grace = "{grace}s"
[hang]
control = "2s"
server = "2s"
fault = "1s"
terminate = "2s"
kill_grace = "1s"
[agent]
on_stop = "quit"
stop_timeout = "1s"
"""


class Demo:
    """The scenes. Without root all four are the same user to the kernel: nobody waits for anybody, and it is said."""

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
        scenes = [self.works, self.waits, self.starves, self.stops, self.faults, self.kills]
        for scene in scenes:
            if self.root or scene not in (self.waits, self.starves):
                scene()

    def works(self) -> None:
        self.show.scene("Ordinary work: a client gets its user's limits from its first moment")
        client = self.start(ALICE, "sleep", "0.5", doing="starts to work")
        client.wait()
        sms, free = client.limits() or (0, 0)
        self.show.deed(ALICE, f"could use {sms} of 132 multiprocessors and {free} MiB")

    def waits(self) -> None:
        self.show.scene("Two users: the second waits, and is served as soon as the first has left")
        first = self.start(ALICE, "work", "100" if self.quick else "300", doing="works")
        first.saw("^ctx")
        second = self.start(BOB, "sleep", "0.5", doing="wants the GPU as well")
        first.wait()
        second.saw("^ctx")
        self.facts.changed(first, second)
        second.wait()

    def starves(self) -> None:
        self.show.scene("Starvation: carol starts client after client; MPS alone would never let dave in")
        greedy = [self.start(CAROL, "sleep", "1.5", doing="starts a client every half second, for ever")]
        greedy[0].saw("^ctx")
        patient = self.start(DAVE, "query", doing="waits for a turn")
        while patient.served() is None and patient.ended is None:
            if time.time() - patient.began > 60:
                raise StageError("dave was not served within a minute")
            if greedy[-1].began < time.time() - 0.5:
                greedy.append(self.start(CAROL, "sleep", "1.5"))
            time.sleep(0.02)
        self.facts.turn(patient)
        patient.wait()
        for one in greedy:  # those that were ended, those that are served once more
            one.wait()
        self.show.deed(CAROL, f"gives up after {len(greedy)} clients")

    def stops(self) -> None:
        self.show.scene("One client has to go: stopped, a kernel in flight. A plain SIGKILL would break its neighbour")
        neighbour = self.start(BOB, "work", "150" if self.quick else "300", doing="works")
        neighbour.saw("^ctx")
        stuck = self.start(BOB, "spin", "600", doing="has a kernel that never ends")
        stuck.saw("^launch")
        time.sleep(0.2)
        stuck.signal(signal.SIGSTOP)
        self.show.deed(BOB, f"stops it (SIGSTOP {stuck.pid})")
        self.show.deed(0, f"mpsagent-cli client terminate {stuck.pid}")
        self.stage.ask(f"/v1/clients/{stuck.pid}/terminate", "POST", {})
        stuck.wait()
        self.facts.removed(stuck, [neighbour])
        neighbour.wait()

    def faults(self) -> None:
        self.show.scene("A fault with a leftover: its owner ignores the error and SIGTERM; MPS refuses everybody")
        leftover = self.start(ALICE, "sleep", "600", "--ignore-term", doing="has a client that ignores every error")
        leftover.saw("^ctx")
        culprit = self.start(ALICE, "oob", "0.2", doing="runs a kernel with an illegal access")
        culprit.wait()
        self.facts.trouble("fault with a leftover", self.served_again(ALICE), limit=2.0)
        leftover.wait()

    def kills(self) -> None:
        self.show.scene("The control daemon: stopped while somebody arrives, then killed while somebody works")
        pid = self.stage.control_pid()
        self.show.deed(0, f"kill -STOP {pid}, the control daemon")
        began = time.time()
        os.kill(pid, signal.SIGSTOP)
        client = self.start(CAROL, "query", doing="wants the GPU")
        client.saw("^ctx")
        self.facts.trouble("stopped control daemon", time.time() - began, limit=2.0 + 2.0)
        client.wait()
        victim = self.start(CAROL, "sleep", "600", doing="works")
        victim.saw("^ctx")
        pid = self.stage.control_pid()
        self.show.deed(0, f"kill -KILL {pid}, the control daemon")
        began = time.time()
        os.kill(pid, signal.SIGKILL)
        until("a new control daemon", self.up_again)
        self.facts.trouble("killed control daemon", time.time() - began + self.served_again(BOB), limit=2.0)
        victim.signal(signal.SIGTERM)
        victim.wait()

    def up_again(self) -> bool:
        control = self.stage.ask("/v1/status")["control"]
        return bool(control and control["running"]) and any(
            server["parked"] and server["ready"] for server in self.stage.ask("/v1/status")["servers"]
        )

    def served_again(self, uid: int) -> float:
        """Seconds until a client of this user is served: one that is refused tries again at once."""
        began = time.time()
        self.show.deed(uid, "tries to work, again and again")
        while time.time() < began + 60:
            client = self.start(uid, "query")
            until("the client", lambda client=client: client.served() or client.ended)  # type: ignore[misc]
            if (at := client.served()) is not None:
                client.wait()
                return at - began
            client.wait()
            time.sleep(0.2)
        raise StageError("nobody was served again within a minute")


def main() -> int:
    parser = argparse.ArgumentParser(description="The agent at work on a simulated GPU.")
    parser.add_argument("--quick", action="store_true", help="shorter waits, for tests")
    quick = parser.parse_args().quick
    after, grace = (1.0, 0.5) if quick else (3.0, 1.0)
    users = "\n".join(
        f'[user.{uid}]  # {NAMES[uid]}\nthreads = {threads:g}\nmemory = "{memory}G"'
        for uid, (threads, memory) in LIMITS.items()
    )
    root = os.geteuid() == 0
    me = os.geteuid()
    limits = LIMITS if root else {me: (10.0, 1)}
    facts = Facts(limits, wait_limit=after + grace + 2.0)
    show = Show(NAMES if root else {**NAMES, me: "you"})
    show.title("mpsagent at work. MPS and the GPU are SIMULATED; processes, users and signals are real.")
    if not root:
        show.title(
            "Not root: alice, bob, carol and dave are all you, so nobody waits for anybody. As root there is more."
        )
    began = time.monotonic()
    try:
        with Stage(POLICY.format(users=users if root else "", after=after, grace=grace)) as stage:
            stage.start_agent()
            with show.following(stage.socket) as events:
                stage.open_door()
                Demo(stage, show, facts, quick=quick).play()
                stage.stop_agent()
            left = stage.processes()
    except StageError as error:
        show.title(f"The demo could not go on: {error}")
        return 1
    except KeyboardInterrupt:
        show.title("Interrupted; everything that was started has been ended.")
        return 130
    kept = judge(facts, events, show, took=time.monotonic() - began, left=left)
    return 0 if kept else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is ended then, too
    sys.exit(main())
