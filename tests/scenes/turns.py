"""Promise 2: the GPU is never idle while a user waits, and nobody waits longer than the policy allows."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator

from tests.scenes.stage import A, B, C, Client, Json, Result, Scene, Stage, median, spread

LIMITS = '[limits]\nactive_threads = "50%"\nmemory_limit = "4G"\n'


# --- a change of user -------------------------------------------------------------------------------------------------


def _gap(stage: Stage, hold: float) -> float:
    """A works for `hold` seconds, B arrives early on: seconds from A's last exit to B's finished query."""
    holder = stage.client(A, "sleep", 600)
    holder.working()
    over = time.monotonic() + hold
    time.sleep(min(1.0, 0.35 * hold))
    waiting = stage.client(B)
    waiting.queued()
    time.sleep(max(0.0, over - time.monotonic()))
    if holder.finish() != 0:
        raise RuntimeError(f"the holder did not end well: {holder.rc} {holder.text()}")
    left = time.monotonic()
    waiting.ended()
    gap = time.monotonic() - left
    if waiting.rc != 0:
        raise RuntimeError(f"the waiting client did not end well: {waiting.rc} {waiting.text()}")
    return gap


def _alone(stage: Stage) -> float:
    """Seconds from a client's start to its finished query when nobody else is there and its server runs."""
    stage.client(B).ended()
    time.sleep(0.3)
    since = time.monotonic()
    stage.client(B).ended()
    return time.monotonic() - since


WITHIN = {"own": 0.25, "shared": 0.05}
"""Seconds that a change of user may take longer than a client's own start, on a GPU."""


def change_for(hold: float, quick_hold: float) -> tuple[str, Callable[[Stage, int], Result]]:
    def change(stage: Stage, count: int) -> Result:
        held = quick_hold if stage.quick else hold
        gaps: dict[str, list[float]] = {"own": [], "shared": [], "plain": [], "alone": []}

        def lane(beside: Stage, rounds: int) -> None:
            with beside.another() as own, beside.another() as plain:
                beside.with_agent(LIMITS, server="shared")
                own.with_agent(LIMITS)
                plain.without_agent()
                for _ in range(rounds):
                    gaps["alone"].append(_alone(beside))
                    gaps["shared"].append(_gap(beside, held))
                    gaps["own"].append(_gap(own, held))
                    gaps["plain"].append(_gap(plain, held))

        stage.side_by_side(count, lane, 3 * held + 4)
        middle = {name: median(values) or 0.0 for name, values in gaps.items()}
        figures: Json = {
            "A works for (s)": held,
            "gap, one server for all (s)": spread(gaps["shared"]),
            "gap, a server for each turn (s)": spread(gaps["own"]),
            "gap without the agent (s)": spread(gaps["plain"]),
            "a client's own start (s)": spread(gaps["alone"]),
        }
        good = len(gaps["own"]) == len(gaps["shared"]) == count
        if not stage.quick:
            good &= all(middle[name] - middle["alone"] <= limit for name, limit in WITHIN.items())
        verdict = (
            f"after {held:g} s of A: {middle['shared']} s on one server, {middle['own']} s with servers of their own, "
            f"{middle['plain']} s without the agent; a client's own start takes {middle['alone']} s"
        )
        return Result(figures, good, verdict, [gaps])

    return f"change-{hold:g}", change


CHANGES = [change_for(hold, quick) for hold, quick in ((3, 1), (6, 1.5), (10, 2), (20, 3))]


# --- a program of several processes -----------------------------------------------------------------------------------


def whole(stage: Stage, count: int) -> Result:
    """B's program has four processes that wait for each other, and A sends clients for ever. All four are let in within
    one turn: a program whose processes cannot all be served would wait for ever."""
    stage.with_agent(
        f'{LIMITS}[turn]\ntime_limit = "4s"\ngrace = "4s"\n[timeouts]\nsigkill_delay = "1s"\n'
        f'[user.{B}]\nturn.time_limit = "1m"\n'  # on a busy machine four processes take their time to come
    )
    complete = 0
    problems: list[str] = []
    for _ in range(count):
        with _fed(stage):
            program = []
            for _ in range(4):
                program.append(stage.client(B, "sleep", 600))
                time.sleep(0.2)  # a launcher starts one after the other
            together = all(one.working() for one in program) and all(one.rc is None for one in program)
            for one in program:
                one.signal(signal.SIGUSR1)
            well = all(one.ended() == 0 and one.inside(50) for one in program)
            complete += together and well
            if not (together and well):
                problems += [f"rc {one.rc} {one.text()}" for one in program]
    return Result({"problems": problems}, complete == count, f"all four at once: {complete} of {count}", problems)


# --- a drain is a closed gate -----------------------------------------------------------------------------------------


def drain(stage: Stage, count: int) -> Result:
    """Drained while A works and B waits: nobody new is let in and nobody refused; `resume` lets them in at once, also
    while A still works."""
    agent = stage.with_agent(LIMITS)
    problems: list[str] = []
    waits: list[float] = []
    for turn in range(count):
        works = stage.client(A, "sleep", 600)
        works.working()
        status, said = stage.cli(agent, "drain")
        if status:
            problems.append(f"drain: {status} {said}")
        late = [stage.client(A), stage.client(B)]
        for client in late:
            client.queued()
        if not turn % 2:
            works.finish()
        time.sleep(0.5)
        if ended := [client for client in late if client.rc is not None]:
            problems += [f"not held during the drain: rc {client.rc} {client.text()}" for client in ended]
        stage.cli(agent, "resume")
        since = time.monotonic()
        late[0].ended()
        waits.append(time.monotonic() - since)
        if turn % 2 and works.finish() != 0:
            problems.append(f"running work was touched: {works.text()}")
        late[1].ended()
        problems += [f"rc {client.rc} {client.text()}" for client in late if not client.inside(50)]
    figures = {"the holder's next client served after `resume` (s)": spread(waits), "problems": problems}
    return Result(figures, not problems, f"drained and resumed {count} times, nobody refused", problems)


def denied(stage: Stage, count: int) -> Result:
    """Refused by policy: the proper error at once, also while a client works and others wait; nobody else notices."""
    stage.with_agent(f'{LIMITS}[user.{C}]\naccess = "deny"\n')
    refused = served = 0
    for _ in range(count):
        works = stage.client(A, "sleep", 600)
        works.working()
        waiting = stage.client(B)
        waiting.queued()
        unwanted = stage.client(C)
        refused += unwanted.ended() == 10 and "MPS_CONNECTION_FAILED" in unwanted.text() and works.rc is None
        works.finish()
        waiting.ended()
        served += waiting.inside(50) and works.inside(50)
    return Result(
        {}, refused == served == count, f"refused {refused} of {count}, neighbours served {served} of {count}"
    )


# --- starvation -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _fed(stage: Stage) -> Iterator[None]:
    """A new client of A every second, for ever; the first one works."""
    clients: list[Client] = []
    over = threading.Event()

    def feed() -> None:
        while not over.is_set():
            clients.append(stage.client(A, "sleep", 2.5))
            over.wait(1.0)

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    try:
        stage.until(lambda: clients, "A's first client")
        clients[0].working()
        yield
    finally:
        over.set()
        feeder.join()
    for client in clients:
        client.ended()


def starvation(stage: Stage, count: int) -> Result:
    """A never stops sending clients; B is served all the same."""
    after, grace = (1.0, 0.5) if stage.quick else (3.0, 1.0)
    bound = after + grace + 2 + stage.allowance
    waits: list[float] = []
    problems: list[str] = []

    def lane(beside: Stage, rounds: int) -> None:
        beside.with_agent(
            f'{LIMITS}[turn]\ntime_limit = "{after:g}s"\ngrace = "{grace:g}s"\n[timeouts]\nsigkill_delay = "1s"\n'
            f'[user.{B}]\nturn.time_limit = "1m"\n'  # B's turn is not what is looked at
        )
        for _ in range(rounds):
            with _fed(beside):
                time.sleep(0.5)
                waiting = beside.client(B)
                since = waiting.queued()
                waiting.ended(bound + 30)
                waits.append(time.monotonic() - since)
                if not waiting.inside(50):
                    problems.append(f"B: rc {waiting.rc} {waiting.text()}")

    stage.side_by_side(count, lane, bound + 4)
    served = sum(wait <= bound for wait in waits)
    figures = {
        "after + grace (s)": after + grace, "bound (s)": bound, "B waited (s)": spread(waits),
        "served within the bound": f"{served} of {count}", "problems": problems,
    }  # fmt: skip
    good = served == count and not problems
    return Result(figures, good, f"B served within {bound:g} s: {served} of {count}; {spread(waits)} s", [waits])


def starved(stage: Stage, count: int) -> Result:
    """The control experiment: without the agent B waits for as long as A goes on."""
    stage.without_agent()
    seconds = 4.0 if stage.quick else 12.0
    starving = 0
    for _ in range(count):
        with _fed(stage):
            waiting = stage.client(B)
            starving += waiting.ended(seconds) is None
        waiting.ended()
    verdict = f"without the agent B still waited after {seconds:g} s: {starving} of {count}"
    return Result({"observed (s)": seconds, "still waiting": starving}, starving == count, verdict)


# --- a client that dies in the queue ----------------------------------------------------------------------------------


def _dead_waiter(stage: Stage, number: signal.Signals, first: bool) -> tuple[Client, float]:
    """A works, B waits and is killed, C waits behind it. The third one's client, and when A left."""
    holder = stage.client(A, "sleep", 600)
    holder.working()
    dead = stage.client(B)
    dead.queued()
    third = None
    if not first:
        third = stage.client(C)
        third.queued()
    dead.signal(number)
    dead.ended()
    if third is None:
        third = stage.client(C)
        third.queued()
    holder.finish()
    return third, time.monotonic()


def dead_waiter(stage: Stage, count: int) -> Result:
    """A user presses Ctrl-C while waiting; whoever waits behind is served all the same."""
    bound = 5.0 + stage.allowance
    agent = stage.with_agent(LIMITS + '[turn]\ntime_limit = "20s"\ngrace = "2s"\n')
    waits: list[float] = []
    problems: list[str] = []
    for turn in range(count):
        number = signal.SIGINT if turn % 2 else signal.SIGKILL
        third, since = _dead_waiter(stage, number, first=turn % 4 < 2)
        third.ended()
        waits.append(time.monotonic() - since)
        if not third.inside(50):
            problems.append(f"round {turn}: rc {third.rc} {third.text()} {agent.api.problems()}")
            stage.say(stage.last_words())
            break
    served = sum(wait <= bound for wait in waits) - len(problems)
    figures = {"third user served after A left (s)": spread(waits), "problems": problems}
    good = served == count
    return Result(figures, good, f"the user behind a dead one served within {bound:g} s: {served} of {count}", [waits])


def dead_waiter_plain(stage: Stage, count: int) -> Result:
    """The control experiment: real MPS starts a server for the dead client and answers nobody from then on."""
    seconds = 3.0 if stage.quick else 8.0
    hung = 0
    for _ in range(count):
        with stage.another() as plain:
            plain.without_agent()
            third, _ = _dead_waiter(plain, signal.SIGKILL, first=False)
            hung += third.ended(seconds) is None
    verdict = f"without the agent the third user still waits after {seconds:g} s: {hung} of {count}"
    return Result({"observed (s)": seconds, "still waiting": hung}, hung > 0, verdict)


SCENES = (
    *(
        Scene(name, "Change of user: the GPU does not idle", play, 10, 1, 15 + 6.6 * (float(name[7:]) + 3))
        for name, play in CHANGES
    ),
    Scene("whole-program", "A program of four processes is never split", whole, 5, 1, 60),
    Scene("drain", "A drain is a closed gate, and resume opens it again", drain, 6, 2, 40),
    Scene("denied", "A user is refused by policy", denied, 10, 2, 20),
    Scene("starvation", "A sends clients for ever, B is served", starvation, 20, 2, 60),
    Scene("starvation-plain", "Control: B starves without the agent", starved, 2, 1, 52),
    Scene("dead-waiter", "A client dies in the queue, another user waits behind it", dead_waiter, 10, 4, 50),
    Scene("dead-waiter-plain", "Control: the same without the agent", dead_waiter_plain, 2, 1, 25),
)
