"""All users at once on one server: exact limits, faults that hold everybody, and changes of the way of sharing."""

from __future__ import annotations

import random
import re
import signal
import threading

from tests.conformance import rig as rigs
from tests.scenes.limits import POLICY, SHARES, Changes
from tests.scenes.stage import USERS, Agent, Client, Result, Scene, Stage

TOGETHER = 'sharing = "one-server"\n'
# Long enough that, on a busy machine too, who comes during a fault or before a change is there before that is over.
TIMES = '[turn]\ntime_limit = "20s"\ngrace = "1s"\n[timeouts]\nfault_recovery = "1m"\nsigkill_delay = "1s"\n'


def rushes(stage: Stage, count: int) -> Result:
    """Rushes of all users, `count` clients in all: each exactly its limits, and users work at the same time."""
    agent = stage.with_agent(POLICY, extra=TOGETHER)
    changes, draw = Changes(stage, agent), random.Random(9)
    most, left = 0, count
    while left > 0:
        rush = [stage.client(draw.choice(USERS), "sleep", 0.6 if most > 1 else 600) for _ in range(min(left, 10))]
        left -= len(rush)
        over = threading.Event()
        seen: list[int] = []

        def look(over: threading.Event = over, seen: list[int] = seen) -> None:
            while not over.wait(0.05):
                seen.append(len(agent.api.status()["clients_by_uid"]))

        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        if most < 2:  # at the beginning none ends before the others are there
            for client in rush:
                client.working()
            most = len(agent.api.status()["clients_by_uid"])
            for client in rush:
                client.signal(signal.SIGUSR1)
        for client in rush:
            client.ended()
            changes._see(client, first=True, how="rush")
        over.set()
        watcher.join()
        most = max([most, *seen])
    figures = changes.figures() | {"users at work at once, at most": most, "turns": len(agent.found("turn.began"))}
    good = changes.good() and most > 1 and not figures["turns"]
    exact = sum(seen.exact for seen in changes.seen)
    return Result(figures, good, f"{exact} of {count} clients exact, {most} users at once", changes.raw())


def fault(stage: Stage, count: int) -> Result:
    """One user's illegal access: clients of all users are hit, and who comes meanwhile is held, then served."""
    agent = stage.with_agent(POLICY + TIMES, extra=TOGETHER)
    hit = served = held = 0
    problems: list[str] = []
    for _ in range(count):
        neighbours = [stage.client(uid, "work", 1500) for uid in USERS[1:3]]
        leftover = stage.client(USERS[3], "sleep", 600)  # does not notice its error
        for client in (*neighbours, leftover):
            client.working()
        mark = agent.mark()
        culprit = stage.client(USERS[0], "oob", 0.1)
        agent.wait("server.fault", since=mark)
        late = [stage.client(uid) for uid in USERS]
        held += stage.until(lambda: _reasons(stage) >= {"fault"}, "who comes is held for the fault") >= 0
        culprit.ended()
        leftover.saw("work now")
        leftover.signal(signal.SIGUSR1)
        for client in (*neighbours, leftover):
            client.ended()
            hit += client.rc != 0
        for client in late:
            client.ended()
            right = client.inside(SHARES[client.uid][0])
            served += right
            if not right:
                problems.append(client.text())
    figures = {"clients of other users hit": hit, "who came meanwhile held": held, "and served": served}
    good = served == count * len(USERS) and held == count and hit == 3 * count and not problems
    verdict = f"{hit} of {3 * count} neighbours hit, {served} of {count * len(USERS)} who came meanwhile served"
    return Result(figures, good, verdict, [*problems, *agent.api.problems()])


def _reasons(stage: Stage) -> set[str]:
    return {one["reason"] for one in stage.agents[-1].api.get("/v1/queue")["queue"]}


def _later(agent: Agent) -> list[str]:
    doubts = [one["what"] for one in agent.api.status()["not_guaranteed"]]
    return [one for one in doubts if "takes effect later" in one]


def changed(stage: Stage, count: int) -> Result:
    """turns -> together -> turns at reloads, with clients at work: they go on, who waits is served, and meanwhile the
    status says until when the old way holds."""
    agent = stage.with_agent(POLICY + TIMES)
    problems: list[str] = []
    said: list[str] = []
    for _ in range(count):
        first = _worker(stage, USERS[0], 60)
        second = stage.client(USERS[1], "sleep", 60)
        second.queued()
        stage.policy(POLICY + TIMES, extra=TOGETHER)
        agent.api.order("reload")
        stage.until(lambda: _later(agent), "it says until when")
        said += _later(agent)
        problems += agent.api.problems()
        first.finish()
        second.working()
        if agent.api.status()["mode"]["sharing"] != "one-server" or first.rc or _worker(stage, USERS[2], 1.0).rc:
            problems.append(f"not together: {agent.api.status()['mode']}, first ended with {first.rc}")
        stage.policy(POLICY + TIMES)
        agent.api.order("reload")
        last = stage.client(USERS[4])
        if second.finish() != 0 or last.ended() != 0 or not last.inside(SHARES[last.uid][0]):
            problems.append(f"back to turns: {second.rc} {last.text()}")
        stage.until(lambda: agent.api.status()["mode"]["server"] == "user", "servers of their own again")
    verdict = f"{count} changes there and back, {len(problems)} problems"
    return Result({"said": said[:3], "problems": problems}, not problems, verdict, problems)


def rank(stage: Stage, count: int) -> Result:
    """Waiting users are served by priority, then in the order of arrival."""
    text = '[turn]\ntime_limit = "never"\n' + "".join(
        f"[user.{uid}]\nqueue_priority = {number}\n" for uid, number in RANKS
    )
    agent = stage.with_agent(text)
    right = 0
    orders: list[list[int]] = []
    for _ in range(count):
        holder = _worker(stage, USERS[0], 60)
        waiting = []
        for uid in (USERS[2], USERS[1], USERS[4], USERS[3]):
            waiting.append(stage.client(uid))
            waiting[-1].queued()
        listed = [one["uid"] for one in agent.api.get("/v1/queue")["queue"]]
        mark = agent.mark()
        holder.finish()
        for client in waiting:
            client.ended()
        order = [int(one["uid"]) for one in agent.found("turn.began", mark)]
        orders.append(order)
        right += order == listed == [USERS[3], USERS[4], USERS[2], USERS[1]]
    return Result({"orders": orders[:5]}, right == count, f"{right} of {count} times in the right order", orders)


RANKS = ((USERS[3], 9), (USERS[4], 5))


def _worker(stage: Stage, uid: int, seconds: float) -> Client:
    client = stage.client(uid, "sleep", seconds)
    client.working()
    return client


def killed(stage: Stage, count: int) -> Result:
    """The agent is killed and started again while several users work: nobody notices, and all go on together."""
    agent = stage.with_agent(POLICY, extra=TOGETHER)
    unharmed = served = 0
    for _ in range(count):
        workers = [_worker(stage, uid, 2.5) for uid in USERS[:3]]
        stage.stop_agent(agent, signal.SIGKILL)
        meanwhile = stage.client(USERS[0])  # he is known to the gate
        agent = stage.again()
        late = stage.client(USERS[4])
        for client in (meanwhile, late):
            client.ended()
            served += client.inside(SHARES[client.uid][0])
        for client in workers:
            client.ended()
            unharmed += client.rc == 0
    good = unharmed == 3 * count and served == 2 * count and not agent.found("turn.began")
    verdict = f"{unharmed} of {3 * count} clients unharmed, {served} of {2 * count} who came served"
    return Result({"unharmed": unharmed, "served": served}, good, verdict)


TOTALS = (
    '[limits]\nactive_threads = "20%"\nmemory_limit = "4G"\ntotal_active_threads = "50%"\ntotal_memory_limit = "9G"\n'
    f'[user.{USERS[1]}]\nactive_threads = "10%"\nmemory_limit = "1G"\ntotal_active_threads = "30%"\n'
    'total_memory_limit = "8G"\n'
)
FIT = {USERS[0]: (2, 20), USERS[1]: (3, 10)}
"""How many processes of a user fit at a time, and the percent of each."""


def totals(stage: Stage, count: int) -> Result:
    """Crowds of users with totals: never more at a time than fit, each whole, killed ones included; who is held reads
    why, and no user waits for another's total."""
    agent = stage.with_agent(TOTALS, extra=TOGETHER)
    draw = random.Random(3)
    exact = over = 0
    reasons: set[str] = set()
    problems: list[str] = []
    for number in range(count):
        # At first those at work stay until others wait for them.
        crowd = [stage.client(uid, "sleep", 0.5 if number else 600) for uid in FIT for _ in range(5)]
        if not number:
            stage.until(lambda: "total" in _reasons(stage), "some are held for their user's total")
            reasons |= _reasons(stage)
        told: set[int] = set()  # once: a second signal may meet a program that has taken its handler away
        while any(client.ended(0.05) is None for client in crowd):
            if not number:
                for client in crowd:
                    if client.pid not in told and client.seen() is not None:
                        told.add(client.pid)
                        client.signal(signal.SIGUSR1)
            listed = agent.api.get("/v1/clients")["clients"]
            for uid, (most, _) in FIT.items():
                at_once = sum(one["uid"] == uid and one["state"] != "waiting" for one in listed)
                over += at_once > most
            reasons |= _reasons(stage)
            if number % 2 and draw.random() < 0.2:
                draw.choice(crowd).signal(signal.SIGKILL)
        for client in crowd:
            exact += client.inside(FIT[client.uid][1])
            if not client.inside(FIT[client.uid][1]) and client.rc != -signal.SIGKILL:
                problems.append(client.text())
    figures = {"exact": exact, "more at once than fit": over, "why they waited": sorted(reasons)}
    good = not over and not problems and "total" in reasons and exact >= count * 5
    return Result(figures, good, f"{over} times more at once than the total, {exact} clients exact", problems)


CONTEXTS = POLICY.replace(f"[user.{USERS[0]}]\n", f"[user.{USERS[0]}]\nmax_contexts = 4\n").replace('"1000M"', '"20G"')
WORKED = "works everywhere CUDA_SUCCESS, another ctx CUDA_SUCCESS, works CUDA_SUCCESS"


def contexts(stage: Stage, count: int) -> Result:
    """One process wants more contexts than its user may have. It is told 808, works on in those that it has, and has
    another for one that ends; its user's next process waits, and all others are served."""
    agent = stage.with_agent(CONTEXTS, extra=TOGETHER)
    neighbour = stage.client(USERS[1], "mind", 600)
    neighbour.working()
    problems: list[str] = []
    served = 0
    for _ in range(count):
        mark = agent.mark()
        greedy = stage.client(USERS[0], "contexts", 60, 600)
        if not greedy.saw("made 4 contexts, last CUDA_ERROR_MPS_MAX_CLIENTS_REACHED"):
            problems.append(greedy.text())
        agent.wait("client.refused", since=mark, pid=greedy.pid)
        if "(CUDA error 808)" not in stage.cli(agent, "events", "--kind", "client.refused")[1]:
            problems.append("the events do not explain the error")
        waits = stage.client(USERS[0])
        waits.queued()
        for uid in USERS[2:]:
            other = stage.client(uid)
            other.ended()
            served += other.inside(SHARES[uid][0])
        for times in range(1, 4):
            greedy.signal(signal.SIGUSR1)
            stage.until(lambda one=greedy, so_far=times: one.text().count(WORKED) == so_far, "one context for another")
        stage.until(lambda: _reasons(stage) == {"max_contexts"}, "its user's next process waits for a context to end")
        if waits.rc is not None or len(agent.found("client.refused", mark)) != 1:
            problems.append(f"{waits.rc} {agent.found('client.refused', mark)}")
        greedy.kill()
        waits.ended()
        served += waits.inside(SHARES[USERS[0]][0])
    neighbour.finish()
    if neighbour.rc or "ERROR" in neighbour.text():
        problems.append(neighbour.text())
    wanted = count * (len(USERS) - 1)
    return Result({"served": served}, served == wanted and not problems, f"{served} of {wanted} served", problems)


LOWER = POLICY.replace(f"[user.{USERS[1]}]\n", f'[user.{USERS[1]}]\nclient_priority = "below-normal"\n')


def lower(stage: Stage, count: int) -> Result:
    """One user's clients have MPS's lower priority, everybody else's the normal one, as server.log says: beside a
    default that root sets by hand, when the gate is killed, and when a policy takes it away."""
    agent = stage.with_agent(LOWER, extra=TOGETHER)
    draw = random.Random(5)
    clients: list[tuple[Client, int]] = []
    for number in range(count):
        crowd = [stage.client(uid) for uid in draw.sample(USERS, len(USERS))]
        if number % 2 == 0:
            stage.rig.ctl("set_default_client_priority 1")
        else:
            _kill_gate(stage)
        for client in crowd:
            client.ended()
            clients.append((client, int(client.uid == USERS[1])))
    shown = stage.cli(agent, "policy", "explain", str(USERS[1]))[1]
    clients.append((stage.client(USERS[1]), 1))
    clients[-1][0].ended()
    stage.policy(POLICY, extra=TOGETHER)
    agent.api.order("reload")
    _kill_gate(stage)  # the next one does not know what the daemon was told last
    for number, uid in enumerate(USERS):
        clients.append((stage.client(uid), 0))
        clients[-1][0].ended()
        if number == 1:  # by now the gate knows that it is the normal one
            stage.rig.ctl("set_default_client_priority 1")
    got = _priorities(stage)
    wrong = [f"{got.get(one.pid)} instead of {right}: {one.text()}" for one, right in clients
             if got.get(one.pid) != right or not one.inside(SHARES[one.uid][0])]  # fmt: skip
    exact = len(clients) - len(wrong)
    good = not wrong and "below-normal" in shown
    return Result({"exact": exact}, good, f"{exact} of {len(clients)} clients with their user's priority", wrong)


def _kill_gate(stage: Stage) -> None:
    for process in stage.rig.ours():
        if "mpsagent.gate.main run" in process.arguments:  # not its keeper, and not an agent below a directory "gate"
            rigs.send_signal(process.pid, signal.SIGKILL)


def _priorities(stage: Stage) -> dict[int, int]:
    """By pid, what the server had been told when the client connected: it counts from then on (docs/measured.md)."""
    found: dict[int, int] = {}
    said = 0
    for line in (stage.rig.log / "server.log").read_text(errors="replace").splitlines():
        if match := re.search(r"(?:Client|Server) Priority set to (\d)", line):
            said = int(match[1])
        elif match := re.search(r"Client \{PID: (\d+), Context ID: 0\} connected", line):
            found[int(match[1])] = said
    return found


SCENES = (
    Scene("together", "All users at once, each client its policy's limits", rushes, 200, 20, 60),
    Scene("together-fault", "A fault with all users at once", fault, 10, 1, 60),
    Scene("together-changed", "From turns to together and back at reloads", changed, 5, 1, 60),
    Scene("together-lower", "One user's clients with MPS's lower priority", lower, 20, 4, 30),
    Scene("together-contexts", "More contexts than a user may have, in one process", contexts, 10, 1, 60),
    Scene("rank", "Whose turn is next by priority and arrival", rank, 10, 1, 60),
    Scene("totals", "Crowds of users with totals", totals, 20, 2, 40),
    Scene("together-killed", "The agent is killed while all users work", killed, 5, 1, 60),
)
