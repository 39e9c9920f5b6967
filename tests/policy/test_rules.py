"""Which value applies to whom, and what it comes to on the devices there are."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mpsagent.gate.queue import MOST_HELD
from mpsagent.mps import units
from mpsagent.mps.limits import Device, Limits
from mpsagent.policy import parse
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.origins import PolicyError
from mpsagent.policy.policy import REMEMBERED, Origin, Policy, Rules
from mpsagent.policy.shares import Share
from mpsagent.policy.values import Percent
from tests.policies import policy

GIB = units.GIB
H200 = Device(0, "GPU-3d07cd2a-6e14-11b8-c643-07a1e14ae7bc", "NVIDIA H200", 139 * GIB, 132)
SMALL = Device(1, "GPU-513e171f-4520-0894-ba89-06b9f5c1d7b8", "NVIDIA A2", 16 * GIB, 10)
ALICE = Identity(1001, "alice", ("users", "students", "staff"))
BOB = Identity(1002, "bob", ("users",))


def test_without_any_file_the_defaults_hold() -> None:
    """A node where nobody has written a policy is shared in turns and not limited."""
    rules = policy().rules(BOB)
    assert rules.limits([H200]) == Limits(100.0, {})
    assert (rules.switch_after, rules.switch_grace, rules.switch_action) == (1800.0, 30.0, "terminate")
    assert (rules.max_clients, rules.max_runtime, rules.idle_timeout, rules.switch_exempt) == (None, None, None, False)
    assert rules.enforce
    assert rules.origin("active_threads") == Origin("limits.active_threads", "", 0)
    assert rules.origin("turn.time_limit") == Origin("turn.time_limit", "", 0)
    assert policy().fail_safe([H200]) == Limits(100.0, {})


ORDER = """
[limits]
active_threads = '50%'
memory_limit = "20G"
max_clients = 3
[group.staff]
active_threads = '70%'
turn.time_limit = "2h"
[group.students]
active_threads = '20%'
memory_limit = "4G"
turn.time_limit = "10m"
turn.grace = "5s"
[user.alice]
max_clients = 9
[user.1001]
max_clients = 7
turn.never_preempt = true
"""


def test_user_before_group_before_everybody_key_by_key() -> None:
    """The one rule that an administrator has to keep in mind; each key finds its own level."""
    rules = policy(ORDER).rules(ALICE)
    assert rules.max_clients == 9, "by name before by uid"
    assert rules.switch_exempt is True, "what the name's section lacks comes from the uid's"
    assert rules.threads == Percent(70.0), "the first group in the file wins, not the first of the user"
    assert rules.switch_after == 7200.0
    assert rules.switch_grace == 5.0, "a key that the first group lacks comes from the second"
    assert rules.limits([H200]).memory == {0: 4 * GIB}
    assert policy(ORDER).rules(BOB).limits([H200]) == Limits(50.0, {0: 20 * GIB})
    assert rules.origin("active_threads") == Origin("group.staff.active_threads", "0.toml", 7)
    assert rules.origin("turn.never_preempt") == Origin("user.1001.turn.never_preempt", "0.toml", 18)


def test_a_user_without_a_name_is_found_by_uid() -> None:
    """Containers and name services that are down: MPS knows uids only."""
    assert policy(ORDER).rules(Identity(1001)).max_clients == 7


def test_a_name_is_not_taken_for_a_uid() -> None:
    """A user who is called like another's number must not get that section by name and the other by uid."""
    made = policy("[user.1001]\nactive_threads = '5%'\n")
    assert made.rules(Identity(2000, "bob")).threads == Percent(100.0)
    assert made.rules(Identity(1001, "alice")).threads == Percent(5.0)


def test_the_later_file_wins_key_by_key() -> None:
    """policy.d exists so that one can change a value without touching the file that another program manages."""
    made = policy(
        '[limits]\nactive_threads = "50%"\nmemory_limit = "20G"\n[user.alice]\nactive_threads = "60%"\n',
        "[limits]\nactive_threads = '40%'\n[user.alice]\nmax_clients = 2\n",
    )
    rules = made.rules(ALICE)
    assert (rules.threads, rules.max_clients) == (Percent(60.0), 2)
    assert made.rules(BOB).limits([H200]) == Limits(40.0, {0: 20 * GIB})
    assert made.rules(BOB).origin("active_threads") == Origin("limits.active_threads", "1.toml", 2)
    assert made.sources == ("0.toml", "1.toml")


def test_group_order_is_that_of_the_first_mention() -> None:
    """A later file that adds a key to a group does not change which group comes first."""
    made = policy(
        "[group.staff]\nactive_threads = '70%'\n[group.students]\nactive_threads = '20%'\n",
        "[group.students]\nactive_threads = '30%'\nmax_clients = 2\n",
    )
    rules = made.rules(ALICE)
    assert (rules.threads, rules.max_clients) == (Percent(70.0), 2)


@pytest.mark.parametrize(
    ("written", "devices", "percent"),
    [
        ('"100%"', [H200], 100.0),
        ('"12.75%"', [H200], 12.7),  # MPS would make 12.8 of it, which is more than written
        ('"16.1%"', [H200], 16.1),
        ('"0.1%"', [H200], 0.1),
        ("26", [H200], 19.7),
        ("27", [H200], 19.7),
        ("500", [H200], 100.0),
        ("26", [SMALL], 100.0),
        ("8", [H200, SMALL], 6.1),  # 80 % would be right for the small one and 105 for the other
        ("26", [], 0.1),  # unknown devices: too little can be corrected, too much cannot
        ("{ clients = 4 }", [H200], 25.0),
        ('{ clients = 3, rule = "even" }', [H200], 33.3),
        ('{ clients = 6, rule = "even" }', [H200], 16.6),  # 16.7 six times is more than 100
        ('{ clients = 8, rule = "double" }', [H200], 25.0),
        ('{ clients = 1, rule = "double" }', [H200], 100.0),
    ],
)
def test_threads_as_written_and_as_mps_takes_them(written: str, devices: list[Device], percent: float) -> None:
    """Every way of writing a share, with the rounding towards less."""
    assert policy(f"[limits]\nactive_threads = {written}\n").rules(BOB).limits(devices).threads == percent


@pytest.mark.parametrize("present", [2, 10, 16, 80, 84, 108, 114, 132, 142, 148])
def test_a_number_of_multiprocessors_is_never_exceeded(present: int) -> None:
    """A number is for people who count: on no GPU may a client see more than n, or than MPS gives anyway."""
    device = Device(0, "GPU-x", "", 0, present)
    for count in range(2, present + 3):
        percent = policy(f"[limits]\nactive_threads = {count}\n").rules(BOB).limits([device]).threads
        assert units.multiprocessors_for_percent(percent, present) <= max(count, units.least(present))
        assert units.multiprocessors_for_percent(percent, present) >= min(count, present) - count % 2


def test_weights_are_shares_of_their_sum() -> None:
    """3 : 2 : 1 and one for everybody else."""
    made = policy(
        "[limits]\nactive_threads = { weight = 1 }\n[group.a]\nactive_threads = { weight = 3 }\n"
        "[group.b]\nactive_threads = { weight = 2 }\n[user.carol]\nactive_threads = '40%'\n"
    )
    assert made.rules(Identity(1, "x", ("a",))).limits([H200]).threads == 50.0
    assert made.rules(Identity(2, "y", ("b",))).limits([H200]).threads == 33.3
    assert made.rules(Identity(3, "z")).limits([H200]).threads == 16.6
    assert made.rules(Identity(4, "carol")).limits([H200]).threads == 40.0


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('"20G"', {0: 20 * GIB, 1: 20 * GIB}),
        ('"1.5G"', {0: 1536 << 20, 1: 1536 << 20}),
        ('"1500000K"', {0: 1464 << 20, 1: 1464 << 20}),  # whole MiB, downwards
        ('"25%"', {0: 35584 << 20, 1: 4 * GIB}),
        ('"0.1%"', {0: 142 << 20, 1: 16 << 20}),
        ('"100%"', {}),
        ('{ 0 = "4G" }', {0: 4 * GIB}),
        ('{ 1 = "50%" }', {1: 8 * GIB}),
        ('{ GPU-513e171f-4520-0894-ba89-06b9f5c1d7b8 = "1G", 1 = "2G" }', {1: GIB}),
        ('{ GPU-513E171F-4520-0894-BA89-06B9F5C1D7B8 = "1G" }', {1: GIB}),
        ('{ GPU-ffffffff-0000-0000-0000-000000000000 = "1G" }', {}),
    ],
)
def test_memory_as_written_and_in_bytes(written: str, expected: dict[int, int]) -> None:
    """Every way of writing a memory limit, on a large and a small device."""
    assert policy(f"[limits]\nmemory_limit = {written}\n").rules(BOB).limits([H200, SMALL]).memory == expected


def test_memory_is_looked_up_for_each_device() -> None:
    """A user's table for one device must not silently take everybody's limit away on the others."""
    rules = policy('[limits]\nmemory_limit = "4G"\n[user.bob]\nmemory_limit = { 0 = "30G" }\n').rules(BOB)
    assert rules.limits([H200, SMALL]).memory == {0: 30 * GIB, 1: 4 * GIB}
    devices = rules.explain([H200, SMALL])["memory_limit"]["devices"]
    assert [devices[d]["from"]["key"] for d in ("0", "1")] == ["user.bob.memory_limit.0", "limits.memory_limit"]


def test_no_limit_for_one_user_under_a_limit_for_all() -> None:
    """ "100%" is how one writes an exception; it must not fall through to everybody's limit."""
    rules = policy('[limits]\nmemory_limit = "4G"\n[user.bob]\nmemory_limit = "100%"\n').rules(BOB)
    assert rules.limits([H200]).memory == {}


def test_memory_tables_of_two_files_are_joined_by_device() -> None:
    """Key by key holds for devices too; one value for all of them replaces what was said before."""
    first = '[limits]\nmemory_limit = { 0 = "1G", 1 = "2G" }\n'
    assert policy(first, '[limits]\nmemory_limit = { 1 = "3G" }\n').rules(BOB).limits([H200, SMALL]).memory == {
        0: GIB,
        1: 3 * GIB,
    }
    assert policy(first, '[limits]\nmemory_limit = "5G"\n').rules(BOB).limits([H200]).memory == {0: 5 * GIB}


def test_the_fail_safe_limits_are_the_least_of_everything() -> None:
    """What a client gets whose own limits cannot be confirmed: never more than the policy gives it."""
    made = policy(
        '[limits]\nactive_threads = "80%"\n[group.a]\nactive_threads = "30%"\nmemory_limit = { 1 = "2G" }\n'
        '[user.u]\nmemory_limit = "10G"\n'
        '[user.v]\nmemory_limit = "100%"\n'
    )
    assert made.fail_safe([H200, SMALL]) == Limits(30.0, {0: 10 * GIB, 1: 2 * GIB})


def test_the_lower_client_priority_is_of_users_and_of_the_fail_safe_limits() -> None:
    made = policy('[limits]\nactive_threads = "80%"\n[user.bob]\nclient_priority = "below-normal"\n')
    assert made.rules(BOB).limits([H200]) == Limits(80.0, {}, below_normal=True)
    assert made.rules(BOB).limits_within(Share("job", Percent(5.0)), [H200]) == Limits(5.0, {}, below_normal=True)
    assert Share("job", Percent(5.0)).lower(made.fail_safe([H200]), [H200]) == Limits(5.0, {}, below_normal=True)
    again = policy('[limits]\nclient_priority = "below-normal"\n[user.bob]\nclient_priority = "normal"\n')
    assert not again.rules(BOB).limits([H200]).below_normal
    assert again.fail_safe([H200]).below_normal


def test_over_limits_is_of_users_groups_and_everybody() -> None:
    assert policy("").rules(BOB).over_limits == "terminate-memory"
    made = policy('[limits]\non_limit_exceeded = "terminate"\n[group.students]\non_limit_exceeded = "report"\n')
    assert [made.rules(one).over_limits for one in (ALICE, BOB)] == ["report", "terminate"]
    assert made.rules(ALICE).origin("on_limit_exceeded") == Origin("group.students.on_limit_exceeded", "0.toml", 4)


def test_times_may_be_never_again_for_one_user() -> None:
    """Without a word for "no such limit" a limit for everybody could not have exceptions."""
    text = '[limits]\nmax_runtime = "1h"\n[turn]\ntime_limit = "10m"\n'
    text += '[user.bob]\nmax_runtime = "never"\nturn.time_limit = "never"\n'
    rules = policy(text).rules(BOB)
    assert (rules.max_runtime, rules.switch_after) == (None, None)
    assert rules.origin("max_runtime").line == 6
    assert policy(text).rules(ALICE).max_runtime == 3600.0


@pytest.mark.parametrize(
    ("text", "enforced"),
    [
        ("", True),
        ("mode = 'report'\n[user.bob]\nmode = 'enforce'\n", False),
        ("[user.bob]\nmode = 'report'\n", False),
        ("[group.users]\nmode = 'report'\n[user.bob]\nmode = 'enforce'\n", True),
    ],
)
def test_where_only_reporting_reaches(text: str, enforced: bool) -> None:
    """A trial must never act, and one that is over must act again. The mode at the top has precedence."""
    assert policy(text).rules(BOB).enforce is enforced


ACCESS = """
[limits]
access = "deny"
[group.staff]
active_threads = '70%'
[group.students]
access = "allow"
[user.mallory]
access = "deny"
[user.1002]
access = "allow"
"""


def test_access_is_looked_up_like_every_other_key() -> None:
    """A list of those who may use the GPU, with an exception in each direction."""
    made = policy(ACCESS)
    assert policy().rules(BOB).access == "allow"
    assert made.rules(ALICE).access == "allow", "her second group says so, her first one nothing"
    assert made.rules(Identity(1003, "carol", ("staff",))).access == "deny"
    assert made.rules(Identity(1004, "mallory", ("students",))).access == "deny"
    assert made.rules(BOB).access == "allow", "by uid"
    assert made.rules(Identity(1005)).access == "deny", "a uid whose name is not known is in no group"
    assert made.rules(ALICE).origin("access") == Origin("group.students.access", "0.toml", 7)
    assert made.rules(Identity(1005)).explain([])["access"]["value"] == "deny"
    assert policy().rules(BOB).origin("access") == Origin("limits.access")


def test_agent_settings() -> None:
    """Everything that is not about a user."""
    made = policy(
        '[timeouts]\ncontrol_daemon = "3s"\nserver = "20s"\nsigkill_delay = "0s"\n'
        '[hooks]\npre_terminate = "/bin//true"\ntimeout = "1s"\n'
        '[instance.gpu0]\ndevices = ["GPU-1"]\ncompute_mode = "exclusive-process"\npipe_directory = "/run/mps/"\n'
        'sharing = "turns"\nserver_scope = "all"\n'
        '[agent]\non_stop = "quit"\nadmin_group = "wheel"\n'
    )
    assert (made.hang_control, made.hang_server) == (3.0, 20.0)
    assert (made.kill_grace, made.rules(BOB).kill_grace, made.hang_fault) == (0.0, 0.0, 15.0)
    assert (made.before_end, made.rules(BOB).before_end_hook, made.hook_deadline) == ("/bin/true", "/bin/true", 1.0)
    assert (made.instance, made.devices, made.compute_mode) == ("gpu0", ("GPU-1",), "exclusive-process")
    assert made.pipe_directory == "/run/mps"
    assert (made.on_stop, made.admin_group) == ("quit", "wheel")
    assert made.server == "all"
    assert Policy().server == "user"
    assert policy("[instance.gpu7]\n").instance == "gpu7", "a name alone is enough"
    assert made.origin("instance.gpu0.compute_mode") == Origin("instance.gpu0.compute_mode", "0.toml", 10)
    assert made.origin("timeouts.fault_recovery") == Origin("timeouts.fault_recovery", "", 0)


def test_explain_is_json_and_names_every_source() -> None:
    """`policy explain` is what an administrator shows a user who complains."""
    answer = json.loads(json.dumps(policy(ORDER).rules(ALICE).explain([H200])))
    assert answer["user"] == "alice"
    assert answer["active_threads"] == {
        "value": 70.0,
        "written": "70%",
        "multiprocessors": {"0": 92},
        "from": {"key": "group.staff.active_threads", "file": "0.toml", "line": 7},
    }
    assert answer["memory_limit"]["value"] == {"0": 4 * GIB}
    assert answer["memory_limit"]["written"] == "4G"
    assert answer["turn.grace"] == {
        "value": 5.0,
        "from": {"key": "group.students.turn.grace", "file": "0.toml", "line": 13},
    }
    assert answer["timeouts.sigkill_delay"]["from"] == {"key": "timeouts.sigkill_delay", "file": "", "line": 0}
    everything = {
        "access",
        "active_threads",
        "memory_limit",
        "max_clients",
        "max_runtime",
        "idle_timeout",
        "timeouts.sigkill_delay",
        "hooks.pre_terminate",
        "mode",
    }
    everything |= {f"turn.{key}" for key in ("time_limit", "grace", "on_expiry", "never_preempt")}
    assert everything <= answer.keys()


def test_explain_without_devices_invents_no_percentage() -> None:
    """Offline, nobody knows how many multiprocessors there are."""
    answer = policy("[limits]\nactive_threads = 26\n").rules(BOB).explain([])
    assert answer["active_threads"]["value"] is None
    assert answer["active_threads"]["written"] == 26


def test_sections_are_json_in_the_order_of_the_files() -> None:
    """`policy show`: what is in force, and nothing that nobody has written."""
    sections = policy(
        '[limits]\nactive_threads = { weight = 2 }\nmemory_limit = { 0 = "1536M" }\n[user."j.d"]\n'
        'active_threads = "5%"\n'
    ).sections()
    assert list(sections) == ["limits.active_threads", "limits.memory_limit", 'user."j.d".active_threads']
    assert sections["limits.memory_limit"]["value"] == {"0": "1536M"}
    json.dumps(sections)


def test_the_digest_names_the_texts() -> None:
    """Two agents with one digest have one policy; a moved line is another text."""
    one = load([("a", "x"), ("b", "")])[0], policy("[limits]\n").digest, policy("[limits]\n\n").digest
    assert one[1] != one[2]
    assert policy("[limits]\n").digest == one[1]
    assert policy("[limits]\n", "").digest != one[1]


def test_rules_are_remembered_but_not_without_end() -> None:
    """They are asked for at every event; users who come and go must not fill the memory."""
    made = policy(ORDER)
    first = made.rules(ALICE)
    assert made.rules(ALICE) is first
    for uid in range(2 * REMEMBERED):
        made.rules(Identity(uid))
    assert len(made._remembered) <= REMEMBERED
    assert made.rules(ALICE) == first
    assert REMEMBERED > MOST_HELD, "who waits is asked about again and again, and each has to be remembered"


def test_users_of_whom_the_same_sections_speak_have_the_same_rules_but_for_the_name() -> None:
    """Thousands of uids may come (subordinate ids), and only a few sections are there to be looked through."""
    made = policy(ORDER)
    first = made.rules(Identity(5001))
    assert made.rules(Identity(5002)) == replace(first, who=Identity(5002))
    assert made.rules(Identity(5002)).origins is first.origins
    assert made.rules(Identity(1001)).origins is not first.origins, "there is a section for this uid"


def test_the_fail_safe_limits_follow_the_devices() -> None:
    """They are remembered, too: another set of devices, or the same with another size, has limits of its own."""
    made = policy('[limits]\nactive_threads = 8\nmemory_limit = "50%"\n')
    for count in range(1, 60):
        device = Device(0, "GPU-x", "", 2 * count * GIB, 132)
        assert made.fail_safe([device]) == Limits(6.1, {0: count * GIB})
    assert made.fail_safe([H200, SMALL]) == made.fail_safe((H200, SMALL)) == made._least((H200, SMALL))
    assert len(made._fail_safes) <= 16


def test_an_error_reads_as_one_line() -> None:
    """FILE:LINE: KEY: problem; hint. Editors and people both jump to it."""
    error = PolicyError("/etc/p.toml", 3, "limits.active_threads", "150 is more than 100", "write less")
    assert str(error) == "/etc/p.toml:3: limits.active_threads: 150 is more than 100; write less"
    assert str(PolicyError("/etc/p.toml", 0, "", "is too large", "")) == "/etc/p.toml: is too large"


def test_rules_can_be_made_by_hand() -> None:
    """Tests of decisions make their own rules; the built-in values are those of a policy without files."""
    assert Rules(BOB) == policy().rules(BOB)


def test_a_cgroup_has_between_1_and_512_characters() -> None:
    assert [parse.cgroup(text) for text in ("*", "x" * 512)] == ["*", "x" * 512]
    for text in ("", "x" * 513):
        with pytest.raises(parse.Wrong):
            parse.cgroup(text)
