"""Bad input: policies with mistakes, directories that vanish, a control program that is missing, hangs or talks
nonsense, front-ends left open, connections that say nothing.

Each time: a status that says why, nobody over their policy, and recovery by itself once it is repaired.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable

from mpsagent.mps.units import multiprocessors_for_percent
from tests.conformance.backends import other_users_python
from tests.scenes.ending import until_served
from tests.scenes.stage import A, Agent, B, C, Client, Result, Scene, Stage, median, spread

POLICY = (
    '[limits]\nthreads = 40\nmemory = "2G"\n'
    f'[user.{B}]\nthreads = 20\nmemory = "1G"\n'
    '[hang]\ncontrol = "2s"\nserver = "3s"\nserver_ready = "5s"\nexit = "3s"\nquit = "3s"\n'
)
TEN_MISTAKES = f"""
[limits]
threads = 140
memory = "lots"
max_clients = 0
[user.{A}]
thread = 30
memory = "-4G"
[switch]
after = "soon"
action = "shoot"
[hang]
control = 5
fault = "yesterday"
[agent]
on_stop = "dance"
"""


def _share(client: Client, percent: float) -> list[str]:
    """Nothing when the client ended well with this share, else what it has."""
    client.ended()
    return [] if client.inside(percent) else [f"{client.name} wanted {percent} %: rc {client.rc} {client.text()}"]


def _over(stage: Stage, client: Client, percent: float) -> bool:
    got = client.seen()
    return got is not None and got[0] > multiprocessors_for_percent(percent, stage.machine.multiprocessors)


def _healthy(stage: Stage, agent: Agent, timeout: float = 90) -> float:
    """Until nothing is wrong any more."""
    return stage.until(lambda: not agent.api.problems(), "the agent is healthy", timeout)


def _complaint(stage: Stage, agent: Agent, words: tuple[str, ...], timeout: float = 90) -> str:
    """Wait until the status complains with one of these words; what it says."""
    found: list[str] = []

    def complains() -> bool:
        found[:] = [text for text in agent.api.problems() if any(word in text for word in words)]
        return bool(found)

    stage.until(complains, f"the status complains of {words}", timeout)
    return found[0]


# --- policies ---------------------------------------------------------------------------------------------------------


def reload(stage: Stage, count: int) -> Result:
    """A changed policy takes hold while a server runs; a bad one changes nothing and is named in the status."""
    agent = stage.with_agent(POLICY)
    problems: list[str] = []
    for turn in range(count):
        stage.policy(POLICY)
        agent.api.order("reload")
        worker = stage.client(A, "sleep", 4)
        worker.working()
        problems += _share(stage.client(A), 40)
        stage.policy(POLICY.replace("threads = 40", "threads = 30"))
        mark = agent.mark()
        if turn % 2:
            stage.rig.signal(agent.pid, signal.SIGHUP, "agent")
        else:
            problems += [str(said) for status, said in [agent.api.order("reload")] if status != 200]
        agent.wait("policy.loaded", since=mark)
        problems += _share(stage.client(A), 30)  # the same server, a later client
        stage.policy(TEN_MISTAKES)
        status, said = agent.api.order("reload")
        if status != 422:
            problems.append(f"a bad policy was answered with {status}: {said}")
        listed = agent.api.get("/v1/policy")["errors"]
        if len(listed) < 10 or not any("policy" in text for text in agent.api.problems()):
            problems.append(f"of 10 mistakes {len(listed)} are listed: {listed}")
        problems += _share(stage.client(A), 30)  # the old policy is in force
        worker.ended()
        problems += _share(stage.client(B), 20)
    stage.policy(POLICY)
    agent.api.order("reload")
    _healthy(stage, agent)
    verdict = f"the policy changed {count} times, well and badly; {len(problems)} problems"
    return Result({"problems": problems}, not problems, verdict, problems)


# --- directories ------------------------------------------------------------------------------------------------------


def pipe_gone(stage: Stage, count: int) -> Result:
    """The public directory is removed: it comes back by itself, and everybody is served inside MPS. (Without it CUDA
    runs outside, which only an exclusive compute mode prevents.)"""
    agent = stage.with_agent(POLICY)
    took, problems = [], []
    for _ in range(count):
        problems += _share(stage.client(A), 40)
        shutil.rmtree(stage.rig.pipe)
        since = time.time()
        at, attempts = until_served(stage, B, 60, 20)
        took.append(round(at - since, 2))
        stage.say(f"served inside MPS again after {took[-1]} s and {attempts} attempts; {agent.api.problems()}")
        _healthy(stage, agent)
    figures = {"served inside MPS again (s)": took, "problems": problems}
    return Result(figures, not problems, f"public directory removed: served {took} s later", problems)


def log_gone(stage: Stage, count: int) -> Result:
    """A user removes the log directory: the agent says so, nobody gets more, and a restart of MPS mends it."""
    took: list[float] = []
    problems: list[str] = []
    said = ""
    agent = stage.with_agent(POLICY)
    for _ in range(count):
        shutil.rmtree(stage.rig.log)
        for uid, percent in ((B, 20), (C, 40)):
            client = stage.client(uid)
            client.ended(60)
            if _over(stage, client, percent):
                problems.append(f"over without a log directory: {client.text()}")
        said = _complaint(stage, agent, ("log",))
        since = time.monotonic()
        stage.cli(agent, "restart")  # MPS opens its logs only once
        _healthy(stage, agent)
        stage.open(agent)
        took.append(round(time.monotonic() - since, 2))
        problems += _share(stage.client(B), 20)
    figures = {"it says": said, "healthy after the restart (s)": took, "problems": problems}
    return Result(figures, not problems, f"log directory removed: healthy {took} s after a restart", problems)


# --- the control program ----------------------------------------------------------------------------------------------

COMPLAINTS = ("nvidia-cuda-mps-control", "control daemon")
WRAPPER = """#!/bin/sh
case "$(cat {mode} 2>/dev/null)" in
hang) exec sleep 600;;
garbage) head -c 3000 /dev/urandom; exit 0;;
fails) echo "cannot open shared object file" >&2; exit 127;;
esac
exec {real} "$@"
"""


def program_for(kind: str) -> tuple[str, Callable[[Stage, int], Result]]:
    def program_broken(stage: Stage, count: int) -> Result:
        """NVIDIA's program is broken. Who has a server goes on; when the daemon has to be started, clients are held, it
        is said why, and they are served once the program is repaired."""
        place = stage.place / "programs"
        place.mkdir(mode=0o755)
        mode, program = place / "mode", place / "nvidia-cuda-mps-control"
        program.write_text(WRAPPER.format(mode=mode, real=stage.backend.control))
        program.chmod(0o755)
        agent = stage.with_agent(POLICY, control=str(program))
        stage.served(A)
        said: list[str] = []
        took: list[float] = []
        problems: list[str] = []
        for _ in range(count):
            if kind == "missing":
                os.rename(program, place / "elsewhere")
            elif kind == "not-executable":
                program.chmod(0o644)
            else:
                mode.write_text(kind)
            try:
                problems += _share(stage.client(A), 40)  # its server is there
                stage.kill_daemons()
                held = [stage.client(uid) for uid in (A, B)]
                said.append(_complaint(stage, agent, COMPLAINTS))
            finally:
                if kind == "missing":
                    os.rename(place / "elsewhere", program)
                program.chmod(0o755)
                mode.unlink(missing_ok=True)
            since = time.monotonic()
            stage.cli(agent, "restart")  # after several failed starts it waits; an administrator does not
            for client, percent in zip(held, (40, 20), strict=True):
                client.ended(90)
                problems += _share(client, percent)
            _healthy(stage, agent)
            took.append(round(time.monotonic() - since, 2))
        figures = {"it says": said[0], "healthy after the repair (s)": took, "problems": problems}
        verdict = f"control program {kind}: said so, healthy {took} s after the repair"
        return Result(figures, not problems, verdict, problems)

    return f"program-{kind}", program_broken


def left_open(stage: Stage, count: int) -> Result:
    """Some user leaves a front-end open, and root another one: nobody is held up by them, and both are answered."""
    agent = stage.with_agent(POLICY)
    problems: list[str] = []
    for turn in range(count):
        sessions = [stage.rig.session(uid=C), stage.rig.session()]
        time.sleep(0.2)
        for uid, share in ((A, 40), (B, 20), (A, 40)):
            problems += _share(stage.client(uid), share)
        spin = stage.client(A, "spin", 600)
        spin.saw("launch")
        status, told = stage.cli(agent, "client", "terminate", str(spin.pid))
        if status or spin.ended() is None:
            problems.append(f"terminate beside an open front-end: {status} {told}")
        asked = stage.rig.ctl("get_server_list", 60)
        if asked.rc != 0 or not asked.out.strip():
            problems.append(f"a third front-end is answered with {asked}")
        if agent.api.problems():
            problems.append(f"not healthy: {agent.api.problems()}")
        for session, writer in sessions:
            os.write(writer, b"get_server_list\n" * (turn + 1))
            os.close(writer)
            reply = stage.rig.finish(session, 600)  # counted from its start
            if reply.rc != 0 or len(reply.out.split()) < turn + 1:
                problems.append(f"the open front-end is answered with {reply}")
        _healthy(stage, agent)
    return Result({"problems": problems}, not problems, "front-ends left open hold up nobody", problems)


def silent_ones(stage: Stage, count: int) -> Result:
    """500 connections of one user that say nothing, stop half-way, send garbage or go: others notice nothing."""
    agent = stage.with_agent(POLICY)
    problems: list[str] = []
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(count):
        for found in (alone, beside):
            crowd = _crowd(stage, C, 500) if found is beside else None
            for uid, share in ((A, 40), (B, 20), (A, 40)):
                client = stage.client(uid)
                problems += _share(client, share)
                found.append(time.monotonic() - client.started.since)
            if crowd is not None:
                if crowd.poll() is not None:
                    problems.append("the crowd has gone")
                crowd.kill()
                crowd.wait()
        problems += agent.api.problems()
    figures = {
        "served without them (s)": spread(alone), "served beside them (s)": spread(beside), "problems": problems,
    }  # fmt: skip
    good = not problems and (stage.quick or (median(beside) or 9) - (median(alone) or 0) < 0.05)
    return Result(figures, good, f"{spread(alone)} s alone, {spread(beside)} s beside 500 connections", problems)


CROWD = r"""
import os, socket, sys, time
path, count = sys.argv[1], int(sys.argv[2])
kept = []
for number in range(count):
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.setblocking(False)
    try:
        one.connect(path)
        if number % 5 == 1: one.send(os.urandom(200))
        if number % 5 == 2: one.send(b"OUTBCRED\0")
        if number % 5 == 3: one.send(b"OUTBCRED\0"); one.send(bytes((number % 251 + 3, 0, 0, 0)))  # no client (2)
        if number % 5 == 4: one.close()
    except OSError:
        pass
    kept.append(one)
print("there", flush=True)
time.sleep(600)
"""


def _crowd(stage: Stage, uid: int, count: int) -> subprocess.Popen[bytes]:
    """A process of `uid` with so many connections to the public socket."""
    started = stage.rig.run(
        [other_users_python(uid), "-S", "-E", "-c", CROWD, str(stage.rig.pipe / "control"), str(count)], uid=uid
    )
    stage.until(lambda: "there" in started.read(), "500 connections")
    return started.process


SCENES = (
    Scene("policy-reload", "A policy is changed while a server runs, well and badly", reload, 4, 2, 25),
    Scene("pipe-gone", "The pipe directory vanishes", pipe_gone, 3, 1, 25),
    Scene("log-gone", "The log directory vanishes", log_gone, 2, 1, 12),
    *(
        Scene(name, f"The control program: {kind}", play, 2, 1, 15)
        for kind in ("missing", "not-executable", "hang", "garbage", "fails")
        for name, play in [program_for(kind)]
    ),
    Scene("front-end-open", "Front-ends are left open", left_open, 3, 1, 20),
    Scene("silent-500", "500 connections that say nothing", silent_ones, 3, 1, 20),
)
