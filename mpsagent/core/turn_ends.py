"""How a turn ends that the policy ends: its user is paused, or each client goes by the ladder, or the daemon quits."""

from __future__ import annotations

import signal
from dataclasses import replace

from mpsagent.core import actions as act
from mpsagent.core import transitions as tr
from mpsagent.core.model import Client
from mpsagent.core.pause import may_freeze
from mpsagent.core.rule import EndClient
from mpsagent.core.turn_memory import Memory, over
from mpsagent.core.view import Turn, View

AGAIN = 20.0
"""Seconds until a ``quit`` that was not heard of again is repeated: more than any deadline of the front-end."""
FREEZE = 10.0
"""Seconds in which all processes of a user have to stand; then the turn ends as ``switch.otherwise`` says."""

Present = tuple[Memory, list[act.Action], list[EndClient], list[tr.Transition], list[float]]
"""What becomes of the present turn; at the end when to look again."""


def warnings(view: View, uid: int, clients: tuple[Client, ...], reason: str, left: float) -> list[act.Action]:
    """What the user's programs see of the warning, ``left`` seconds before the end: a signal to each client, at which
    training scripts save; and what the hook tells whom it likes."""
    rules, program = view.rules(uid), view.policy.warning_hook
    clients = tuple(one for one in clients if one.detached is None)
    found: list[act.Action] = []
    if rules.switch_warning_signal != "none":
        number, rule = signal.Signals[rules.switch_warning_signal], rules.origin("switch.warning_signal").key
        for one in clients:
            why = f"{reason}; {number.name} to client {one.pid} of user {uid}"
            found.append(
                act.SignalClient(pid=one.pid, start=one.peer.start, uid=uid, signal=int(number), reason=why, rule=rule)
            )
    if program is not None:
        told: dict[str, object] = {"uid": uid, "pids": [one.pid for one in clients], "seconds": left, "reason": reason}
        deadline = view.policy.hook_deadline
        found.append(act.RunHook(program=program, subject=told, deadline=deadline, reason=reason, rule="hooks.warning"))
    return found


def pausing(view: View, memory: Memory, turn: Turn, clients: tuple[Client, ...], now: float) -> Present:
    """The user is shut out first, so that no process is frozen in the middle of its hand-over; then all are frozen;
    then the turn is over."""
    uid = turn.uid
    rest = {other: at for other, at in memory.suspended.items() if other != uid}
    goes_on = replace(memory, turn=replace(turn, pausing=None), closing=False, suspended=rest)
    if not view.may_pause(uid) or not view.others() or view.faulted(now)[0]:
        return goes_on, [], [], [], []
    if uid not in memory.suspended:
        if not may_freeze(view, uid):
            return replace(memory, closing=True), [], [], [], []
        memory = replace(memory, suspended={**memory.suspended, uid: now})
    if all(c.frozen is not None or c.detached is not None for c in clients):
        memory, told = over(view, memory, now, behind=True)
        memory = replace(memory, suspended={**memory.suspended, uid: now})
        return memory, [], [], [*told, tr.UserPaused(now, uid, len(clients))], []
    due = memory.suspended[uid] + FREEZE
    if now < due:
        return memory, [], [], [], [due]
    late = [str(c.pid) for c in clients if c.frozen is None]
    reason = f"the processes of user {uid} are not paused: {', '.join(late)} did not stop within {FREEZE:.0f} s"
    report = act.Report(
        kind="turn.not_paused", reason=reason, rule=view.rules(uid).origin("switch.action").key, uid=uid
    )
    assert goes_on.turn is not None
    return replace(goes_on, turn=replace(goes_on.turn, unpausable=True)), [report], [], [], []


def ending(view: View, memory: Memory, turn: Turn, clients: tuple[Client, ...], now: float) -> Present:
    """Each client on the ladder. After ``hang.terminate`` those who were not asked yet are signalled, if only clients
    of the same user are there: they all go."""
    assert turn.ending is not None
    rules, policy = view.rules(turn.uid), view.policy
    if not rules.enforce_switch:
        return replace(memory, turn=replace(turn, ending=None)), [], [], [], []
    rule = rules.origin("switch.after").key
    due = turn.ending + policy.hang_terminate + (policy.hook_deadline if rules.before_end_hook else 0.0)
    control = view.state.control if view.control_alive else None
    # Once another daemon runs, the clients of the one that quit are leftovers.
    same = control is not None and (memory.quit is None or memory.quit[0] == control.pid)
    quits_all = rules.forced_end == "quit" and not memory.suspended  # who is paused is not to pay for it
    if quits_all and control is not None and same:
        quits, at = _quit(view, memory, turn, now)
        return replace(memory, quit=(control.pid, now)) if quits else memory, quits, [], [], [at]
    alone = len(view.state.users()) <= 1
    late = (now >= due and alone) or quits_all
    requests = [
        EndClient(
            pid=c.pid, start=c.peer.start, uid=c.uid, reason=f"the turn of user {turn.uid} is over", rule=rule,
            section="switch", hook=True, signals_only=late,
        )
        for c in clients
    ]  # fmt: skip
    return memory, [], requests, [], [due] if now < due else []


def _quit(view: View, memory: Memory, turn: Turn, now: float) -> tuple[list[act.Action], float]:
    """``quit -t N`` once; who waits is held at the gate meanwhile."""
    rules, control = view.rules(turn.uid), view.state.control
    timeout = max(1, round(rules.kill_grace))
    again = float("-inf") if memory.quit is None else memory.quit[1] + timeout + AGAIN
    if control is None or control.quitting is not None or now < again:
        return [], max(again, now + 1.0)
    reason = f"the turn of user {turn.uid} is over; waiting users are held meanwhile"
    action = act.QuitControl(timeout=timeout, reason=reason, rule=rules.origin("switch.action").key)
    return [action], now + timeout + AGAIN
