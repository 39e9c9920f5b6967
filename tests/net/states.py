"""The states that the net holds: each plays one, in fixed time, and says for whom `explain` is asked."""

from __future__ import annotations

from collections.abc import Callable

from mpsagent.core import inputs as inp
from mpsagent.core.outside import Ending, Facts, Outsider, Sighting
from mpsagent.mps import events as ev
from mpsagent.mps.limits import Limits
from mpsagent.policy.shares import Lease, Share
from mpsagent.policy.values import Percent
from mpsagent.wire import link
from tests.core.harness import ALICE, BOB, CAROL, DAVE, GIB, PATIENT, POLICY, Stage
from tests.core.test_pause import PAUSE
from tests.core.toy import Proc
from tests.net.machine import Instance, Machine, State

OWN, SHARED, TOGETHER, APART = (
    f"[instance.gpu]\n{keys}\n"
    for keys in (
        'sharing = "turns"\nserver_scope = "user"', 'sharing = "turns"\nserver_scope = "all"', 'sharing = "one-server"',
        'sharing = "per-user"',
    )
)  # fmt: skip
TWO = (
    '[instance.left]\nsharing = "turns"\ndevices = ["GPU-0"]\nusers = ["alice"]\n'
    '[instance.right]\nsharing = "turns"\ndevices = ["GPU-1"]\n'
)
STATES: dict[str, State] = {}
Played = tuple[Machine, str]


def state(play: State) -> State:
    STATES[play.__name__] = play
    return play


def up(text: str = POLICY + OWN, **how: bool) -> tuple[Machine, Instance]:
    machine = Machine(text, **how).up()
    return machine, machine.one


def one_works(text: str = POLICY + OWN, seconds: float = 5.0, **how: bool) -> tuple[Machine, Instance, Proc]:
    machine, one = up(text, **how)
    alice = one.client(ALICE)
    one.run(seconds)
    return machine, one, alice


def two(text: str = POLICY + OWN, seconds: float = 3.0, **how: bool) -> tuple[Machine, Instance, Proc, Proc]:
    """alice works, bob has waited for so long."""
    machine, one, alice = one_works(text, **how)
    bob = one.client(BOB)
    one.run(seconds)
    return machine, one, alice, bob


def server_of(stage: Stage) -> int:
    return next(iter(stage.mps.servers))


# --- nothing, and the start -------------------------------------------------------------------------------------------


@state
def idle() -> Played:
    return up()[0], "alice"


@state
def starting() -> Played:
    """The agent decides, and neither the gate nor the control daemon is there yet."""
    machine = Machine(POLICY + OWN)
    machine.one.start_agent()
    machine.one.cut_link()
    return machine, "alice"


@state
def gate_away() -> Played:
    machine, one, _, _ = two()
    one.conditions.set("gate", "the gate is not connected: it ended", one.now, "it comes back by itself")
    one.cut_link()
    return machine.run(2), "bob"


@state
def agent_just_restarted() -> Played:
    machine, one, _, _ = two()
    one.kill_agent()
    one.run(2)
    one.start_agent()
    return machine.run(0.5), "alice"


@state
def gate_began_anew() -> Played:
    machine, one, _, _ = two(POLICY + SHARED)
    one.cut_link()
    one.run(1)
    one.gate.pid = 61
    one.connect()
    return machine.run(0.5), "bob"


# --- turns ------------------------------------------------------------------------------------------------------------


@state
def one_client_own() -> Played:
    return one_works()[0], "alice"


@state
def one_client_shared() -> Played:
    return one_works(POLICY + SHARED)[0], "alice"


@state
def server_starts() -> Played:
    """The first client is being handed over."""
    return one_works(seconds=0.05)[0], "alice"


@state
def turn_contested_own() -> Played:
    machine, one, _, _ = two()
    one.client(ALICE)
    one.run(0.5)
    for uid in (CAROL, BOB):
        one.client(uid)
    return machine.run(1), "bob"


@state
def turn_contested_shared() -> Played:
    return two(POLICY + SHARED)[0], "alice"


@state
def turn_warned() -> Played:
    return two(seconds=12)[0], "alice"


@state
def turn_warned_by_signal() -> Played:
    """At which alice's program ends."""
    return two(POLICY.replace("[turn]", '[turn]\nwarning_signal = "SIGUSR1"') + OWN, 12)[0], "bob"


@state
def turn_ending() -> Played:
    machine, one = up()
    one.client(ALICE, stubborn=True, stays=True)
    one.run(5)
    one.client(BOB)
    return machine.run(15.5), "alice"


@state
def turn_over_by_time() -> Played:
    return two(seconds=20)[0], "bob"


@state
def turn_quits() -> Played:
    return two(POLICY.replace("[turn]", '[turn]\non_expiry = "restart-mps"') + SHARED, 15.2)[0], "bob"


@state
def turn_changes_hands() -> Played:
    """The server of the user before makes way."""
    machine, one, alice, _ = two()
    one.ends(alice)
    return machine.run(0.04), "bob"


@state
def turn_changed_hands() -> Played:
    machine, one, alice, _ = two()
    one.ends(alice)
    return machine.run(2), "bob"


@state
def turn_without_end() -> Played:
    return two(POLICY.replace('"10s"', '"never"') + OWN, 30)[0], "bob"


@state
def turn_exempt() -> Played:
    return two(POLICY.replace("[user.bob]", "turn.never_preempt = true\n[user.bob]") + OWN, 30)[0], "bob"


@state
def turn_not_enforced() -> Played:
    return two(POLICY.replace("[user.alice]", "[user.alice]\nmode = 'report'") + OWN, 30)[0], "alice"


@state
def max_clients() -> Played:
    """A user's second process waits for the first."""
    machine, one = up(POLICY.replace("active_threads = '50%'", "active_threads = '50%'\nmax_clients = 1") + OWN)
    for uid in (ALICE, ALICE, BOB):
        one.client(uid)
        one.run(1)
    return machine, "alice"


@state
def by_rank() -> Played:
    text = POLICY.replace("active_threads = '20%'", "active_threads = '20%'\nqueue_priority = 5")
    machine, one = up(text + OWN)
    for uid in (ALICE, CAROL, BOB, DAVE):
        one.client(uid)
        one.run(1)
    return machine, "bob"


@state
def observed_only() -> Played:
    """`mode = 'report'`: all users work at once, whatever the policy says."""
    return two("mode = 'report'\n" + POLICY + OWN, 20)[0], "bob"


# --- pauses -----------------------------------------------------------------------------------------------------------


@state
def paused() -> Played:
    return two(PAUSE + SHARED, 22, pausing=True)[0], "alice"


@state
def pausing() -> Played:
    machine, one = up(PAUSE + SHARED, pausing=True)
    one.client(ALICE, freezes=False)
    one.run(25)
    one.client(BOB)
    return machine.run(4), "alice"


@state
def not_pausable() -> Played:
    """It did not stop: the turn ends otherwise."""
    machine, one = up(PAUSE + SHARED, pausing=True)
    one.client(ALICE, freezes=False)
    one.run(25)
    one.client(BOB)
    return machine.run(13), "alice"


@state
def pause_without_room() -> Played:
    machine, one, alice = one_works(PAUSE + SHARED + '[user.bob]\nmemory_limit = "60G"\n', 25, pausing=True)
    one.client(BOB)
    one.ask_gpus(**{f"p{alice.pid}": 100 * GIB})
    return machine.run(5), "bob"


# --- together and apart -----------------------------------------------------------------------------------------------


@state
def together() -> Played:
    machine, one = up(POLICY + TOGETHER)
    procs = [one.client(uid) for uid in (ALICE, BOB, BOB, CAROL)]
    one.run(3)
    one.ask_gpus(**{f"p{proc.pid}": GIB * (n + 1) for n, proc in enumerate(procs)})
    return machine.run(1), "bob"


@state
def full_server() -> Played:
    machine, one = up(PATIENT + TOGETHER)
    for uid in (ALICE, BOB, CAROL, ALICE, BOB):
        one.client(uid, contexts=12)
    return machine.run(30), "bob"


@state
def max_contexts() -> Played:
    machine, one = up(PATIENT.replace("[limits]", "[limits]\nmax_contexts = 2") + TOGETHER)
    for uid in (ALICE, ALICE, ALICE, BOB):
        one.client(uid)
    return machine.run(5), "alice"


@state
def apart_idle() -> Played:
    return up(POLICY + APART)[0], "alice"


@state
def apart_works() -> Played:
    machine, one = up(POLICY + APART)
    one.client(ALICE)
    return machine.run(5), "alice"


@state
def apart_held() -> Played:
    """There is no room for a further control daemon."""
    machine, one = up(POLICY + APART + "max_users = 1\n")
    one.client(ALICE)
    one.run(1)
    one.client(BOB)
    return machine.run(3), "bob"


@state
def sharing_changed() -> Played:
    """Another form of server takes effect when those at work have ended."""
    machine, one, _, _ = two(POLICY + OWN)
    one.reload(POLICY + TOGETHER)
    return machine.run(1), "bob"


# --- who gets what ----------------------------------------------------------------------------------------------------


@state
def denied() -> Played:
    machine, one = up(POLICY.replace("[user.bob]", '[user.bob]\naccess = "deny"') + OWN)
    one.client(BOB)
    return machine.run(1), "bob"


@state
def unknown_names() -> Played:
    machine, one = up()
    one.know(ALICE)
    one.client(ALICE)
    one.run(1)
    one.client(BOB)
    return machine.run(5), "bob"


@state
def no_such_user() -> Played:
    return up()[0], "mallory"


@state
def policy_error() -> Played:
    machine, _, _ = one_works()
    machine.reject('[limits]\nactive_threads = "150%"\n[user.bob]\nmemroy = "4G"\n')
    return machine, "alice"


@state
def leases() -> Played:
    machine, one = up(PATIENT + TOGETHER)
    share = Share("lease 1", Percent(30.0))
    lease = Lease(1, share, one.now, one.now + 60, 0, uid=ALICE, cgroup="/slurm/job_17", name="slurm-17")
    one.feed(inp.LeaseOrdered(one.now, lease))
    one.client(ALICE, cgroup="/slurm/job_17/step_0")
    one.client(ALICE, cgroup="/slurm/job_18")
    return machine.run(3), "alice"


@state
def over_limits() -> Played:
    machine, one, alice = one_works(PATIENT + OWN)
    one.lifts = {alice.pid: inp.Lifts(alice.start, memory="0=80G")}
    one.run(2)
    one.ask_gpus(**{f"p{alice.pid}": 30 * GIB})
    return machine.run(1), "alice"


@state
def over_limits_ended() -> Played:
    machine, one, alice = one_works(PATIENT + OWN)
    for _ in range(6):
        one.ask_gpus(**{f"p{alice.pid}": 30 * GIB})
        one.run(2)
    return machine, "alice"


@state
def fail_safe() -> Played:
    """MPS does not confirm a user's limits."""
    machine, one, _ = one_works()
    one._from_gate(inp.GateSaid(one.now, link.Unconfirmed(ALICE, Limits(), "MPS printed 19G for 20G")))
    return machine.run(1), "alice"


@state
def relayed() -> Played:
    machine, one, alice = one_works(PATIENT + SHARED)
    one.relayed(ALICE, alice)
    return machine.run(2), "alice"


@state
def relayed_by_another() -> Played:
    """It came through alice's process in her turn, and ends."""
    machine, one, alice = one_works(PATIENT + SHARED)
    one.relayed(BOB, alice)
    return machine.run(2), "bob"


@state
def outside() -> Played:
    machine, one, _ = one_works()
    seen = Sighting(77, 5, BOB, "GPU-0", 3 * GIB)
    facts = Facts("python train.py", one.now - 60, "", None)
    why = "it has no CUDA_MPS_PIPE_DIRECTORY, and MPS is not in /tmp/nvidia-mps"
    ending = Outsider(seen._replace(pid=78), facts, one.now - 5, why, Ending(one.now + 55))
    one.computes_outside(Outsider(seen, facts, one.now - 50, why), ending)
    return machine, "bob"


@state
def foreign_lines() -> Played:
    """Lines of a log that no gate's word bears out, one that is not known, and a front-end."""
    machine, one, _ = one_works(PATIENT + SHARED)
    server = server_of(one)
    one.forge(ev.ContextConnected(one.now, server, 77, 1), ev.ClientDisconnected(one.now, server, 78))
    one._from_gate(inp.GateSaid(one.now, link.FrontEnd(90, BOB, "quit", one.now, True)))
    one._from_gate(inp.GateSaid(one.now, link.Refused(9, 91, BOB, "too many connections")))
    return machine.run(1), "alice"


@state
def handshake_unknown() -> Played:
    machine, one, _ = one_works()
    one._from_gate(inp.GateSaid(one.now, link.HandshakeSeen(False, "00ff")))
    return machine.run(1), "alice"


@state
def several_instances() -> Played:
    machine, one = up(POLICY + TWO)
    one.client(ALICE)
    machine.played[1].client(BOB)
    machine.run(2)
    machine.played[1].client(CAROL)
    return machine.run(2), "carol"


@state
def placing() -> Played:
    """By load: who comes next goes where nobody is."""
    text = POLICY + TWO.replace('users = ["alice"]\n', "") + '[agent]\nplacement = "least-loaded"\n'
    machine, one = up(text)
    one.client(ALICE)
    return machine.run(2), "dave"


# --- what ends clients ------------------------------------------------------------------------------------------------


def ordered(seconds: float) -> Played:
    """A person ends a client that ignores everything."""
    machine, one = up(PATIENT + SHARED)
    alice = one.client(ALICE, stubborn=True, stays=True)
    one.run(3)
    one.unkillable = True
    one.feed(inp.EndOrdered(one.now, alice.pid, 0, False))
    return machine.run(seconds), "alice"


@state
def ladder_asked() -> Played:
    return ordered(0.005)


@state
def ladder_sigterm() -> Played:
    return ordered(1)


@state
def ladder_sigkill() -> Played:
    return ordered(6)


@state
def ladder_unkillable() -> Played:
    return ordered(120)


@state
def fault() -> Played:
    machine, one = up(PATIENT + TOGETHER)
    one.client(ALICE, stubborn=True)
    one.client(BOB, stays=True)
    one.run(3)
    one.mps.fault(one.mps.servers[server_of(one)])
    one.run(0.5)
    one.client(CAROL)
    return machine.run(0.5), "carol"


@state
def fault_over() -> Played:
    machine, one, _ = one_works(PATIENT + TOGETHER)
    one.mps.fault(one.mps.servers[server_of(one)])
    one.client(BOB)
    return machine.run(40), "bob"


@state
def server_stopped() -> Played:
    machine, one, _ = one_works(PATIENT + OWN)
    one.mps.servers[server_of(one)].stopped = True
    one.client(BOB)
    return machine.run(1.5), "bob"


@state
def hang_resumed() -> Played:
    machine, one, _ = one_works(PATIENT + OWN)
    one.mps.servers[server_of(one)].stopped = True
    return machine.run(one.policy.hang_control + 2), "alice"


@state
def hang_killed() -> Played:
    """Neither daemon nor server go on: they are killed, and a new daemon serves who waits."""
    machine, one, _, _ = two(PATIENT + SHARED)
    one.mps.never_resumes = one.mps.stopped = True
    return machine.run(60), "bob"


@state
def daemon_silent() -> Played:
    machine, one, _, _ = two(PATIENT + SHARED)
    one.feed(inp.DaemonSilent(one.now, True))
    return machine.run(2), "bob"


@state
def daemon_crashed() -> Played:
    machine, one, _, _ = two()
    one.crash_control()
    return machine.run(0.03), "bob"


@state
def daemon_failed() -> Played:
    """It does not start: who waits is refused."""
    machine, one, _ = one_works()
    one.start_fails = True
    one.crash_control()
    one.client(BOB)
    return machine.run(300), "bob"


@state
def servers_do_not_start() -> Played:
    machine, one = up()
    one.mps.can_start = False
    one.client(ALICE)
    return machine.run(1), "alice"


@state
def handover_failed() -> Played:
    machine, one = up(PATIENT + SHARED)
    one.client(ALICE)
    one.run(0.5)
    one._from_gate(inp.GateSaid(one.now, link.Failed(7, 100, ALICE, "it hung up", "acknowledgement", True)))
    return machine.run(1), "alice"


# --- people -----------------------------------------------------------------------------------------------------------


@state
def drain() -> Played:
    machine, one, _, _ = two()
    one.feed(inp.DrainOrdered(one.now, one.now, None))
    return machine.run(2), "bob"


@state
def drain_with_an_end() -> Played:
    machine, one, _, _ = two(POLICY + SHARED)
    one.feed(inp.DrainOrdered(one.now, one.now, one.now + 60))
    return machine.run(2), "alice"


@state
def drained() -> Played:
    machine, one, alice, _ = two()
    one.feed(inp.DrainOrdered(one.now, one.now, None))
    one.ends(alice)
    return machine.run(5), "bob"


@state
def restart_ordered() -> Played:
    machine, one, _, _ = two(POLICY + SHARED)
    one.feed(inp.DrainOrdered(one.now, one.now, one.now + 30, True))
    return machine.run(2), "bob"


@state
def restarted() -> Played:
    machine, one, _, _ = two(POLICY + SHARED)
    one.feed(inp.RestartOrdered(one.now, 0))
    return machine.run(20), "bob"


WIRED: dict[str, Callable[[], Played]] = {
    name: STATES[name] for name in (
        "one_client_own", "turn_changed_hands", "paused", "max_contexts", "denied", "leases", "relayed",
        "fail_safe", "foreign_lines", "handshake_unknown", "handover_failed", "gate_began_anew",
        "agent_just_restarted", "fault_over", "drained",
    )
}  # fmt: skip
"""Those of whom what gate and agent said to each other is kept, too."""
