"""Parts of gate.py: frameworks at their limits, and clients in namespaces of their own."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import threading
import time

from campaigns.gate_place import TOLERANCE, Here, Out, all_of, exact, first, listed, own_start
from mpsagent.mps.units import multiprocessors_for_percent
from tests.conformance import rig as rigs
from tests.scenes.stage import A, Agent, B, C, Client, D, Json, Stage, StageError

# --- frameworks -------------------------------------------------------------------------------------------------------

SHARES = f"""
[user.{A}]
active_threads = '60%'
memory_limit = "25%"
[user.{B}]
active_threads = '20%'
memory_limit = "8G"
[user.{C}]
active_threads = 26
memory_limit = "3333M"
[user.{D}]
active_threads = '20%'
memory_limit = "8G"
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
            command = [pythons[module], "-s", here.program("user_programs.py"), module]
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
    policy = (
        f'[limits]\nactive_threads = "40%"\nmemory_limit = "3333M"\n[user.{B}]\nactive_threads = "20%"\n'
        'memory_limit = "2G"\n'
    )
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
