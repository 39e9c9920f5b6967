"""What the verdict calls what: each word has a client that earns it, so that a run which fails can be seen to fail."""

from __future__ import annotations

import pytest

from tests.disorder.clients import Record
from tests.disorder.population import AFTER, GRACE, Deed, Machine, Population, populate
from tests.disorder.verdict import NEVER, Entitled, Verdict, judge

MACHINE = Machine(1, 132, 143155 << 20)
POPULATION = populate(7, MACHINE, clients=10, seconds=1, server="own")
FREE = next(user for user in POPULATION.users if not user.denied and user.max_clients is None)
OTHER = next(user for user in POPULATION.users if user not in (FREE,) and not user.denied and user.max_clients is None)
CAPPED = next(user for user in POPULATION.users if user.max_clients is not None)
DENIED = next(user for user in POPULATION.users if user.denied)
RIGHT = Entitled(26, 3000)


def client(
    kind: str, uid: int, said: list[tuple[float, str]], *, started: float = 0.0, rc: int | None = 0,
    signals: tuple[tuple[float, str], ...] = (), ended: float | None = None,
) -> Record:  # fmt: skip
    """A record whose lines are printed at these seconds after its start."""
    record = Record(next(NUMBERS), Deed(started, uid, kind), 100, started)
    record.lines = [(started + at, f"[{at:8.3f} pid 100 uid {uid}] {text}") for at, text in said]
    record.signals = list(signals)
    if rc is not None:
        record.rc, record.ended = rc, started + (said[-1][0] if said else 0.1) if ended is None else ended
    return record


NUMBERS = iter(range(100000))


def sees(at: float = 0.2, sms: int = 26, free: int = 3000) -> list[tuple[float, str]]:
    text = f"sms {sms} meminfo CUDA_SUCCESS free {free} MiB total 143155 MiB"
    return [(at - 0.1, "cuInit CUDA_SUCCESS"), (at - 0.01, "ctx CUDA_SUCCESS"), (at, text)]


def verdict(
    *records: Record, turns: bool = True, population: Population = POPULATION, logged: tuple[float, ...] = (),
    active: tuple[float, ...] = (), stalls: tuple[tuple[float, float], ...] = (),
) -> Verdict:  # fmt: skip
    entitled = {(user.uid, 0): RIGHT for user in population.users}
    return judge(
        records, population, MACHINE, entitled, turns=turns, logged=logged, active={100: active}, stalls=stalls
    )


def refused(error: str = "CUDA_ERROR_MPS_CONNECTION_FAILED") -> list[tuple[float, str]]:
    return [(0.2, f"cuInit {error}")]


@pytest.mark.parametrize(
    ("word", "record"),
    [
        ("exact", client("query", FREE.uid, sees())),
        ("exact", client("kill-idle", FREE.uid, sees(), rc=-9, signals=((0.3, "KILL"),))),
        ("over", client("query", FREE.uid, sees(sms=28))),
        ("over", client("query", FREE.uid, sees(free=3001))),
        ("over", client("alloc", FREE.uid, [*sees(), (0.3, "cuMemAlloc 3100 MiB: CUDA_SUCCESS")])),
        ("exact", client("alloc", FREE.uid, [*sees(), (0.3, "cuMemAlloc 3100 MiB: CUDA_ERROR_OUT_OF_MEMORY")], rc=13)),
        ("over", client("query", DENIED.uid, sees())),
        ("under", client("query", FREE.uid, sees(sms=24))),
        ("under", client("query", FREE.uid, sees(free=2999))),
        ("outside", client("query", FREE.uid, sees(sms=132, free=142047))),
        ("outside", client("query", FREE.uid, [*sees(), (0.21, "mps no")])),
        ("over", client("query", FREE.uid, [*sees(sms=132, free=142047), (0.21, "mps yes")])),
        ("refused", client("query", FREE.uid, refused(), rc=10)),
        ("refused", client("query", FREE.uid, [*sees()[:1], (0.2, "ctx CUDA_ERROR_MPS_SERVER_NOT_READY")], rc=12)),
        ("denied", client("query", DENIED.uid, refused(), rc=10)),
        ("died", client("kill-early", FREE.uid, [], rc=-9, signals=((0.1, "KILL"),))),
        ("stuck", client("query", FREE.uid, [], rc=None)),
        ("stuck", client("sleep", FREE.uid, sees(), rc=None)),
        ("harmed", client("sleep", FREE.uid, [*sees(), (0.4, "work now CUDA_ERROR_MPS_RPC_FAILURE")], rc=14)),
        ("harmed", client("sleep", FREE.uid, sees(), rc=-9)),
        ("broken", client("query", FREE.uid, [], rc=1)),
    ],
)
def test_each_word(word: str, record: Record) -> None:
    found = verdict(record)
    assert dict(found.counts) == {word: 1}
    assert found.good == (word not in NEVER)
    assert bool(found.sentences) == (word in NEVER)


def fault(at: float) -> Record:
    said = [*sees(), (at - 0.01, "oob launch cudaSuccess"), (at, "oob sync CUDA_ERROR_ILLEGAL_ADDRESS")]
    return client("fault", FREE.uid, said, rc=17)


def test_a_fault_excuses_its_neighbours_and_not_who_came_long_after() -> None:
    hit = client("sleep", FREE.uid, [*sees(), (1.0, "work now CUDA_ERROR_ILLEGAL_ADDRESS")], rc=14)
    moment = client("query", FREE.uid, refused("CUDA_ERROR_MPS_SERVER_NOT_READY"), started=1.2, rc=10)
    late = client("query", FREE.uid, refused("CUDA_ERROR_MPS_SERVER_NOT_READY"), started=4.0, rc=10)
    after = client("sleep", FREE.uid, [*sees(), (1.0, "work now CUDA_ERROR_ILLEGAL_ADDRESS")], started=4.0, rc=14)
    found = verdict(fault(0.99), hit, moment, late, after)
    assert found.faults == 1
    assert dict(found.counts) == {"exact": 1, "hit": 1, "moment": 1, "refused": 1, "harmed": 1}


def test_with_an_instance_for_each_gpu_a_fault_excuses_nothing_on_the_other_and_users_work_at_once() -> None:
    def on(gpu: str, record: Record) -> Record:
        record.lines.insert(1, (record.started + 0.15, f"[0.15 pid 100 uid {record.deed.uid}] devices 1 using {gpu}"))
        return record

    def found(gpu: str, each: bool) -> Verdict:
        said = [*sees(), (0.5, "work now CUDA_ERROR_ILLEGAL_ADDRESS")]
        records = [on("GPU-0a", fault(0.99)), on(gpu, client("sleep", CAPPED.uid, said, started=0.5, rc=14))]
        entitled = {(user.uid, 0): RIGHT for user in POPULATION.users}
        return judge(records, POPULATION, MACHINE, entitled, turns=True, each=each)

    assert dict(found("GPU-0a", each=True).counts) == {"exact": 1, "hit": 1}
    assert dict(found("GPU-0b", each=True).counts) == {"exact": 1, "harmed": 1}
    assert dict(found("GPU-0b", each=False).counts) == {"exact": 1, "hit": 1}
    assert [found(gpu, each=True).together for gpu in ("GPU-0a", "GPU-0b")] == [1, 0]
    assert found("GPU-0b", each=False).together == 1


def test_a_fault_that_its_client_did_not_live_to_read_of_is_one() -> None:
    hit = client("sleep", FREE.uid, [*sees(), (1.0, "work now CUDA_ERROR_ILLEGAL_ADDRESS")], rc=14)
    ended = client("fault", FREE.uid, [*sees(), (0.9, "oob launch cudaSuccess")], rc=-15, ended=6.0)
    assert verdict(hit, ended, logged=(0.95,)).counts["hit"] == 2


def test_who_comes_between_a_fault_and_its_servers_notice_is_hit() -> None:
    killed = client("kill-kernel", FREE.uid, [*sees(), (0.3, "launch cudaSuccess")], rc=-9, signals=((0.5, "KILL"),))
    hit = client("work", FREE.uid, [*sees(), (0.25, "work now CUDA_ERROR_ILLEGAL_ADDRESS")], started=0.7, rc=14)
    assert verdict(killed, hit).counts["harmed"] == 1
    found = verdict(killed, hit, logged=(0.9,))
    assert (found.counts["hit"], found.counts["harmed"], found.faults) == (1, 0, 1)


def test_a_kill_with_a_kernel_in_flight_is_a_fault() -> None:
    killed = client("kill-kernel", FREE.uid, [*sees(), (0.3, "launch cudaSuccess")], rc=-9, signals=((0.5, "KILL"),))
    hit = client("spin", FREE.uid, [*sees(), (0.52, "sync CUDA_ERROR_ILLEGAL_ADDRESS after 0.2 s")], rc=16)
    assert verdict(killed, hit).counts["hit"] == 1
    assert verdict(hit).counts["harmed"] == 1


def test_the_fault_of_a_kill_with_a_kernel_in_flight_may_be_noticed_late_and_only_its_own() -> None:
    """Real MPS, 2026-11-22: the server calls the killed client disconnected, makes two contexts, and then it faults."""
    said = [(0.1, "cuInit CUDA_SUCCESS"), (1.5, "ctx CUDA_ERROR_LAUNCH_FAILED")]
    starting = client("query", FREE.uid, said, started=1.5, rc=12)
    killed = client("kill-kernel", FREE.uid, [*sees(), (0.3, "launch cudaSuccess")], rc=-9, signals=((0.5, "KILL"),))
    idle = client("kill-idle", FREE.uid, sees(), rc=-9, signals=((0.5, "KILL"),))
    assert verdict(killed, starting, logged=(2.8,)).counts["hit"] == 1
    assert verdict(idle, starting, logged=(2.8,)).counts["unexplained"] == 1


def test_the_fault_of_a_kill_with_a_kernel_in_flight_comes_later_while_its_server_makes_no_context() -> None:
    """H200 with seven servers at work, 2026-11-23, a daemon for each user: of 13 such kills 12 were faults after 0.2 to
    1.6 s, one after 10.4 s. Two clients that its server had taken meanwhile got no context."""

    def found(killed: Record, *others: Record) -> Verdict:
        waits = client("alloc", FREE.uid, [(7.0, "cuInit CUDA_SUCCESS")], rc=-15, ended=13.5)
        entitled = {(user.uid, 0): RIGHT for user in POPULATION.users}
        records = [killed, waits, *others]
        return judge(records, POPULATION, MACHINE, entitled, turns=False, logged=(10.9,), apart=True)

    def killed(uid: int, kind: str = "kill-kernel", last: str = "launch cudaSuccess") -> Record:
        return client(kind, uid, [*sees(), (0.3, last)], rc=-9, signals=((0.5, "KILL"),))

    assert dict(found(killed(FREE.uid)).counts) == {"exact": 1, "hit": 1}
    another = client("query", OTHER.uid, sees(), started=8.0)
    assert dict(found(killed(FREE.uid), another).counts) == {"exact": 2, "hit": 1}
    served = client("query", FREE.uid, sees(), started=8.0)
    for wrong in (
        found(killed(FREE.uid), served),  # the server has made a context: this fault has another cause
        found(killed(FREE.uid, "kill-idle", "work now CUDA_SUCCESS")),  # nothing was in flight
    ):
        assert wrong.counts["unexplained"] == 1
        assert "at 10.90 a server faulted" in wrong.sentences[0]
    assert found(killed(OTHER.uid)).counts["harmed"] == 1  # the kill was on another server


def test_a_fault_in_the_log_that_nothing_explains_is_no_excuse_and_is_told_apart() -> None:
    hit = client("sleep", FREE.uid, [*sees(), (1.0, "work now CUDA_ERROR_ILLEGAL_ADDRESS")], rc=14)
    said = [(0.1, "cuInit CUDA_SUCCESS"), (1.2, "ctx CUDA_ERROR_UNKNOWN")]
    starting = client("query", FREE.uid, said, rc=12)
    far = client("query", FREE.uid, [(0.1, "cuInit CUDA_SUCCESS"), (0.3, "ctx CUDA_ERROR_UNKNOWN")], started=5, rc=12)
    found = verdict(hit, starting, far, logged=(0.95,))
    assert dict(found.counts) == {"unexplained": 2, "refused": 1}
    assert not found.good
    assert "at 0.95 a server faulted" in found.sentences[0]
    explained = verdict(fault(0.9), hit, starting, logged=(0.95,))
    assert dict(explained.counts) == {"exact": 1, "hit": 2}
    assert explained.good


def test_kills_of_this_test_excuse_what_they_cut_and_an_agent_that_is_killed_excuses_nothing() -> None:
    said = [(0.1, "cuInit CUDA_SUCCESS"), (3.0, "ctx CUDA_ERROR_MPS_RPC_FAILURE")]

    def found(what: str) -> dict[str, int]:
        cut = client("query", FREE.uid, refused(), started=0.9, rc=10)
        between = client("query", FREE.uid, said, rc=12)
        hit = client("sleep", FREE.uid, [*sees(), (1.2, "work now CUDA_ERROR_MPS_RPC_FAILURE")], rc=14)
        crashed = client("query", FREE.uid, said[:1], rc=-6, ended=3.0)
        entitled = {(user.uid, 0): RIGHT for user in POPULATION.users}
        return dict(judge([cut, between, hit, crashed], POPULATION, MACHINE, entitled, kills=[(1.0, what)]).counts)

    assert found("daemon") == found("server") == {"cut": 1, "hit": 3}
    assert found("gate") == {"cut": 1, "refused": 1, "harmed": 1, "broken": 1}
    assert found("agent") == {"refused": 2, "harmed": 1, "broken": 1}


def test_a_hostage_excuses_the_neighbours_of_its_server() -> None:
    hostage = Record(next(NUMBERS), Deed(0.0, OTHER.uid, "hostage", guest=True), 100, 0.0)
    hostage.lines, hostage.rc, hostage.ended = [(2.0, "guest hostage: handed over")], 0, 5.0
    hit = client("sleep", FREE.uid, [*sees(), (5.5, "work now CUDA_ERROR_MPS_RPC_FAILURE")], rc=14)
    after = client("sleep", FREE.uid, [*sees(), (3.0, "work now CUDA_ERROR_MPS_RPC_FAILURE")], started=10.0, rc=14)
    assert dict(verdict(hostage, hit, after).counts) == {"hit": 1, "harmed": 1}


def test_a_turn_may_be_ended_only_when_another_user_has_waited_long_enough() -> None:
    long = [*sees(), (7.0, "work now CUDA_ERROR_MPS_CLIENT_TERMINATED")]
    ended = client("long", FREE.uid, long, rc=14)
    waiting = client("query", OTHER.uid, sees(at=5.2), started=2.0)
    too_young = client("query", OTHER.uid, sees(at=1.5), started=6.0)
    same_user = client("query", FREE.uid, sees(at=5.2), started=2.0)
    assert AFTER + GRACE <= 5.0
    assert verdict(ended, waiting).counts["turn"] == 1
    assert verdict(ended, too_young).counts["harmed"] == 1
    assert verdict(ended, same_user).counts["harmed"] == 1


def test_two_users_at_once_are_seen_and_a_stopped_start_is_not_mistaken_for_one() -> None:
    works = client("sleep", FREE.uid, [*sees(), (2.0, "done 9 iterations, last CUDA_SUCCESS")])
    beside = client("query", OTHER.uid, sees(), started=1.0)
    assert verdict(works, beside).together == 1
    assert not verdict(works, beside).good
    assert verdict(works, beside, turns=False).good
    # Stopped before its own clock began: its lines come 2 s later than their stamps say.
    stopped = client("stop-early", OTHER.uid, sees(), started=0.5)
    stopped.lines = [(at + 2.0, line) for at, line in stopped.lines]
    assert verdict(works, stopped).together == 0


def test_more_clients_at_once_than_a_user_may_have() -> None:
    assert CAPPED.max_clients is not None
    crowd = [
        client("sleep", CAPPED.uid, [*sees(at=0.2 + number / 10), (3.0, "done 9 iterations, last CUDA_SUCCESS")])
        for number in range(CAPPED.max_clients)
    ]
    assert verdict(*crowd).good
    crowd.append(client("query", CAPPED.uid, sees(at=1.5)))
    found = verdict(*crowd)
    assert found.capped
    assert not found.good


def test_a_wait_beyond_the_policy_and_a_front_end_without_an_answer() -> None:
    assert verdict(client("query", FREE.uid, sees(at=300.0))).late == 1
    assert verdict(client("query", FREE.uid, sees(at=20.0))).late == 0
    assert verdict(client("query", FREE.uid, sees(at=300.0)), active=(2.0,)).late == 0, "the driver was late"
    assert verdict(client("query", FREE.uid, sees(at=300.0)), active=(290.0,)).late == 1
    assert verdict(client("query", FREE.uid, sees(at=300.0)), stalls=((5.0, 150.0), (155.0, 299.0))).late == 0
    assert verdict(client("query", FREE.uid, sees(at=300.0)), stalls=((5.0, 150.0), (300.0, 500.0))).late == 1
    guest = Record(1, Deed(0.0, FREE.uid, "ps", guest=True), 100, 0.0, [(30.0, "guest ps: no answer in 30 s")], rc=0)
    guest.ended = 30.0
    assert verdict(guest).unanswered == 1


@pytest.mark.parametrize("seed", range(20))
def test_a_population_follows_from_its_seed(seed: int) -> None:
    """The same seed gives the same run; each way to write a share and a memory limit is in every policy."""
    first = populate(seed, MACHINE, clients=300, seconds=30, server="shared")
    assert first == populate(seed, MACHINE, clients=300, seconds=30, server="shared")
    assert first != populate(seed + 1, MACHINE, clients=300, seconds=30, server="shared")
    assert sum(not deed.guest for deed in first.deeds) == 300
    for words in (
        "active_threads = ",
        'rule = "even"',
        'rule = "double"',
        "weight =",
        '%"',
        'G"',
        'M"',
        "{ 0 =",
        "max_clients",
        "deny",
    ):
        assert words in first.policy, words


def test_what_a_user_is_entitled_to_is_what_the_policy_package_says() -> None:
    """Two ways to the same numbers: the words of the documentation here, the product's own reading there."""
    from mpsagent.mps.limits import Device
    from mpsagent.policy.files import load
    from mpsagent.policy.identity import Identity

    machine = Machine(2, 132, 143155 << 20)
    devices = [Device(n, f"GPU-{n}", "H200", machine.memory, machine.multiprocessors) for n in range(2)]
    for seed in range(30):
        population = populate(seed, machine, clients=5, seconds=1, server="own")
        policy, errors = load([("policy.toml", population.policy)])
        assert policy is not None, errors
        for user in population.users:
            if user.denied:
                continue
            given = policy.rules(Identity(user.uid, None)).limits(devices)
            assert given.threads == pytest.approx(user.percent)
            assert [given.memory[n] >> 20 for n in range(2)] == list(user.memory)


def test_a_client_that_is_stopped_when_its_server_is_killed_works_no_more() -> None:
    """It says so only when it goes on, and meanwhile another user is served."""
    stopped = client(
        "stop", FREE.uid, [*sees(), (3.0, "sync CUDA_ERROR_MPS_RPC_FAILURE")], rc=16,
        signals=((0.5, "STOP"), (2.9, "CONT")),
    )  # fmt: skip
    other = client("query", OTHER.uid, sees(), started=1.5)
    assert verdict(stopped, other).together == 1
    entitled = {(user.uid, 0): RIGHT for user in POPULATION.users}
    assert judge([stopped, other], POPULATION, MACHINE, entitled, kills=[(1.0, "server")]).together == 0
    assert judge([stopped, other], POPULATION, MACHINE, entitled, kills=[(1.0, "gate")]).together == 1


def test_a_client_that_is_stopped_on_its_way_out_works_no_more() -> None:
    """It has left MPS, so the next user is served; as a process it lives until it may go on."""
    leaves = client("stop-early", FREE.uid, sees(), signals=((0.5, "STOP"), (2.9, "CONT")))
    leaves.ended = 2.91
    other = client("query", OTHER.uid, sees(), started=1.5)
    assert verdict(leaves, other).together == 0
    leaves.ended, leaves.rc = None, None
    assert verdict(leaves, other).together == 1
