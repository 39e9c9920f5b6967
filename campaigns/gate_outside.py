"""A part of gate.py, only where it is named: programs outside MPS in a rush, and what the agent says of memory and the
compute mode beside what nvidia-smi says."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

from campaigns.gate_cost import in_words, shares_of
from campaigns.gate_place import Here, Out, listed
from mpsagent.system.device_watch import COUNT
from tests.scenes.stage import A, Agent, B, C, Client, Stage, seconds_of

MANY = 100
SECONDS = 3
AT_ONCE = 6
"""Of each kind that live at a time. The driver makes contexts in turn; with a pair each 0.15 s, 44 of 100 outside MPS
and 12 of 100 inside ended with CUDA_ERROR_OUT_OF_MEMORY after 45 s (an H200, 2026-11-22)."""
IDLE = 20.0
MOST = 0.001
"""Of a core, for watching who computes outside while nothing happens."""
LATE = 2.0
MIB = 1 << 20
NEAR = 64
"""MiB by which two answers about the same process may differ."""


def outside(here: Here, out: Out) -> None:
    many, idle = (6, 3.0) if here.quick else (MANY, IDLE)
    stage = here.stage()
    agent = stage.with_agent('[limits]\nactive_threads = "5%"\n[turn]\ntime_limit = "never"\n', server="shared")
    stage.until(lambda: agent.api.status()["devices"][0]["seen"], "the first look is over")
    time.sleep(2)
    took, shares = shares_of(stage, lambda: time.sleep(idle))
    out.say(f"while nothing happens for {took:.0f} s mpsagent uses {in_words(shares)}")
    _look(out)
    _beside_nvidia_smi(here, out, stage, agent)
    mark = agent.mark()
    inside: list[Client] = []
    others: list[Client] = []
    for number in range(many):
        stage.until(lambda: all(live(some) < AT_ONCE for some in (inside, others)), "earlier ones have ended")
        inside.append(stage.client(A, "sleep", SECONDS))
        others.append(stage.client(C if number % 2 else B, "sleep", SECONDS, CUDA_MPS_PIPE_DIRECTORY="/nonexistent"))
    kinds = (("inside", inside), ("outside", others))
    bad = [(where, client) for where, clients in kinds for client in clients if client.ended() != 0]
    out.check(not bad, f"{len(bad)} clients did not end well: {[f'{where} {c.text()[-400:]}' for where, c in bad[:4]]}")
    out.raw["bad"] = [f"{where} rc {client.rc}: {client.text()[-2000:]}" for where, client in bad]
    time.sleep(2 * LATE)
    _judge(here, out, agent, mark, inside, others)


def live(clients: list[Client]) -> int:
    return sum(client.rc is None for client in clients)


def _look(out: Out) -> None:
    """What is done every second while no GPU is opened: one number is read."""
    looks = 2000
    before = time.process_time()
    for _ in range(looks):
        if Path(COUNT).exists():
            Path(COUNT).read_bytes()
    each = (time.process_time() - before) / looks
    there = "there" if Path(COUNT).exists() else "not there"
    out.say(f"one look ({COUNT} is {there}): {1e6 * each:.1f} us, {100 * each:.4f} % of a core at one a second")
    out.check(each < MOST, f"a look takes {each:.6f} s")


def _judge(here: Here, out: Out, agent: Agent, mark: int, inside: list[Client], others: list[Client]) -> None:
    records = agent.found("outside_mps", since=mark)
    found = {int(one["pid"]): one for one in records}
    right = [one for one in others if one.pid in found]
    wrong = [one.pid for one in inside if one.pid in found]
    foreign = sorted(set(found) - {one.pid for one in (*inside, *others)})
    late = sorted(seconds_of(one) - float(one["began"]) for one in found.values() if one.get("began"))
    reasons = sorted({str(one.get("reason")) for one in found.values()})
    out.say(
        f"{len(right)} of {len(others)} programs of {SECONDS} s outside MPS found, {len(wrong)} wrongly, beside "
        f"{len(inside)} inside; not ours: {foreign}; reasons: {reasons}"
    )
    if late:
        out.say(f"from a program's start to its record: median {late[len(late) // 2]:.2f} s, most {late[-1]:.2f} s")
    out.check(len(right) == len(others), f"not found: {[one.text()[-200:] for one in others if one not in right][:5]}")
    out.check(not wrong, f"inside, and taken for outside: {[found[pid] for pid in wrong][:5]}")
    out.check(len(records) == len(found), f"{len(records)} records of {len(found)} programs")
    if not here.sim:
        out.check(not late or late[-1] <= LATE + 1, f"found after {late[-3:]} s")
    out.raw["late"] = late


# --- memory and compute mode ------------------------------------------------------------------------------------------


def _beside_nvidia_smi(here: Here, out: Out, stage: Stage, agent: Agent) -> None:
    """Two clients inside and one outside hold memory: by the agent and by nvidia-smi in the same moment."""
    held = {stage.client(A, "alloc", size, 60): size for size in (300, 1500)}
    held[stage.client(B, "alloc", 700, 60, CUDA_MPS_PIPE_DIRECTORY="/nonexistent")] = 700
    for client in held:
        client.saw("cuMemAlloc .* CUDA_SUCCESS")
    inside = [client.pid for client, size in held.items() if size != 700]
    held_by = {client.pid: size * MIB for client, size in held.items()}
    stage.until(
        lambda: sum((one.get("memory") or 0) >= held_by[one["pid"]] for one in listed(agent)) == len(inside),
        "the memory of both clients is known",
    )
    by_smi = _processes()
    clients = {int(one["pid"]): one for one in listed(agent)}
    device = agent.api.status()["devices"][0]
    metrics = _metrics(stage, agent)
    rows = out.table("Device memory (MiB)", "process", "it allocated", "mpsagent-cli clients", "nvidia-smi", "good")
    for client, size in held.items():
        ours = clients.get(client.pid, {}).get("memory")
        known = None if ours is None else round(ours / MIB)
        theirs = by_smi.get(client.pid)
        bypass = client.pid not in inside
        if bypass:
            record = next((one for one in agent.found("outside_mps") if one["pid"] == client.pid), None)
            known = None if record is None else round(record["memory"] / MIB)
        near = known is not None and (theirs is None or bypass or abs(known - theirs) <= NEAR)
        rows.append([f"{client.pid}{' outside' if bypass else ''}", size, known, theirs, "yes" if near else "NO"])
        out.check(near, f"memory of {client.pid}: allocated {size}, clients say {known}, nvidia-smi {theirs}")
    total = sum(clients[pid]["memory"] for pid in inside if pid in clients)
    out.check(metrics is not None and abs(metrics - total) <= NEAR * MIB, f"metrics say {metrics}, clients {total}")
    out.say(f"metrics: {0 if metrics is None else round(metrics / MIB)} MiB of the user, clients {round(total / MIB)}")
    mode = _smi("--query-gpu=index,compute_mode,name,memory.used", device=device["uuid"])
    out.say(f"compute mode: the agent reads {device['compute_mode']!r}, nvidia-smi {mode[:1]}")
    if mode:
        same = mode[0][1].lower().replace("_", "-") == str(device["compute_mode"])
        out.check(same, f"compute mode: {device['compute_mode']!r} and {mode[0]}")
        used = round((device["memory_used"] or 0) / MIB)
        out.say(f"memory in use: the agent {used} MiB (seen {device['seen']}), nvidia-smi {mode[0][3]} MiB")
    for client in held:
        client.kill()


PROCESS = re.compile(r"^\|\s+\d+\s+\S+\s+\S+\s+(\d+)\s+\S+\s.*?(\d+)MiB\s*\|", re.MULTILINE)


def _processes() -> dict[int, int]:
    """MiB by process in nvidia-smi's own table: its query for compute processes leaves out MPS's clients."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    text = subprocess.run([program], capture_output=True, text=True, timeout=30, check=False).stdout
    return {int(pid): int(size) for pid, size in PROCESS.findall(text)}


def _smi(query: str, device: str = "") -> list[list[str]]:
    """Rows of nvidia-smi; none where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, query, "--format=csv,noheader,nounits", *([f"--id={device}"] if device else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def _metrics(stage: Stage, agent: Agent) -> float | None:
    """Bytes of user A's clients."""
    text = stage.cli(agent, "metrics")[1]
    found = re.findall(rf'^mpsagent_client_memory_bytes{{[^}}]*"{A}"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return sum(map(float, found)) if found else None
