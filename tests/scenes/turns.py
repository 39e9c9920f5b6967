"""Promise 2: the GPU is never idle while somebody waits, and nobody waits longer than the policy says."""

from __future__ import annotations

import signal
import threading
import time

from tests.scenes.stage import A, B, C, Client, Json, Result, Scene, Stage, median, spread

LIMITS = '[limits]\nthreads = 50\nmemory = "4G"\n'


# --- the nudge --------------------------------------------------------------------------------------------------------


def _gap(stage: Stage, hold: float) -> float:
    """A works for `hold` seconds, B arrives early on: seconds from A's last exit to B's finished query."""
    holder = stage.client(A, "sleep", hold)
    holder.working()
    time.sleep(min(1.0, 0.35 * hold))
    waiting = stage.client(B)
    waiting.queued()
    if holder.ended() != 0:
        raise RuntimeError(f"the holder did not end well: {holder.rc} {holder.text()}")
    left = time.monotonic()
    waiting.ended()
    gap = time.monotonic() - left
    if waiting.rc != 0:
        raise RuntimeError(f"the waiting client did not end well: {waiting.rc} {waiting.text()}")
    return gap


def _immediate(stage: Stage, pause: float = 0.6) -> float:
    """A has left a while ago: seconds from B's place in the queue to its finished query."""
    stage.client(A).ended()
    time.sleep(pause)
    client = stage.client(B)
    since = client.queued()
    client.ended()
    return time.monotonic() - since


def nudge_for(hold: float, quick_hold: float) -> tuple[str, object]:
    def nudge(stage: Stage, count: int) -> Result:
        held = quick_hold if stage.quick else hold
        gaps: dict[str, list[float]] = {"on": [], "off": [], "immediate": []}

        def lane(beside: Stage, rounds: int) -> None:
            beside.with_agent(LIMITS)
            with beside.another() as plain:
                plain.without_agent()
                for _ in range(rounds):
                    gaps["on"].append(_gap(beside, held))
                    gaps["off"].append(_gap(plain, held))
                    gaps["immediate"].append(_immediate(beside))

        stage.side_by_side(count, lane, 2 * held + 4)
        on, off, at_once = (median(gaps[key]) for key in ("on", "off", "immediate"))
        figures: Json = {
            "A works for (s)": held,
            "gap with the agent (s)": spread(gaps["on"]),
            "gap without it (s)": spread(gaps["off"]),
            "immediate change, from the queue to the end (s)": spread(gaps["immediate"]),
            "gap beyond an immediate change, median (s)": round((on or 0) - (at_once or 0), 3),
        }
        good = len(gaps["on"]) == count and on is not None and off is not None and at_once is not None
        if not stage.quick and good:
            good = on - at_once <= 0.15  # type: ignore[operator]
        verdict = f"after {held:g} s of A: {on} s with the agent, {off} s without, {at_once} s for an immediate change"
        return Result(figures, good, verdict, [gaps])

    return f"nudge-{hold:g}", nudge


NUDGES = [nudge_for(hold, quick) for hold, quick in ((3, 1), (6, 1.5), (10, 2), (20, 3))]


# --- starvation -------------------------------------------------------------------------------------------------------


def _feed(stage: Stage, clients: list[Client], over: threading.Event) -> None:
    """A new client of A every second, for ever."""
    while not over.is_set():
        clients.append(stage.client(A, "sleep", 2.5))
        over.wait(1.0)


def starvation(stage: Stage, count: int) -> Result:
    """A never stops sending clients; B is served all the same."""
    after, grace = (1.0, 0.5) if stage.quick else (3.0, 1.0)
    bound = after + grace + 2 + stage.allowance
    waits: list[float] = []
    problems: list[str] = []

    def lane(beside: Stage, rounds: int) -> None:
        beside.with_agent(f'{LIMITS}[switch]\nafter = "{after:g}s"\ngrace = "{grace:g}s"\n[hang]\nkill_grace = "1s"\n')
        for _ in range(rounds):
            fed: list[Client] = []
            over = threading.Event()
            feeder = threading.Thread(target=_feed, args=(beside, fed, over), daemon=True)
            feeder.start()
            try:
                beside.until(lambda: fed, "A's first client", 10)  # noqa: B023
                fed[0].working()
                time.sleep(0.5)
                waiting = beside.client(B)
                since = waiting.queued()
                waiting.ended(bound + 30)
                waits.append(time.monotonic() - since)
                if not waiting.inside(50):
                    problems.append(f"B: rc {waiting.rc} {waiting.text()}")
            finally:
                over.set()
                feeder.join()
            for client in fed:
                client.ended(30)

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
        fed: list[Client] = []
        over = threading.Event()
        feeder = threading.Thread(target=_feed, args=(stage, fed, over), daemon=True)
        feeder.start()
        try:
            stage.until(lambda: fed, "A's first client", 10)  # noqa: B023
            fed[0].working()
            waiting = stage.client(B)
            starving += waiting.ended(seconds) is None
        finally:
            over.set()
            feeder.join()
        for client in [*fed, waiting]:
            client.ended(30)
    verdict = f"without the agent B still waited after {seconds:g} s: {starving} of {count}"
    return Result({"observed (s)": seconds, "still waiting": starving}, starving == count, verdict)


# --- a client that dies in the queue ----------------------------------------------------------------------------------


def _dead_waiter(stage: Stage, number: signal.Signals, first: bool) -> tuple[Client, float]:
    """A works, B waits and is killed, C waits behind it. The third one's client, and when A left."""
    holder = stage.client(A, "sleep", 1.5)
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
    holder.ended()
    return third, time.monotonic()


def dead_waiter(stage: Stage, count: int) -> Result:
    """Somebody presses Ctrl-C while waiting; whoever waits behind is served all the same."""
    bound = 5.0 + stage.allowance
    agent = stage.with_agent(LIMITS + '[switch]\nafter = "20s"\ngrace = "2s"\n')
    waits: list[float] = []
    problems: list[str] = []
    for turn in range(count):
        number = signal.SIGINT if turn % 2 else signal.SIGKILL
        third, since = _dead_waiter(stage, number, first=turn % 4 < 2)
        third.ended(60)
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
        Scene(name, "Change of user: the GPU does not idle", play, 10, 1, 15 + 4.6 * (float(name[6:]) + 3))  # type: ignore[arg-type]
        for name, play in NUDGES
    ),
    Scene("starvation", "A sends clients for ever, B is served", starvation, 20, 2, 60),
    Scene("starvation-plain", "Control: B starves without the agent", starved, 2, 1, 52),
    Scene("dead-waiter", "A client dies in the queue, another user waits behind it", dead_waiter, 10, 4, 50),
    Scene("dead-waiter-plain", "Control: the same without the agent", dead_waiter_plain, 2, 1, 25),
)
