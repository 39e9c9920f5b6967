"""``replay --policy``: the engine's own decisions over a recording. Times were worked out from the transcript."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest

from mpsagent.cli.log_as_gate import SHOWN, SHOWN_OF_USER, LogAsGate
from mpsagent.cli.replay import merged
from mpsagent.cli.would import Would
from mpsagent.core import inputs as inp
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Device
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.wire import link
from tests import recordings

DEVICE = Device(0, "GPU-0", "assumed", 143155 << 20, 132)
PROGRAM = str(Path(sys.executable).with_name("mpsagent-cli"))
T = 1_700_000_000.0


def fold(text: str) -> Would:
    policy, errors = load([("policy.toml", text)])
    assert policy is not None, errors
    return Would(policy, lambda uid: Identity(uid, f"u{uid}"), [DEVICE])


def would(text: str, name: str, *sections: str) -> list[dict[str, Any]]:
    one = fold(text)
    logs = recordings.logs(name, *sections)
    for event in merged(io.BytesIO(logs.control), io.BytesIO(logs.server), UTC):
        one.feed(event)
    return one.finish()


def times(actions: list[dict[str, Any]], kind: str, **fields: Any) -> list[str]:
    wanted = [a for a in actions if a["action"] == kind and all(a.get(key) == value for key, value in fields.items())]
    return [a["at"][11:23] for a in wanted]


def test_a_turn_ends_when_the_policy_says() -> None:
    """Recording 01, S5 and S6: 1002 waits from 46.746 for 1001's server 716; after 3 s and 1 s of grace it is over."""
    actions = would('[switch]\nafter = "3s"\ngrace = "1s"\n', "01")
    assert "23:56:49.746" in times(actions, "turn.warning", uid=1001)
    assert times(actions, "TerminateClient", pid=710) == ["23:56:50.746"]
    assert {a["rule"] for a in actions if a["action"] == "TerminateClient"} == {"switch.after"}
    ended = next(a for a in actions if a["action"] == "TerminateClient" and a["pid"] == 710)
    assert ended["sentence"] == "asked MPS to end client 710 of u1001: the turn of u1001 is over"


def test_a_server_is_told_to_make_way_when_its_last_client_leaves() -> None:
    """Recording 01, S5: 665 leaves at 34.525 while 1002 waits; left to itself its server stayed until 34.867."""
    actions = would('[switch]\nafter = "1h"\n', "01")
    assert times(actions, "ShutdownServer", server=608, force=False) == ["23:56:34.525"]
    assert times(actions, "TerminateClient") == []


def test_a_user_is_let_in_when_the_way_is_free() -> None:
    """Recording 01, S4: 606 of user 1001 comes at 21.865, and the server of the user before exits 92 ms later."""
    actions = would("[limits]\nthreads = 50\n[user.1002]\nthreads = 20\n", "01")
    tables = [(a["at"][11:23], a["admissions"]["users"]) for a in actions if a["action"] == "SetAdmissions"]
    assert ("23:56:21.957", [1001]) in tables


def test_a_leftover_in_a_fault_is_signalled_and_never_terminated() -> None:
    """Recording 03, Q4: 633 ignores its error from 42.92; `terminate_client` there blocked the daemon for 28 s."""
    actions = would('[hang]\nfault = "5s"\nkill_grace = "2s"\n', "03", "Q3", "Q4")
    assert times(actions, "SignalClient", pid=633, signal=15) == ["00:09:07.924"]
    assert times(actions, "TerminateClient") == []


def test_who_is_denied_would_have_been_refused() -> None:
    """At the gate, with an error, at once."""
    actions = would('[user.u1002]\naccess = "deny"\n', "01")
    refused = [a for a in actions if a["action"] == "RefuseConnection"]
    assert refused
    assert {a["uid"] for a in refused} == {1002}
    assert all(1002 not in a["admissions"]["users"] for a in actions if a["action"] == "SetAdmissions")


@pytest.mark.parametrize("name", recordings.names())
def test_the_same_log_gives_the_same_actions_and_each_has_a_rule(name: str) -> None:
    """Decisions are replayable, and nothing is done without a reason."""
    text = '[limits]\nthreads = 30\nmemory = "25%"\n[switch]\nafter = "2s"\ngrace = "1s"\n'
    first = would(text, name)
    assert first == would(text, name)
    assert all(action["reason"] and action["rule"] for action in first)
    assert [a["at"] for a in first] == sorted(a["at"] for a in first)


def _crowd(users: int, each: int) -> list[ev.Line]:
    """One user at work while others come and wait."""
    found: list[ev.Line] = [
        ev.ControlStarted(T, 400, "/tmp/nvidia-mps/control"),
        ev.ClientQueued(T + 1, 10, 900),
        ev.ServerStarting(T + 1, 500, 900),
        ev.ServerReady(T + 2, 500),
        ev.ContextConnected(T + 2.1, 500, 10, 0),
        ev.ContextConnected(T + 2.1, 500, 10, 1),
    ]
    found += [ev.ClientQueued(T + 3 + n / 1e4, 1000 + n, 1000 + n % users) for n in range(users * each)]
    return found


@pytest.mark.parametrize(("users", "each"), [(1, 3000), (3000, 1)])
def test_work_grows_with_the_lines_and_not_with_the_queue(users: int, each: int) -> None:
    """20,000 waiting clients took 79 s: each line cost as much as there were waiting. Counted in what the engine is
    given, not in seconds: it never sees more than a few of them, whoever they are."""
    one = fold('[switch]\nafter = "1h"\n')
    most = 0
    for event in _crowd(users, each):
        one.feed(event)
        most = max(most, len(one._core.state.held))
    one.finish()
    assert 0 < most <= min(SHOWN, SHOWN_OF_USER * users)


def test_who_comes_later_takes_the_place_of_who_has_gone() -> None:
    """The few that the engine sees are the first ones; when these leave, the next are shown, in order."""
    one = fold('[switch]\nafter = "1h"\n')
    for event in _crowd(1, 30):
        one.feed(event)
    assert {held.peer.pid for held in one._core.state.held.values()} == set(range(1000, 1000 + SHOWN_OF_USER))
    for pid in range(1000, 1005):
        one.feed(ev.ClientDisconnected(T + 10 + pid / 1e6, 500, pid))
    one.finish()
    assert {held.peer.pid for held in one._core.state.held.values()} == set(range(1005, 1005 + SHOWN_OF_USER))


def test_who_waits_behind_another_users_crowd_is_seen() -> None:
    """A hundred of one user came first; the turn ends for the other one all the same."""
    one = fold('[switch]\nafter = "5s"\ngrace = "0s"\n')
    for event in _crowd(1, 0):
        one.feed(event)
    for pid in range(100):
        one.feed(ev.ClientQueued(T + 3, 1000 + pid, 900))
    one.feed(ev.ClientQueued(T + 4, 2000, 901))
    one.feed(ev.CommandRead(T + 100, "get_server_list"))
    assert times(one.finish(), "TerminateClient", pid=10) != []


def test_clients_that_mps_dropped_do_not_end_a_working_users_turn() -> None:
    """MPS drops a waiter after six failed starts (`Removed Shm file at`): it waits no more, so no turn ends for it."""
    one = fold('[switch]\nafter = "5s"\ngrace = "0s"\n')
    for event in _crowd(1, 1):
        one.feed(event)
    one.feed(ev.ServerStarting(T + 4, 501, 1000))
    one.feed(ev.SharedMemoryRemoved(T + 5, "/dev/shm/x"))
    one.feed(ev.CommandRead(T + 100, "get_server_list"))
    assert times(one.finish(), "TerminateClient") == []


def test_the_program_says_it_in_both_forms_and_refuses_a_bad_policy(tmp_path: Path) -> None:
    """JSON under ``would``; a table for people; exit 2 with the first mistake."""
    logs = recordings.logs("01")
    (tmp_path / "c").write_bytes(logs.control)
    (tmp_path / "s").write_bytes(logs.server)
    (tmp_path / "p").write_text('[switch]\nafter = "3s"\ngrace = "1s"\n')
    words = [PROGRAM, "replay", "--control", str(tmp_path / "c"), "--server", str(tmp_path / "s"), "--zone", "UTC"]
    done = subprocess.run(
        [*words, "--policy", str(tmp_path / "p"), "--json"], capture_output=True, text=True, timeout=60
    )
    assert times(json.loads(done.stdout)["would"], "TerminateClient", pid=710) == ["23:56:50.746"]
    done = subprocess.run([*words, "--policy", str(tmp_path / "p")], capture_output=True, text=True, timeout=60)
    assert "2026-11-20 23:56:50.746  asked MPS to end client 710" in done.stdout
    (tmp_path / "p").write_text("[switch]\nafter = soon\n")
    done = subprocess.run([*words, "--policy", str(tmp_path / "p")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "the policy is not valid" in done.stderr) == (2, True)


GATE, A, B = 900, 1001, 1002


def through_the_gate(server: int) -> list[ev.Line]:
    """The logs of a node of ours: the gate announces each connection by its own pid. Each of two users has a process,
    one after the other; ``server`` is the user of their server."""
    events: list[ev.Line] = [
        ev.ControlStarted(1.0, 10, "/s"),
        ev.ClientQueued(2.0, GATE, A),
        ev.ServerStarting(2.0, 20, server),
        ev.ServerReady(2.5, 20),
        ev.ContextConnected(2.51, 20, 101, 0),
        ev.ClientAdmitted(2.6, GATE, A),
        ev.ContextConnected(2.61, 20, 101, 1),
        ev.ClientDisconnected(5.0, 20, 101),
    ]
    if server:
        return [*events, ev.ServerExited(5.1, 20, 0), *_second(21)]
    return [*events, *_second(20)]


def _second(server: int) -> list[ev.Line]:
    fresh: list[ev.Line] = [ev.ServerStarting(7.0, server, B), ev.ServerReady(7.5, server)] if server == 21 else []
    return [
        ev.ClientQueued(7.0, GATE, B), *fresh, ev.ContextConnected(7.61, server, 102, 0),
        ev.ClientAdmitted(7.7, GATE, B), ev.ContextConnected(7.71, server, 102, 1),
        ev.ClientDisconnected(60.0, server, 102),
    ]  # fmt: skip


@pytest.mark.parametrize("server", [A, 0], ids=["own", "shared"])
def test_the_gate_is_no_client_of_its_own_nodes_logs(server: int) -> None:
    """It was one that waits, or works for ever: bob's work was ended for it, or it for his."""
    kind = "own" if server else "shared"
    one = fold(f'[instance.gpu]\nserver = "{kind}"\n[switch]\nafter = "1s"\ngrace = "0s"\n')
    for event in through_the_gate(server):
        one.feed(event)
    assert [a["sentence"] for a in one.finish() if a["action"] not in ("SetAdmissions", "turn.began")] == []


def test_who_has_a_user_there_is_whom_the_gate_announced() -> None:
    """A server for all says nothing of users."""
    gate, users = LogAsGate(), []
    for event in through_the_gate(0):
        said = [one for one in [*gate.before(event), *gate.after(event)] if isinstance(one, inp.GateSaid)]
        users += [one.peer[:2] for one in said if isinstance(one.what, link.Knock)]
    assert users == [(GATE, A), (101, A), (102, B)]


def test_one_who_waits_while_another_comes_before_its_own_line_is_no_gate() -> None:
    """server.log goes first on a tie."""
    gate, gone = LogAsGate(), []
    for event in (
        ev.ControlStarted(1.0, 10, "/s"),
        ev.ServerStarting(1.0, 20, A),
        ev.ClientQueued(2.0, 55, B),
        ev.ContextConnected(3.0, 20, 101, 0),
        ev.ClientAdmitted(3.0, 101, A),
        ev.ContextConnected(3.1, 20, 101, 1),
    ):
        said = [one.what for one in [*gate.before(event), *gate.after(event)] if isinstance(one, inp.GateSaid)]
        gone += [one for one in said if isinstance(one, link.Left)]
    assert gone == []
