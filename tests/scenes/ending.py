"""Promise 3: ending one client never hurts another. And the end of a fault with a leftover that ignores its error."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

from tests.conformance import rig as rigs
from tests.scenes.stage import A, B, Client, Json, Result, Scene, Stage, median, seconds_of, spread

POLICY = (
    '[limits]\nactive_threads = "40%"\nmemory_limit = "2G"\n[timeouts]\nsigkill_delay = "1s"\nfault_recovery = "2s"\n'
)
SERVED = 0.2
"""Seconds between two attempts to be served."""

VICTIMS: dict[str, tuple[str | float, ...]] = {
    "spinning": ("spin", 600),
    "sleeping": ("sleep", 600),
    "stopped": ("spin", 600),
    "ignoring SIGTERM": ("sleep", 600, "--ignore-term"),
    "spinning and ignoring SIGTERM": ("spin", 600, "--ignore-term"),
}


def _victim(stage: Stage, kind: str) -> Client:
    mode, *rest = VICTIMS[kind]
    client = stage.client(A, str(mode), *rest)
    client.working()
    if mode == "spin":
        client.saw("launch")
    time.sleep(0.2)
    if kind == "stopped":
        client.signal(signal.SIGSTOP)
    return client


def ladder_for(kind: str, server: str) -> Callable[[Stage, int], Result]:
    def ladder(stage: Stage, count: int) -> Result:
        agent = stage.with_agent(POLICY, server=server)
        took: list[float] = []
        finished = ended = 0
        problems: list[str] = []
        for _ in range(count):
            victim = _victim(stage, kind)
            neighbour = stage.client(A, "work", 120)
            neighbour.working()
            since = time.monotonic()
            status, said = stage.cli(agent, "terminate", str(victim.pid))
            gone = victim.ended() is not None
            took.append(time.monotonic() - since)
            ended += gone
            if not gone:
                problems.append(f"the client lives on: cli {status} {said}\n{stage.last_words()}")
                victim.kill()
            neighbour.ended()
            if neighbour.rc == 0:
                finished += 1
            else:
                problems.append(f"neighbour rc {neighbour.rc}: {neighbour.text()}\n{stage.last_words()}")
        figures = {"ended": ended, "neighbour finished": finished, "from the command to the end (s)": spread(took)}
        good = finished == count == ended
        verdict = f"{kind}: neighbour finished {finished} of {count}, client ended {ended} of {count}"
        return Result(figures, good, verdict, [took, *problems])

    return ladder


def stopped(stage: Stage, count: int) -> Result:
    """What a batch system or a container's engine does to a program: with `mpsagent-cli run`, and without."""
    agent = stage.with_agent(POLICY, extra='sharing = "one-server"')
    finished = {"with run": 0, "without": 0}
    problems: list[str] = []
    for number in range(2 * count):
        how = ("with run", "without")[number % 2]
        neighbour = stage.client(A, "work", 200)
        neighbour.working()
        if how == "with run":
            victim = stage.run_verb(agent, B, "--", *stage.backend.client, "spin", "600")
        else:
            victim = stage.rig.clients[stage.rig.spawn(B, "spin", 600)]
        stage.until(lambda victim=victim: "launch" in victim.read(), "its kernel runs")  # type: ignore[misc]
        time.sleep(0.2)
        rigs.send_signal(victim.process.pid, signal.SIGTERM)
        rigs.exited(victim.process, 30)
        neighbour.ended()
        finished[how] += neighbour.rc == 0
        if neighbour.rc != 0 and how == "with run":
            problems.append(f"neighbour rc {neighbour.rc}: {neighbour.text()}\n{victim.err.read_text()}")
        until_served(stage, A, 30)
    figures = {f"neighbour finished, {how}": one for how, one in finished.items()}
    verdict = f"neighbour finished {finished['with run']} of {count}, and {finished['without']} of {count} without run"
    return Result(figures, finished["with run"] == count, verdict, problems)


def sigkill(stage: Stage, count: int) -> Result:
    """The control experiment: SIGKILL of a client with a kernel in flight."""
    stage.without_agent()
    damaged = 0
    for _ in range(count):
        victim = _victim(stage, "spinning")
        neighbour = stage.client(A, "work", 200)
        neighbour.working()
        victim.kill()
        neighbour.ended()
        damaged += neighbour.rc != 0
        stage.say(f"neighbour rc {neighbour.rc} {neighbour.text().splitlines()[-1:]}")
        until_served(stage, A, 30)
    verdict = f"SIGKILL of a spinning client: the neighbour lost its work {damaged} of {count}"
    return Result({"neighbour damaged": damaged}, damaged > 0, verdict)


# --- a fault with a leftover ------------------------------------------------------------------------------------------


def until_served(stage: Stage, uid: int, timeout: float, percent: float | None = None) -> tuple[float, int]:
    """Send a client every moment until one is served; when (seconds since the epoch) it had ended, and attempts.
    `percent`: only one with that share counts, because outside MPS every client is served."""
    end = time.monotonic() + timeout
    running: list[Client] = []
    attempts = 0
    due = time.monotonic()
    try:
        while time.monotonic() < end:
            if time.monotonic() >= due and len(running) < 12:
                running.append(stage.client(uid))
                attempts += 1
                due = time.monotonic() + SERVED
            for client in list(running):
                if client.rc is None:
                    continue
                running.remove(client)
                if client.rc == 0 and (percent is None or client.inside(percent)):
                    return time.time(), attempts
            time.sleep(0.01)
    finally:
        patience = time.monotonic() + 10
        for client in running:
            client.ended(max(0.0, patience - time.monotonic()))
            client.kill()
    raise RuntimeError(f"user {uid} was not served within {timeout:g} s\n{stage.last_words()}")


def fault_on(server: str) -> Callable[[Stage, int], Result]:
    def fault(stage: Stage, count: int) -> Result:
        """An illegal access, and a program that goes on after its error: who comes meanwhile is held, and MPS serves
        again within the policy's time."""
        patience, kill_grace = 2.0, 1.0
        agent = stage.with_agent(POLICY, server=server)
        served: list[float] = []
        active: list[float] = []
        late: list[str] = []
        for turn in range(count):
            stubborn = bool(turn % 2)
            bound = patience + (kill_grace if stubborn else 0) + 1 + stage.allowance
            leftover = stage.client(A, "sleep", 600, *(("--ignore-term",) if stubborn else ()))
            leftover.working()
            mark = agent.mark()
            stage.client(A, "oob", 0.3)
            began = seconds_of(agent.wait("server.fault", since=mark))
            held = [stage.client(uid) for uid in (A, B, A)]
            leftover.saw("work now")
            held[0].ended()
            served.append(time.time() - began)
            over = agent.wait("server.fault_over", since=mark)
            active.append(float(over["seconds"]))
            stage.say(f"leftover {'ignores' if stubborn else 'takes'} SIGTERM: over after {active[-1]:.2f} s, "
                      f"served after {served[-1]:.2f} s")  # fmt: skip
            for client in held:
                client.ended()
                if not client.inside(40):
                    late.append(f"not held during the fault: rc {client.rc} {client.text()}")
            if served[-1] > bound:
                late.append(f"{served[-1]:.2f} s where {bound:g} s were promised")
                stage.say(stage.last_words())
            if leftover.ended() is None:
                late.append("the leftover lives on")
                leftover.kill()
        figures: Json = {
            "timeouts.fault_recovery, kill_grace (s)": f"{patience:g}, {kill_grace:g}",
            "the fault is over after (s)": spread(active),
            "a client that came meanwhile is served after (s)": spread(served),
            "of which the leftover takes SIGTERM (s)": median(served[::2]),
            "of which it ignores SIGTERM (s)": median(served[1::2]), "problems": late,
        }  # fmt: skip
        good = not late and len(served) == count
        verdict = f"served again in time, nobody refused: {count - len(late)} of {count}; {spread(served)} s"
        return Result(figures, good, verdict, served)

    return fault


def fault_plain(stage: Stage, count: int) -> Result:
    """The control experiment: the leftover keeps everybody out for as long as it lives."""
    seconds = 3.0 if stage.quick else 10.0
    stage.without_agent()
    blocked = refused = 0
    for _ in range(count):
        leftover = stage.client(A, "sleep", 600)
        leftover.working()
        stage.client(A, "oob", 0.2).ended()
        end = time.monotonic() + seconds
        out = True
        while time.monotonic() < end:
            client = stage.client(A)
            client.ended(10)
            out &= client.rc != 0
            refused += client.rc != 0
            time.sleep(0.3)
        blocked += out
        leftover.kill()
        until_served(stage, A, 30)
    verdict = f"without the agent nobody was served for the {seconds:g} s that were watched: {blocked} of {count}"
    return Result({"watched (s)": seconds, "clients refused": refused}, blocked == count, verdict)


# --- many clients, and one that dies at the wrong moment --------------------------------------------------------------


def full(stage: Stage, count: int) -> Result:
    """48 clients: the 49th is held, the others are unharmed, and it is served as soon as a place is free."""
    agent = stage.with_agent('[limits]\nactive_threads = "40%"\nmemory_limit = "1G"\n')
    held = unharmed = served = 0
    problems: list[str] = []
    for _ in range(count):
        clients = [stage.client(A, "alloc", 8, 600)]
        clients[0].working()
        clients += [stage.client(A, "alloc", 8, 600) for _ in range(47)]
        for client in clients:
            client.saw("cuMemAlloc .* CUDA_SUCCESS")
        more = stage.client(A)
        more.queued()
        held += more.ended(1.0) is None
        why = [one["why"] for one in agent.api.get("/v1/queue")["queue"]]
        stage.say(f"the 49th is told: {why}")
        unharmed += sum(client.rc is None for client in clients)
        clients[0].signal(signal.SIGTERM)  # nothing runs on the GPU, so nobody is hurt
        more.ended()
        served += more.inside(40)
        if not more.inside(40):
            problems.append(f"the 49th: rc {more.rc} {more.text()}")
        unharmed -= sum(client.rc is not None for client in clients[1:])
        for client in clients[1:]:
            client.signal(signal.SIGTERM)
        for client in clients:
            client.ended()
    figures = {"49th held": held, "served once a place was free": served, "problems": problems}
    good = held == count == served and unharmed == 48 * count
    return Result(
        figures, good, f"49th held and served {served} of {count}, others unharmed {unharmed} of {48 * count}"
    )


def dying(stage: Stage, count: int) -> Result:
    """A client dies by itself while it is being ended: nobody else is signalled, and the agent goes on."""
    agent = stage.with_agent(POLICY)
    unharmed = answered = 0
    problems: list[str] = []
    for turn in range(count):
        neighbour = stage.client(A, "work", 150)
        neighbour.working()
        victim = stage.client(A, "sleep", 600)
        victim.working()
        stage.until(lambda: any(one["pid"] == victim.pid for one in agent.api.get("/v1/clients")["clients"]),  # noqa: B023
                    "the agent lists the client")  # fmt: skip
        said: list[int] = []
        end = threading.Thread(
            target=lambda: said.append(agent.api.order("terminate", pid=victim.pid)[0])  # noqa: B023
        )
        if turn % 2:
            end.start()
            time.sleep(0.002 * (turn % 5))
            victim.signal(signal.SIGKILL)
        else:
            victim.signal(signal.SIGKILL)
            time.sleep(0.002 * (turn % 5))
            end.start()
        end.join()
        victim.ended()
        neighbour.ended()
        unharmed += neighbour.rc == 0
        answered += said[0] in (200, 404)
        if neighbour.rc != 0:
            problems.append(neighbour.text() + stage.last_words())
    strangers = agent.found("action.done", action="SignalClient", ok=True)
    health = agent.api.problems()
    problems += [f"signalled: {one}" for one in strangers if "ended" in str(one.get("text"))] + health
    figures = {"neighbour finished": unharmed, "request answered": answered, "signals sent": len(strangers)}
    good = unharmed == count == answered and not problems
    return Result(figures, good, f"neighbour finished {unharmed} of {count}", problems)


def _name(kind: str) -> str:
    return "ladder-" + kind.replace(" SIGTERM", "").replace(" ", "-")


SCENES = (
    *(
        Scene(_name(kind), f"A client is ended ({kind}), its neighbour works on", ladder_for(kind, "own"), 20, 2, 65)
        for kind in VICTIMS
    ),
    *(
        Scene(f"{_name(kind)}-shared", f"The same on one server ({kind})", ladder_for(kind, "shared"), 20, 2, 65)
        for kind in ("spinning", "stopped")
    ),
    Scene("stopped", "SIGTERM to a program with a kernel in flight", stopped, 20, 2, 120),
    Scene("sigkill-plain", "Control: plain SIGKILL of a spinning client", sigkill, 10, 1, 40),
    Scene("fault", "A fault with a leftover that ignores its error", fault_on("own"), 20, 2, 110),
    Scene("fault-shared", "The same on one server", fault_on("shared"), 20, 2, 110),
    Scene("fault-plain", "Control: the leftover blocks without the agent", fault_plain, 2, 1, 26),
    Scene("full", "48 clients and a 49th", full, 2, 1, 20),
    Scene("dying", "A client dies while it is being ended", dying, 20, 4, 50),
)
