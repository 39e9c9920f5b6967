"""A reason that comes from a key of the policy names the key, its file and its line."""

from __future__ import annotations

import pytest

from mpsagent.core import inputs as inp
from mpsagent.core.waiting import waiting
from mpsagent.policy.identity import Identity
from mpsagent.policy.shares import Lease, Share
from tests.core.harness import ALICE, BOB, CAROL, DAVE, Stage

POLICY = """\
[limits]
active_threads = "10%"
memory_limit = "2G"
[user.alice]
max_clients = 1
[user.bob]
total_active_threads = "10%"
[user.carol]
access = "deny"
[cgroup."/few"]
max_clients = 1
[turn]
time_limit = "never"
"""


def reasons(stage: Stage, uid: int) -> list[str]:
    assert stage.core is not None
    return [one.why.text for one in waiting(stage.core.view(), stage.now) if one.uid == uid]


@pytest.mark.parametrize(
    ("text", "uid", "cgroup", "place"),
    [
        (POLICY, ALICE, None, "this user may have 1 process at a time (user.alice.max_clients, policy.toml:5)"),
        (POLICY, BOB, None, "the next process needs 10 (user.bob.total_active_threads, policy.toml:7)"),
        (
            POLICY.replace('total_active_threads = "10%"', 'total_memory_limit = "3G"'),
            BOB,
            None,
            "the next process needs 2G (user.bob.total_memory_limit, policy.toml:7)",
        ),
        (
            POLICY.replace("max_clients = 1\n[user.bob]", "max_contexts = 1\n[user.bob]"),
            ALICE,
            None,
            "(user.alice.max_contexts, policy.toml:5)",
        ),
        (
            POLICY.replace('"/few"', '"/jobs/*"'),
            DAVE,
            "/jobs/1",
            'cgroup /jobs/1 may have 1 process at a time (cgroup."/jobs/*".max_clients, policy.toml:10)',
        ),
    ],
)
def test_the_reason_of_a_bound_names_its_key_and_line(text: str, uid: int, cgroup: str | None, place: str) -> None:
    stage = Stage(text, together=True).up()
    stage.client(uid, cgroup=cgroup)
    stage.run(1)
    stage.client(uid, cgroup=cgroup)
    stage.run(1)
    (why,) = reasons(stage, uid)
    assert place in why


def test_the_reason_of_a_lease_names_its_number() -> None:
    stage = Stage(POLICY, together=True).up()
    share = Share("lease 3", job="slurm-17", max_clients=1)
    stage.feed(inp.LeaseOrdered(stage.now, Lease(3, share, 0.0, 1e12, 0, uid=DAVE, name="slurm-17")))
    for _ in range(2):
        stage.client(DAVE)
        stage.run(1)
    (why,) = reasons(stage, DAVE)
    assert "job slurm-17 may have 1 process at a time (lease 3)" in why


def test_a_total_in_which_no_process_fits_names_its_key_and_line() -> None:
    groups = "[group.large]\nactive_threads = '45%'\n[group.small]\ntotal_active_threads = '30%'\n"
    stage = Stage(POLICY + groups, together=True)
    stage.identities[DAVE] = Identity(DAVE, "dave", ("large", "small"))
    stage.up().client(DAVE)
    stage.run(1)
    (why,) = reasons(stage, DAVE)
    assert why == (
        "no process of this user fits in its total (group.small.total_active_threads, policy.toml:17): "
        "run mpsagent-cli policy check"
    )


def test_a_denial_names_its_key_and_line() -> None:
    stage = Stage(POLICY, together=True).up()
    stage.client(CAROL)
    stage.run(1)
    assert stage.refused == [CAROL]
    (why,) = {one.reason for _, one in stage.done if "deny" in one.reason and "process" not in one.reason}
    assert why == f'access = "deny" in the policy for user {CAROL} (user.carol.access, policy.toml:9)'
