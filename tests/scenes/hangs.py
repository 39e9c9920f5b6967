"""Promise 4: a hang or a crash of MPS ends by itself, and meanwhile those who wait are held at the gate.

SIGSTOP and SIGKILL of server and control daemon. A client that was handed over to what hangs may be lost; one that
waits is served, never refused and never outside MPS. So is who comes after clients that died in their hand-over, and
after a gate that did.
"""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable

from tests.scenes.ending import until_served
from tests.scenes.stage import A, Agent, B, Client, Json, Result, Scene, Stage, spread

DEADLINE = 3.0
POLICY = (
    '[limits]\nactive_threads = "40%"\nmemory_limit = "2G"\n'
    f'[timeouts]\ncontrol_daemon = "{DEADLINE:g}s"\nserver = "{DEADLINE:g}s"\nsigkill_delay = "1s"\n'
)
BOUND = DEADLINE + 5.0
SITUATIONS = ("idle", "busy", "waiting")  # with a client waiting


def _settle(stage: Stage, agent: Agent) -> None:
    """The gate is open, nothing is wrong, nobody waits."""

    def calm() -> bool:
        status = agent.api.status()
        return bool(status["health"]["ok"] and status["gate"]["open"] and not status["waiting"])

    stage.until(calm, "MPS has come to rest", 60)


def _target(stage: Stage, agent: Agent, what: str) -> int:
    stage.until(lambda: agent.api.status()["servers"], "there is a server")
    status = agent.api.status()
    return int(status["control"]["pid"] if what == "daemon" else status["servers"][-1]["pid"])


def _round(stage: Stage, agent: Agent, what: str, number: signal.Signals, situation: str) -> tuple[float, str]:
    """Seconds from the signal until a client is served, and how."""
    _settle(stage, agent)
    first = stage.client(A)
    if first.ended() != 0:
        raise RuntimeError(f"A is not served at the beginning: {first.text()}")
    holder: Client | None = None
    waiting: Client | None = None
    if situation != "idle":
        holder = stage.client(A, "sleep", 600)
        holder.working()
    if situation == "waiting":
        waiting = stage.client(B)
        waiting.queued()
    pid = _target(stage, agent, what)
    since = time.time()
    stage.rig.signal(pid, number, what)
    try:
        if holder is not None and waiting is not None:
            holder.signal(signal.SIGUSR1)
            if waiting.ended(BOUND + 60) is None or not waiting.inside(40):
                raise RuntimeError(f"who was held was not served: rc {waiting.rc} {waiting.text()}")
            return time.time() - since, "the waiting client"
        at, attempts = until_served(stage, A if situation == "busy" else B, BOUND + 60, 40)
        return at - since, f"a new client ({attempts} came)"
    finally:
        for client in (holder, waiting):
            if client is not None:
                client.kill()


def hang_for(
    what: str, number: signal.Signals, situations: tuple[str, ...]
) -> tuple[str, Callable[[Stage, int], Result]]:
    def hang(stage: Stage, count: int) -> Result:
        took: dict[str, list[float]] = {situation: [] for situation in situations}
        late: list[str] = []
        for _ in range(count):
            for situation in situations:
                # An agent for each: several ends of one daemon in a minute are a crash loop, which backs off.
                with stage.another() as fresh:
                    agent = fresh.with_agent(POLICY)
                    try:
                        seconds, how = _round(fresh, agent, what, number, situation)
                    except Exception as error:
                        late.append(f"{situation}: {error}")
                        stage.say(fresh.last_words())
                        return _result(what, number, took, late, count)
                took[situation].append(seconds)
                stage.say(f"{number.name} {what} {situation}: {how} served after {seconds:.2f} s")
                if seconds > BOUND + stage.allowance:
                    late.append(f"{situation}: {seconds:.2f} s")
        return _result(what, number, took, late, count)

    name = f"hang-{what}-{number.name.removeprefix('SIG').lower()}"
    return name + ("-" + situations[0] if len(situations) == 1 else ""), hang


def _result(what: str, number: signal.Signals, took: dict[str, list[float]], late: list[str], count: int) -> Result:
    figures: Json = {f"{situation}: served after (s)": spread(times) for situation, times in took.items()}
    figures["late"] = late
    served = sum(len(times) for times in took.values())
    good = not late and served == len(took) * count
    verdict = f"{number.name} of the {what}: served within {BOUND:g} s {served - len(late)} of {len(took) * count}"
    return Result(figures, good, verdict, [took])


AT_ONCE, START = 4, 0.15
"""Clients that are killed in a round, and the seconds in which a client starts."""


def _kill_gate(stage: Stage) -> int:
    pids = [one.pid for one in stage.rig.ours() if re.search(r"mpsagent[.-]gate(\.main)? run", one.arguments)]
    for pid in pids:
        stage.rig.signal(pid, signal.SIGKILL, "gate")
    return len(pids)


def killed_for(server: str) -> Callable[[Stage, int], Result]:
    def killed(stage: Stage, count: int) -> Result:
        stage.with_agent(POLICY, server=server)
        draw = random.Random(8)
        served = lost = gates = 0
        wrong: list[str] = []
        for turn in range(count):
            beside = stage.client(A, "work", 60)
            beside.working()
            victims = [stage.client(A) for _ in range(AT_ONCE)]
            for victim in victims:
                time.sleep(draw.uniform(0, 2 * START / AT_ONCE))
                victim.signal(signal.SIGKILL)
            if turn % 3 == 0:
                gates += _kill_gate(stage)
            after = [stage.client(A) for _ in range(2)]  # the first may be in a hand-over while the gate dies
            for one in after:
                one.ended(BOUND + stage.allowance)
                served += one.inside(40)
                if not one.inside(40):
                    wrong.append(f"round {turn + 1}: rc {one.rc} {one.text()}\n{stage.last_words()}")
                    one.kill()
            lost += beside.ended() != 0
        figures: Json = {"killed": AT_ONCE * count, "gates killed": gates, "served after them": served,
                         "programs beside them that lost their work": lost}  # fmt: skip
        good = served == 2 * count and gates == -(-count // 3)
        verdict = (
            f"{AT_ONCE * count} clients killed in their start, the gate {gates} times: next clients served exactly "
        )
        return Result(
            figures, good, f"{verdict}{served} of {2 * count}; work lost beside them {lost} of {count}", wrong
        )

    return killed


# A server that is stopped while only its own user comes makes nobody else wait: a case of its own.
_CASES = (
    ("server", signal.SIGSTOP, ("idle", "waiting")),
    ("server", signal.SIGSTOP, ("busy",)),
    ("server", signal.SIGKILL, SITUATIONS),
    ("daemon", signal.SIGSTOP, SITUATIONS),
    ("daemon", signal.SIGKILL, SITUATIONS),
)
SCENES = (
    *(
        Scene(name, f"{number.name} of the {what}: {', '.join(situations)}", play, 3, 1, 15.0 * len(situations))
        for what, number, situations in _CASES
        for name, play in [hang_for(what, number, situations)]
    ),
    Scene("killed", "Clients are killed in their hand-over, and the gate", killed_for("own"), 50, 4, 70),
    Scene("killed-shared", "The same on one server", killed_for("shared"), 50, 4, 70),
)
