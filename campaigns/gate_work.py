"""Parts of gate.py: work as people do it. Frameworks at their limits, throughput, the gap at a change of user."""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from campaigns.gate_place import TOLERANCE, Here, Out, all_of, first, listed, own_start
from mpsagent.mps.units import multiprocessors_for_percent
from tests.conformance import rig as rigs
from tests.scenes.stage import A, Agent, B, C, D, Json, Stage, StageError

# --- frameworks -------------------------------------------------------------------------------------------------------

SHARES = f"""
[user.{A}]
threads = 60
memory = "25%"
[user.{B}]
threads = 20
memory = "8G"
[user.{C}]
threads = {{ sms = 26 }}
memory = "3333M"
[user.{D}]
threads = 20
memory = "8G"
"""
FRAMEWORKS = {
    "PyTorch": ("torch", A, '60, "25%"', 60.0, {}),
    "JAX": ("jax", B, '20, "8G"', 20.0,
            {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}),
    "CuPy": ("cupy", C, '{ sms = 26 }, "3333M"', 20.0, {}),
    # Its own allocator takes memory in growing regions and stops at a share of what it sees: never more, often less.
    "JAX, own allocator": ("jax", D, '20, "8G"', 20.0, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
}  # fmt: skip
STEP = 64
OVERHEAD = 1500
"""MiB that a framework and its context may take of a limit before the first allocation."""


def frameworks(here: Here, out: Out) -> None:
    rows = out.table(
        "Frameworks behind the gate",
        *("framework", "server", "policy", "multiprocessors (right)", "framework says", "exec affinity", "limit (MiB)"),
        *("allocated in steps of 64", "free then", "limit - allocated - free", "plain client: free (bare MPS)", "good"),
    )
    pythons = {} if here.sim else {
        name: here.python_with(A, name) for name in ("torch", "jax", "cupy") if _has(here, out, name)
    }  # fmt: skip
    forms = ("own", "shared")
    stages = {form: here.stage() for form in forms}
    limits: dict[int, int] = {}
    for form, stage in stages.items():
        agent = stage.with_agent(SHARES, server=form)
        for uid in (A, B, C, D):
            own_start(stage, uid)
        limits |= {uid: limit_of(agent, uid) for uid in (A, B, C, D)}
    out.raw["limits (MiB)"] = limits
    plain = _bare(here, limits)
    out.raw["bare (multiprocessors, free MiB)"] = plain
    found: dict[tuple[str, str], Json] = {}

    def play(form: str) -> None:
        for number, names in enumerate((("PyTorch", "JAX", "CuPy"), ("JAX, own allocator",))):
            if number and form == "own":
                continue
            found.update({(form, name): one for name, one in _together(here, stages[form], names, pythons).items()})

    try:
        all_of([threading.Thread(target=play, args=(form,)) for form in forms])
    finally:
        for (form, name), one in sorted(found.items()):
            _, uid, policy, percent, _ = FRAMEWORKS[name]
            right = multiprocessors_for_percent(percent, here.machine.multiprocessors)
            _row(out, rows, (name, form, policy), one, right, limits[uid], plain[uid])
        for form in forms:
            for name in ("PyTorch", "JAX", "CuPy"):
                out.check((form, name) in found, f"{name} did not come to an end, server {form}")
        good = sum(row[-1] == "yes" for row in rows)
        out.raw["frameworks"] = {f"{form} {name}": one for (form, name), one in found.items()}
        out.say(
            f"{good} of {len(rows)} exact: "
            + "; ".join(f"{row[0]} ({row[1]}) {row[3]} SMs, {row[7]} MiB of {row[6]}" for row in rows)
        )


def _has(here: Here, out: Out, name: str) -> bool:
    try:
        here.python_with(A, name)
    except StageError as error:
        out.wrong(str(error))
        return False
    return True


def limit_of(agent: Agent, uid: int) -> int:
    """What the policy gives this user on device 0, in MiB."""
    answer = agent.api.get(f"/v1/policy/explain?user={uid}")
    found = re.search(r'"0": ?"?(\d{6,})', json.dumps(answer))
    if found is None:
        raise StageError(f"no memory limit in {answer}")
    return int(found[1]) >> 20


def _bare(here: Here, limits: dict[int, int]) -> dict[int, tuple[int, int]]:
    """(multiprocessors, free MiB) of a plain client with these limits on a bare MPS."""
    stage = here.stage()
    stage.without_agent("shared" if not here.sim else "own")
    found = {}
    for uid, percent in ((A, 60), (B, 20), (C, 20), (D, 20)):
        commands = [
            f"set_default_active_thread_percentage {percent}",
            f"set_default_device_pinned_mem_limit 0 {limits[uid]}M",
        ]
        for server in stage.rig.ctl("get_server_list", quiet=True).out.split():
            commands += [
                f"set_active_thread_percentage {server} {percent}",
                f"set_device_pinned_mem_limit {server} 0 {limits[uid]}M",
            ]
        stage.rig.ctl("\n".join(commands))
        client = stage.client(uid)
        client.ended()
        found[uid] = client.seen() or (0, 0)
    stage.kill_daemons()
    return found


def _together(here: Here, stage: Stage, names: tuple[str, ...], pythons: dict[str, str]) -> dict[str, Json]:
    """All at once; the turns come one after the other. What each said, and what the agent says of it."""
    started: dict[str, rigs.Started] = {}
    found: dict[str, Json] = {}
    beside: dict[str, threading.Thread] = {}
    for name in names:
        module, uid, _, _, extra = FRAMEWORKS[name]
        if here.sim:
            beside[name] = threading.Thread(target=lambda n=name, u=uid: found.update({n: _on_the_simulator(stage, u)}))
            beside[name].start()
        elif module in pythons:
            here.program("cuda_client.py")
            command = [pythons[module], "-s", here.program("gate_programs.py"), module]
            started[name] = stage.rig.run(command, uid=uid, env=here.environment(stage, uid, extra))
    told: dict[int, Json] = {}
    end = time.monotonic() + 75
    while time.monotonic() < end and any(one.process.poll() is None for one in started.values()):
        for client in listed(stage.agents[-1]):
            if client["limits"] is not None:
                told[client["pid"]] = {key: client[key] for key in ("uid", "limits", "state", "fail_safe")}
        time.sleep(0.3)
    for name, one in started.items():
        text = one.read()
        if (match := re.search(r"^RESULT (.*)$", text, re.M)) is None:
            found[name] = {
                "error": f"rc {one.process.poll()} {text[-300:]} {one.err.read_text(errors='replace')[-1500:]}"
            }
            one.process.kill()
        else:
            found[name] = {**json.loads(match[1]), "agent says": told.get(one.process.pid)}
    for thread in beside.values():
        thread.join(60)
    # What a plain client of each user sees now, behind the same gate.
    for name in names:
        _, plain = own_start(stage, FRAMEWORKS[name][1])
        found.setdefault(name, {})["plain"] = plain.seen()
    return found


def _on_the_simulator(stage: Stage, uid: int) -> Json:
    one = stage.client(uid)
    one.ended()
    sms, free = one.seen() or (0, 0)
    some, more = stage.client(uid, "alloc", free // STEP * STEP), stage.client(uid, "alloc", free + STEP)
    full = some.ended() == 0 and more.ended() == 13
    view = {"sms": sms, "affinity": None, "free": free % STEP}
    return {
        "before": view,
        "after": view,
        "allocated": free // STEP * STEP,
        "out_of_memory": full,
        "framework_sms": None,
    }


def _row(
    out: Out,
    rows: list[list[object]],
    what: tuple[str, str, str],
    one: Json,
    right: int,
    limit: int,
    plain: tuple[int, int],
) -> None:
    if "error" in one:
        out.wrong(f"{what}: {one['error']}")
        rows.append(
            [what[0], what[1], what[2], "-", "-", "-", limit, "-", "-", "-", f"{one.get('plain')} ({plain})", "NO"]
        )
        return
    allocated, left, before = one["allocated"], one["after"]["free"], one["before"]
    rest = limit - allocated - left
    seen = one["plain"] or (0, 0)
    own = "own allocator" in what[0]
    good = (
        before["sms"] == right == seen[0] == plain[0] and abs(seen[1] - plain[1]) <= TOLERANCE and one["out_of_memory"]
        and ((0 <= rest <= OVERHEAD and left < STEP + 2) or (own and 0 < allocated <= limit))
    )  # fmt: skip
    out.check(good, f"{what}: {one}")
    rows.append([
        what[0], what[1], what[2], f"{before['sms']} ({right})", one["framework_sms"], before["affinity"], limit,
        allocated, left, rest, f"{seen[1]} ({plain[1]})", "yes" if good else "NO",
    ])  # fmt: skip


# --- throughput -------------------------------------------------------------------------------------------------------

PROCESSES = (1, 4, 8)
AIM = 0.99


@dataclass
class Arm:
    """Eight processes that serve pictures when told to."""

    stage: Stage
    workers: list[tuple[rigs.Started, int]] = field(default_factory=list)

    def start(self, here: Here, command: list[str], count: int) -> None:
        for _ in range(count):
            reader, writer = os.pipe()
            env = here.environment(self.stage, A)
            self.workers.append((self.stage.rig.run(command, stdin_from=reader, uid=A, env=env), writer))
            os.close(reader)

    def ready(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        for one, _ in self.workers:
            while "READY" not in one.read():
                if one.process.poll() is not None or time.monotonic() > end:
                    raise StageError(
                        f"a worker is not ready: {one.process.poll()} {one.err.read_text(errors='replace')[-2000:]}"
                    )
                time.sleep(0.05)

    def serve(self, count: int, seconds: float, cores: list[int]) -> float:
        """Pictures in a second, of `count` processes together."""
        workers = self.workers[:count]
        had = [one.read().count("DONE") for one, _ in workers]
        for (_, writer), core in zip(workers, cores, strict=False):
            os.write(writer, f"go {seconds} {core}\n".encode())
        total, end = 0.0, time.monotonic() + seconds + 30
        for (one, _), before in zip(workers, had, strict=True):
            while len(done := re.findall(r"DONE (\d+) ([\d.]+)\n", one.read())) <= before:
                if one.process.poll() is not None or time.monotonic() > end:
                    raise StageError(f"a worker ended: {one.err.read_text(errors='replace')[-2000:]}")
                time.sleep(0.01)
            total += int(done[-1][0]) / float(done[-1][1])
        return total

    def end(self) -> None:
        for one, writer in self.workers:
            with contextlib.suppress(OSError):
                os.write(writer, b"end\n")
            os.close(writer)
            rigs.exited(one.process, 10)


def throughput(here: Here, out: Out) -> None:
    title = "ResNet-50, half precision, batches of 16, eager PyTorch: images/s"
    rows = out.table(title, "processes", "pair", "behind the gate", "bare daemon", "ratio")
    counts = (1, 2) if here.quick and here.sim else PROCESSES
    if here.sim:
        command = [rigs.other_users_python(A), "-S", here.program("gate_programs.py"), "stand-in"]
    else:
        command = [here.python_with(A, "torch"), "-s", here.program("gate_programs.py"), "resnet"]
    gated, bare = Arm(here.stage()), Arm(here.stage())
    gated.stage.with_agent("[limits]\nthreads = 100\n")
    bare.stage.without_agent()
    cores = sorted(os.sched_getaffinity(0))
    cores = (cores[::2] + cores[1::2]) * 8
    try:
        for arm in (gated, bare):
            arm.start(here, command, max(counts))
        for arm in (gated, bare):
            arm.ready(90)
        inside = [one["pid"] for one in listed(gated.stage.agents[-1]) if one["state"] == "running"]
        if not here.sim:
            out.check(
                len(inside) == max(counts),
                f"{len(inside)} of {max(counts)} workers are listed as running behind the gate",
            )
        slot = 0.5 if here.quick else 1.5
        for arm in (gated, bare):
            arm.serve(max(counts), slot, cores)  # clocks and caches
        ratios: dict[int, list[float]] = {count: [] for count in counts}
        for pair in range(1 if here.quick else 3):
            for count in counts:
                order = (gated, bare, bare, gated) if pair % 2 == 0 else (bare, gated, gated, bare)
                got: dict[int, float] = {id(gated): 0.0, id(bare): 0.0}
                for arm in order:
                    got[id(arm)] += arm.serve(count, slot, cores) / 2
                ratios[count].append(got[id(gated)] / got[id(bare)])
                rows.append([count, pair + 1, round(got[id(gated)], 1), round(got[id(bare)], 1), ratios[count][-1]])
        for count, values in ratios.items():
            middle = statistics.median(values)
            out.say(
                f"{count} processes: ratio {middle:.4f} (pairs {', '.join(f'{one:.4f}' for one in values)}), aim {AIM}"
            )
            if not here.sim:
                out.check(middle >= AIM, f"{count} processes: ratio {middle:.4f} is below {AIM}")
        out.raw["ratios"] = ratios
    finally:
        for arm in (gated, bare):
            arm.end()


# --- the gap at a change of user --------------------------------------------------------------------------------------

WITHIN = {"own": 0.25, "shared": 0.05}
LANES = ((3.0, 6.0), (10.0, 20.0))
ROUNDS = 3


class Quiet:
    """Who starts or ends when, so that no two starts and ends of different lanes meet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: list[tuple[float, float]] = []

    def take(self, hold: float, ends: bool) -> None:
        """Waits until a client that starts now and works for `hold` s disturbs nobody."""
        while True:
            with self._lock:
                now = time.monotonic()
                wanted = [(now, now + 0.7)]
                if ends:  # B's start, and the change itself
                    wanted += [(now + 0.3 + hold * 0.6, now + 0.9 + hold * 0.6), (now + hold, now + hold + 1.3)]
                if not any(a < d and c < b for a, b in wanted for c, d in self._taken):
                    self._taken += wanted
                    return
            time.sleep(0.05)


def gaps(here: Here, out: Out) -> None:
    holds = ((1.0, 1.5), (2.0, 3.0)) if here.quick else LANES
    found: dict[tuple[float, str], list[float]] = {}
    alone: dict[str, list[float]] = {}
    quiet = Quiet()
    stages: dict[tuple[str, int], Stage] = {}
    for lane in range(len(holds)):
        for form in ("shared", "own", "bare"):
            stages[form, lane] = stage = here.stage()
            if form == "bare":
                stage.without_agent()
            else:
                stage.with_agent("[limits]\nthreads = 100\n", server=form)
    for form in ("shared", "own", "bare"):
        stage = stages[form, 0]
        keeper = stage.client(B, "sleep", 60)
        first(keeper)
        for _ in range(3 if here.quick else 7):
            took, client = own_start(stage, B)
            if took is None:
                out.wrong(f"{form}: a client alone was not served: {client.text()}")
            else:
                alone.setdefault(form, []).append(took)
        keeper.kill()

    def lane_of(form: str, lane: int) -> None:
        stage = stages[form, lane]
        for hold in holds[lane]:
            rounds = 1 if here.quick or (form == "bare" and hold >= 20) else 2 if hold >= 20 else ROUNDS
            for _ in range(rounds):
                try:
                    found.setdefault((hold, form), []).append(_gap(stage, hold, quiet, form != "bare"))
                except Exception as error:
                    out.wrong(f"{form} after {hold:g} s: {str(error)[:1500]}")
                    return

    try:
        all_of([threading.Thread(target=lane_of, args=(form, lane)) for form, lane in stages])
    finally:
        _gap_tables(here, out, found, alone)


def _gap_tables(
    here: Here, out: Out, found: dict[tuple[float, str], list[float]], alone: dict[str, list[float]]
) -> None:
    rows = out.table(
        "From A's end to B's first result (s)",
        *("A works for (s)", "shared", "own", "bare MPS", "own start, server there (shared)"),
        *("shared - own start", "own - own start", "good"),
    )
    start = statistics.median(alone.get("shared", [0.0]))
    for hold in sorted({hold for hold, _ in found}):
        values = {form: found.get((hold, form), []) for form in ("shared", "own", "bare")}
        over = {form: statistics.median(values[form]) - start if values[form] else 99.0 for form in ("shared", "own")}
        good = all(over[form] <= WITHIN[form] for form in WITHIN)
        if not here.sim:
            out.check(good, f"after {hold:g} s: {over} over a client's own start of {start:.3f} s, aim {WITHIN}")
        rows.append([f"{hold:g}", *(_spread(values[form]) for form in ("shared", "own", "bare")), f"{start:.3f}",
                     over["shared"], over["own"], "yes" if good else "NO"])  # fmt: skip
        out.say(
            f"after {hold:g} s: " + ", ".join(f"{form} {_spread(values[form])}" for form in ("shared", "own", "bare"))
        )
    starts = out.table("A client's own start, its user's server there (s)", "form", "start to first result")
    starts += [[form, _spread(values)] for form, values in alone.items()]
    out.say(f"own start: {', '.join(f'{form} {_spread(values)}' for form, values in alone.items())}")
    out.raw |= {"gaps": {f"{hold:g} {form}": values for (hold, form), values in found.items()}, "alone": alone}


def _gap(stage: Stage, hold: float, quiet: Quiet, exact: bool) -> float:
    """A works for `hold` seconds, B comes after 60 % of it; seconds from A's end to B's first result."""
    quiet.take(hold, exact)
    holder = stage.client(A, "sleep", hold)
    if first(holder) is None:
        raise StageError(f"the holder was not served: {holder.text()}")
    time.sleep(0.6 * hold)
    waiting = stage.client(B)
    waiting.queued()
    if holder.ended() != 0:
        raise StageError(f"the holder did not end well: {holder.rc} {holder.text()}")
    left = time.monotonic()
    served = first(waiting, 90)
    waiting.ended(10)
    if served is None:
        raise StageError(f"who waited was not served: {waiting.text()}\n{stage.last_words()[-3000:]}")
    time.sleep(0.2)
    return served - left


def _spread(values: list[Any]) -> str:
    if not values:
        return "-"
    middle = f"{statistics.median(values):.3f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.3f} to {max(values):.3f})"
