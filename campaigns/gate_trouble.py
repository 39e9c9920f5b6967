"""Parts of gate.py: namespaces, hostile peers, forged lines, and the ladder on a shared server."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import shutil
import statistics
import subprocess
import threading
import time
from collections import Counter
from datetime import UTC, datetime

from campaigns.gate_place import (
    Here,
    Out,
    exact,
    first,
    gate_pid,
    listed,
    memory_of,
    own_start,
    process_of,
    processor_of,
)
from mpsagent.mps.units import multiprocessors_for_percent
from tests import recordings
from tests.scenes import ending
from tests.scenes.stage import A, Agent, B, C, Client, D, Stage, StageError

# --- namespaces -------------------------------------------------------------------------------------------------------

SHM = "mount -t tmpfs t /dev/shm"
PROC = "mount -t proc proc /proc"
NAMESPACES = {
    "user": ("-Ur", ":"),
    "user, ipc": ("-Uri", ":"),
    "user, net": ("-Urn", ":"),
    "user, pid": ("-Urpmf", PROC),
    "user, mount with its own /dev/shm": ("-Urm", SHM),
    "user, pid, ipc, net, mount with its own /dev/shm": ("-Urpinmf", f"{PROC} && {SHM}"),
}
"""Options of unshare, and what is done inside before the client begins. Made by the user himself."""
AS_ROOT = "pid, ipc, net, mount with its own /dev/shm, made by root"


def namespaces(here: Here, out: Out) -> None:
    rows = out.table(
        "Clients in namespaces of their own",
        *("namespaces", "server", "behind the gate (multiprocessors, free MiB)", "limits exact"),
        *("the agent lists it as", "inside MPS", "bare MPS", "good"),
    )
    bare = here.stage()
    policy = f'[limits]\nthreads = 40\nmemory = "3333M"\n[user.{B}]\nthreads = 20\nmemory = "2G"\n'
    without: dict[str, str] = {}
    for name in (*NAMESPACES, AS_ROOT):
        if not without:
            bare.without_agent()
        client = _inside(here, bare, name, A, "query")
        client.ended(20)
        without[name] = "served" if client.rc == 0 else f"not served: {_last(client)}"
    bare.kill_daemons()
    for form in ("own", "shared"):
        stage = here.stage()
        agent = stage.with_agent(policy, server=form)
        _, plain = own_start(stage, A)
        right = plain.seen() or (0, 0)
        exact(
            out,
            plain,
            (multiprocessors_for_percent(40, here.machine.multiprocessors), right[1]),
            f"plain client ({form})",
        )
        for name in (*NAMESPACES, AS_ROOT):
            client = _inside(here, stage, name, A, "sleep", 1.2)
            served = first(client, 20) is not None
            until = time.monotonic() + 1.0
            while not (told := _of(agent, client.pid)) and time.monotonic() < until:
                time.sleep(0.03)
            status, text = stage.cli(agent, "clients")
            client.ended(20)
            is_exact = served and client.seen() is not None and exact(out, client, right, f"{name} ({form})")
            who = f"{told[0]['uid']}, pid {'of the host' if told else ''}, {told[0]['state']}" if told else "nothing"
            shown = status == 0 and (client.rc is not None or any(f" {A} " in line for line in text.splitlines()))
            right_user = bool(told) and told[0]["uid"] == A and shown
            if without[name] == "served":  # what real MPS itself does not serve is no fault of the gate
                out.check(
                    served and is_exact and right_user,
                    f"{name} ({form}): served {served}, listed {told}, {_last(client)}",
                )
            rows.append([name, form, client.seen() or f"not served: {_last(client)}", "yes" if is_exact else "NO", who,
                         "yes" if "] mps yes" in client.text() else "?", without[name],
                         "yes" if served and is_exact and right_user else "NO"])  # fmt: skip
    good = sum(row[-1] == "yes" for row in rows)
    out.say(f"{good} of {len(rows)} served with exact limits and the right user; bare MPS serves "
            f"{sum(one == 'served' for one in without.values())} of {len(without)}")  # fmt: skip
    out.raw["bare"] = without


def _inside(here: Here, stage: Stage, name: str, uid: int, mode: str, *arguments: float) -> Client:
    client = shlex.join([*here.backend.client, mode, *(str(one) for one in arguments)])
    environment = stage.rig.environment({"SAY_MPS": "1"})
    if name == AS_ROOT:
        drop = f"setpriv --reuid {uid} --regid {uid} --clear-groups"
        command = ["unshare", "-pinmf", "sh", "-c", f"{PROC} && {SHM} && exec {drop} {client}"]
        started = stage.rig.run(command, env=environment, program=_unshare())
    else:
        options, before = NAMESPACES[name]
        command = ["unshare", options, "sh", "-c", f"{before} && exec {client}"]
        started = stage.rig.run(command, uid=uid, env=environment, program=_unshare())
    return _Inside(stage, stage.rig._client(started, uid, (mode, *arguments), None), uid)


def _unshare() -> str:
    return shutil.which("unshare") or "/usr/bin/unshare"


class _Inside(Client):
    """A client behind `unshare`: its pid is that of the process that does CUDA."""

    @property
    def pid(self) -> int:
        found = super().pid
        for _ in range(4):  # unshare, sh, setpriv: some of them become the client, some are its parents
            children = [one.pid for one in self.stage.rig.ours() if one.parent == found]
            if not children:
                break
            found = children[0]
        return found


def _of(agent: Agent, pid: int) -> list[dict[str, object]]:
    return [one for one in listed(agent) if one["pid"] == pid]


def _last(client: Client) -> str:
    said = client.text() + client.started.err.read_text(errors="replace")
    return f"rc {client.rc}, {said.strip().splitlines()[-1][-160:] if said.strip() else 'silent'}"


# --- hostile peers ----------------------------------------------------------------------------------------------------

BESIDE = 0.05
WAYS = ("silent", "greeted", "garbage", "half", "vanish")
CONNECTIONS = 500
WAITING = 2000


def hostile(here: Here, out: Out) -> None:
    count, crowd = (100, 100) if here.sim else (CONNECTIONS, WAITING)
    title = f"{count} connections of one user, and another user's clients: start to first result (s)"
    rows = out.table(title, "what they do", "without", "beside them", "more", "good")
    stage = here.stage()
    agent = stage.with_agent('[limits]\nthreads = 40\nmemory = "2G"\n[switch]\nafter = "never"\n', server="shared")
    holder = stage.client(A, "sleep", 600)  # it is A's turn, whatever knocks
    if first(holder) is None:
        raise StageError(f"nobody is served: {holder.text()}\n{stage.last_words()}")
    right = holder.seen() or (0, 0)
    rounds = here.few(8)
    for way in WAYS:
        before = _starts(out, stage, rounds, right, f"before {way}")
        peer = here.peer(stage, D, way, count)
        _ready(peer)
        beside = _starts(out, stage, rounds, right, f"beside {way}")
        here.end_peer(peer)
        _row(here, out, rows, way, before, beside)
    _crowd(here, out, stage, agent, right, crowd)
    holder.kill()
    _alone_with_vanishing(here, out, count)


def _starts(out: Out, stage: Stage, rounds: int, right: tuple[int, int], what: str) -> list[float]:
    found = []
    for _ in range(rounds):
        took, client = own_start(stage, A, 30)
        exact(out, client, right, what)
        if took is None:
            break
        found.append(took)
    return found


def _row(here: Here, out: Out, rows: list[list[object]], way: str, before: list[float], beside: list[float]) -> None:
    if not before or not beside:
        out.wrong(f"{way}: clients were not served: {len(before)} before, {len(beside)} beside")
        return
    more = statistics.median(beside) - statistics.median(before)
    good = more <= BESIDE
    if not here.sim:
        out.check(good, f"{way}: {more:.3f} s more than without")
    rows.append([way, _times(before), _times(beside), more, "yes" if good else "NO"])
    out.say(f"{way}: {_times(before)} s without, {_times(beside)} s beside them ({more * 1000:+.0f} ms)")


def _times(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def _ready(peer: subprocess.Popen[bytes], seconds: float = 60.0) -> str:
    """What it says once all have come."""
    said: list[bytes] = []
    assert peer.stdout is not None
    thread = threading.Thread(target=lambda: said.append(peer.stdout.readline()), daemon=True)  # type: ignore[union-attr]
    thread.start()
    thread.join(seconds)
    if not said:
        raise StageError(f"the connections did not all come within {seconds:g} s")
    return said[0].decode().strip()


def _waiting(agent: Agent) -> int:
    return sum(int(one.get("processes", 0)) for one in agent.api.status().get("waiting", []))


def _crowd(here: Here, out: Out, stage: Stage, agent: Agent, right: tuple[int, int], number: int) -> None:
    """Who waits costs little, and nobody whose turn it is waits for them."""
    rows = out.table(f"{number} waiting clients of two users", "", "before", "with them", "after they have gone")
    gate, keeper = gate_pid(stage), process_of(stage, "keep", "mpsagent")
    processes = {"gate": gate, "keeper": keeper, "agent": agent.pid}
    memory = {name: [memory_of(pid)] for name, pid in processes.items()}
    times = [_starts(out, stage, here.few(5), right, "before the crowd")]
    used = {name: processor_of(pid) for name, pid in processes.items()}
    since = time.monotonic()
    peers = [here.peer(stage, uid, "wait", number // 2) for uid in (C, D)]
    came = [_ready(peer, 90) for peer in peers]
    out.check(all(one.startswith(f"ready {number // 2},") for one in came), f"of the crowd not all wait: {came}")
    until = time.monotonic() + 20
    while (waiting := _waiting(agent)) < number and time.monotonic() < until:
        time.sleep(0.2)
    arrived = time.monotonic() - since
    out.check(waiting >= number, f"{waiting} of {number} wait, says the agent; they themselves: {came}")
    time.sleep(1)
    used = {name: round(processor_of(pid) - used[name], 2) for name, pid in processes.items()}
    quiet = {name: processor_of(pid) for name, pid in processes.items()}
    time.sleep(2)
    quiet = {name: round((processor_of(pid) - quiet[name]) / 2, 3) for name, pid in processes.items()}
    for name, pid in processes.items():
        memory[name].append(memory_of(pid))
    times.append(_starts(out, stage, here.few(5), right, "beside the crowd"))
    begun = time.monotonic()
    status = agent.api.status()
    answered = time.monotonic() - begun
    ended = time.monotonic()
    for peer in peers:
        here.end_peer(peer)
    stage.until(lambda: _waiting(agent) == 0, "the crowd has gone", 60, every=0.1)
    gone = time.monotonic() - ended
    for name, pid in processes.items():
        memory[name].append(memory_of(pid))
    times.append(_starts(out, stage, here.few(5), right, "after the crowd"))
    rows += [[f"{name}, memory (MiB, Pss)", *values] for name, values in memory.items()]
    rows.append(["client of the user whose turn it is (s)", *(_times(values) if values else "-" for values in times)])
    rows.append(["processor seconds for their arrival", "", f"{used}", ""])
    rows.append(["processor share while they wait", "", f"{quiet}", ""])
    rows.append(["root's status (s)", "", answered, ""])
    more = statistics.median(times[1]) - statistics.median(times[0]) if all(times[:2]) else 99.0
    if not here.sim:
        out.check(more <= BESIDE, f"beside {number} waiting clients: {more:.3f} s more")
    out.check(gate == gate_pid(stage), "the gate is another process now")
    out.check(not status.get("error"), f"status: {status.get('error')}")
    out.say(
        f"{waiting} of {number} waiting clients ({came}) came in {arrived:.1f} s, gone in {gone:.1f} s; "
        f"a client beside them {more * 1000:+.0f} ms; "
        f"MiB gate {memory['gate']}, agent {memory['agent']}, keeper {memory['keeper']}; "
        f"processor s {used}; root's status {answered * 1000:.0f} ms"
    )
    out.raw["crowd"] = {
        "memory": memory,
        "times": times,
        "used": used,
        "quiet": quiet,
        "arrived": arrived,
        "gone": gone,
    }


VANISHING = """
[limits]
threads = 40
memory = "2G"
[switch]
after = "2s"
grace = "1s"
[hang]
control = "2s"
terminate = "1s"
kill_grace = "1s"
"""


def _alone_with_vanishing(here: Here, out: Out, count: int) -> None:
    """It is nobody's turn, so those who vanish get turns too, and some vanish in the middle of their hand-over."""
    title = "Vanishing clients when it is no user's turn: they get turns (switch.after 2 s, grace 1 s) (s)"
    rows = out.table(title, "server", "clients of another user")
    for form in ("shared", "own"):
        stage = here.stage()
        stage.with_agent(VANISHING, server=form)
        _, plain = own_start(stage, A)
        peer = here.peer(stage, D, "vanish", count, 100.0)
        _ready(peer)
        took = _starts(out, stage, here.few(4), plain.seen() or (0, 0), f"beside vanishing, {form}")
        here.end_peer(peer)
        rows.append([form, _times(took) if took else "none was served"])
        out.check(took, f"beside vanishing clients nobody was served, server {form}")
        if took:
            out.say(f"vanishing clients that get turns ({form}): {_times(took)} s")


# --- forged lines -----------------------------------------------------------------------------------------------------

RANDOM = 10_000
HEAD = re.compile(r"^\[[^\]]*\] ?")
NUMBER = re.compile(r"\b\d{2,}\b")
OWN = (
    "Starting control daemon using socket {socket}", "CUDA MPS Control binary version: 13000", "Exit with status 0",
    "NEW CLIENT {pid} from user {uid}: Server is not ready, push client to pending list",
    "NEW CLIENT {pid} from user {uid}: Server already exists", "Starting new server {pid} for user {uid}",
    "NEW SERVER {pid}: Ready", "Server {pid} exited with status 0", "Server {pid} exited with status 1",
    "quit command issued with timeout of 1", "Cmd:quit", "Cmd:quit -t 1", "Cmd:shutdown_server {pid} -f",
    "Cmd:terminate_client {pid} {pid}", "Cmd:set_default_active_thread_percentage 100", "Removed Shm file at ",
    "Try shutting down server {pid}, backoff is true",
    "Client {{PID: {pid}, Context ID: 1}} connected", "Client {{PID: {pid}, Context ID: 1}} disconnected",
    "The following client process have a sticky error set:", "{pid}", "The following devices will be reset:", "0",
    "Startup", "Server has started", "Failed to start : initialization error", "User did not send valid credentials",
    "Active Threads Percentage set to 100.0", "Device pinned memory limit for device 0 set to 0x0 bytes", "Exiting",
)  # fmt: skip


def forged(here: Here, out: Out) -> None:
    rows = out.table(
        "Forged lines while clients of two users are there",
        *("server", "lines in each log", "kinds", "A's clients exact", "A's work finished", "B served after A, exact"),
        *("bystander lives", "daemon, gate, agent the same", "actions of the agent meanwhile", "good"),
    )
    for form in ("own", "shared"):
        _forged_on(here, out, rows, form)


def _kinds() -> tuple[list[str], list[str]]:
    """Every kind of line in the recordings, numbers left in; control.log and server.log."""
    found: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for name in recordings.names():
        logs = recordings.logs(name)
        for kinds, data in zip(found, (logs.control, logs.server), strict=True):
            for line in data.decode(errors="replace").splitlines():
                text = HEAD.sub("", line)
                kinds.setdefault(re.sub(r"[0-9a-fA-F-]*\d[0-9a-fA-F.-]*", "#", text), text)
    return [*OWN, *found[0].values()], [*OWN, *found[1].values()]


def _forged_on(here: Here, out: Out, rows: list[list[object]], form: str) -> None:
    stage = here.stage()
    policy = f'[limits]\nthreads = 40\nmemory = "3333M"\n[user.{B}]\nthreads = 20\nmemory = "2G"\n'
    agent = stage.with_agent(policy, server=form)
    rights = {}
    for uid in (A, B, A):
        _, plain = own_start(stage, uid)
        rights[uid] = plain.seen() or (0, 0)
        out.check(plain.rc == 0, f"before: {plain.text()}")
    bystander = stage.rig.run(["/bin/sleep", "120"], uid=C, env={"PATH": "/usr/bin:/bin"})
    mark = agent.mark()
    seconds = 4.0 if here.quick else 8.0
    workers = [stage.client(A, "sleep", seconds + 3), stage.client(A, "work", int(seconds * 60))]
    for worker in workers:
        first(worker)
    waits = stage.client(B)
    waits.queued()
    parts = {
        "daemon": process_of(stage, "nvidia-cuda-mps-control -d") or stage.rig.daemon(),
        "gate": gate_pid(stage),
        "agent": agent.pid,
    }
    server = int(re.sub(r"\D", "", stage.rig.ctl("get_server_list", quiet=True).out.split("\n")[0]) or 0)
    pids = [*(one.pid for one in workers), waits.pid, bystander.process.pid, os.getpid(), 1, server, *parts.values()]
    control, server_kinds = _kinds()
    number = 1000 if here.quick else RANDOM
    kinds = {"Control": (control, parts["daemon"]), "Server": (server_kinds, server)}
    writer = threading.Thread(target=_forge, daemon=True, args=(stage, kinds, pids, number, seconds))
    writer.start()
    extra, good_ones = 0, 0
    while writer.is_alive():
        _, client = own_start(stage, A, 30)
        extra += 1
        good_ones += exact(out, client, rights[A], f"A's client while lines are forged ({form})")
        time.sleep(0.1)
    early = waits.rc is not None or "] sms " in waits.text()
    out.check(not early, f"B was served while it was A's turn ({form}): {waits.text()}")
    finished = [worker.ended(30) for worker in workers]
    out.check(finished == [0, 0], f"A's work ({form}): rc {finished}: {[worker.text()[-300:] for worker in workers]}")
    for worker in workers:
        exact(out, worker, rights[A], f"A's worker ({form})")
    waits.ended(30)
    after = [waits, *(own_start(stage, uid)[1] for uid in (B, A, B))]
    right_after = [exact(out, one, rights[one.uid], f"after the forged lines ({form})") for one in after]
    lives = bystander.process.poll() is None
    out.check(lives, f"a process that never was a client was ended: {bystander.process.poll()} ({form})")
    now = {
        "daemon": process_of(stage, "nvidia-cuda-mps-control -d") or parts["daemon"],
        "gate": gate_pid(stage),
        "agent": agent.pid,
    }
    out.check(now == parts and agent.started.process.poll() is None, f"{parts} became {now} ({form})")
    done = [one for one in agent.news()[mark:] if one["kind"] in ("action.done", "action.failed")]
    actions = Counter(f"{one.get('action')}{'' if one.get('ok') else ' (not done)'}" for one in done)
    # What would hit someone; the end of a turn is told to its own server by ShutdownServer.
    violent = re.compile(r"Signal|Terminate|Kill|Quit|Refuse|Restart")
    hits = {name: count for name, count in actions.items() if violent.search(name) and "not done" not in name}
    why = [
        f"{one.get('ok')} {one.get('text')} {one.get('sentence')}" for one in done if violent.search(str(one["action"]))
    ]
    out.raw[f"what would hit someone ({form})"] = why
    out.check(not hits, f"the agent did {hits} ({form}): {why[:6]}")
    good = (
        not early
        and finished == [0, 0]
        and all(right_after)
        and extra == good_ones
        and lives
        and now == parts
        and not hits
    )
    rows.append([
        form, number + len(pids) * len(control), f"{len(control)} + {len(server_kinds)}", f"{good_ones} of {extra}",
        finished, f"{sum(right_after)} of {len(right_after)}", lives, now == parts, dict(actions),
        "yes" if good else "NO",
    ])  # fmt: skip
    out.say(
        f"{form}: {good_ones} of {extra} exact beside {number} random lines and {len(control)} + {len(server_kinds)} "
        f"kinds about {len(pids)} processes; A finished {finished}, B and others after it {sum(right_after)} of "
        f"{len(right_after)}; hits {hits}"
    )
    out.raw[f"problems said by the agent ({form})"] = agent.api.problems()


def _forge(
    stage: Stage, kinds_of: dict[str, tuple[list[str], int]], pids: list[int], number: int, seconds: float
) -> None:
    """Appends to both logs, in pieces; half of the heads are those of the daemon and the server themselves."""
    draw = random.Random(1)
    uids = (0, A, B, C)
    pieces: dict[str, list[bytes]] = {}
    for role, (kinds, real) in kinds_of.items():
        lines = [_line(draw, role, kind, real, pid, uids, stage) for kind in kinds for pid in pids]
        for _ in range(number):
            if draw.random() < 0.8:
                head, pid = draw.choice([real, *pids]), draw.choice(pids)
                lines.append(_line(draw, role, draw.choice(kinds), head, pid, uids, stage))
            else:
                lines.append(draw.randbytes(draw.randrange(1, 300)) + b"\n")
        draw.shuffle(lines)
        pieces[role] = lines
    steps = 40
    for step in range(steps):
        for role, lines in pieces.items():
            path = stage.rig.log / f"{role.lower()}.log"
            with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
                file.write(b"".join(lines[len(lines) * step // steps : len(lines) * (step + 1) // steps]))
        time.sleep(seconds / steps)


def _line(draw: random.Random, role: str, kind: str, head: int, pid: int, uids: tuple[int, ...], stage: Stage) -> bytes:
    if kind in OWN:
        text = kind.format(pid=pid, uid=draw.choice(uids), socket=stage.rig.pipe / "control")
    else:
        text = NUMBER.sub(lambda _: str(pid if draw.random() < 0.7 else draw.choice(uids)), kind)
    stamp = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    return f"[{stamp} {role} {head:5d}] {text}\n".encode()


# --- the ladder -------------------------------------------------------------------------------------------------------


def ladder(here: Here, out: Out) -> None:
    rows = out.table(
        "One of two clients that compute is ended, on a shared server",
        *("round", "ended after (s)", "rc of the ended", "the other", "server the same", "good"),
    )
    stage = here.stage()
    agent = stage.with_agent(ending.POLICY, server="shared")
    # Both are one user's: it is one user's turn at a time.
    for number in range(here.few(3)):
        victim, other = stage.client(A, "spin", 30), stage.client(A, "spin", 3)
        for one in (victim, other):
            one.working()
            one.saw("launch")
        before = stage.rig.ctl("get_server_list", quiet=True).out.split()
        since = time.monotonic()
        status, said = stage.cli(agent, "client", "terminate", str(victim.pid))
        victim.ended(20)
        took = time.monotonic() - since
        other.ended(30)
        same = before == stage.rig.ctl("get_server_list", quiet=True).out.split()
        good = status == 0 and victim.rc is not None and other.rc == 0 and "CUDA_SUCCESS after" in other.text() and same
        out.check(
            good,
            f"round {number}: cli {status} {said} victim {_last(victim)}; other {_last(other)}",
        )
        rows.append([number + 1, took, victim.rc, f"rc {other.rc}, {_last(other)}", same, "yes" if good else "NO"])
        if victim.rc is None:
            victim.kill()
    good_ones = sum(row[-1] == "yes" for row in rows)
    out.say(
        f"{good_ones} of {len(rows)}: one of two that compute is ended, the other finishes; "
        f"ended after {_times([float(str(row[1])) for row in rows])} s"
    )
    title = "A fault on a shared server with a leftover; in every second round it ignores SIGTERM too"
    results = out.table(title, "rounds", "verdict", "figures", "good")
    rounds = 2
    result = ending.fault_on("shared")(here.stage(), rounds)
    out.check(result.good, f"fault: {result.verdict} {result.figures} {result.raw[-1:]}")
    results.append([rounds, result.verdict, result.figures, "yes" if result.good else "NO"])
    out.say(f"fault: {result.verdict}")
