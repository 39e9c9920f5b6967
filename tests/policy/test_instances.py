"""Several instances in one policy: a policy for each, and what is wrong between them. Pure."""

from __future__ import annotations

import pytest

from mpsagent.mps.limits import Device
from mpsagent.policy import apart
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.instances import environment, instances, needs_devices, needs_modes, without_section
from mpsagent.policy.origins import PolicyError
from mpsagent.policy.plausible import in_itself
from mpsagent.policy.policy import Policy
from mpsagent.policy.sharing import exclusive, words
from mpsagent.policy.values import Percent
from mpsagent.system.directories import LONGEST_SOCKET_PATH
from tests.policies import policy

UUIDS = [f"GPU-{number:08x}-0000-0000-0000-000000000000" for number in range(3)]
MACHINE = tuple(Device(number, uuid, "a GPU", 80 << 30, 132) for number, uuid in enumerate(UUIDS))
TWO = f'[instance.a]\ndevices = ["{UUIDS[0]}"]\n[instance.b]\ndevices = ["{UUIDS[1]}"]\n'


def wrong(text: str) -> list[PolicyError]:
    found, errors = load([("p.toml", text)])
    assert found is None
    return errors


def made(text: str) -> dict[str, Policy]:
    return {one.instance: one for one in instances(policy(text), MACHINE)}


def test_without_a_section_there_is_one_instance_with_the_defaults() -> None:
    (one,) = instances(Policy(), ())
    assert (one.instance, one.log_directory, one.devices) == ("default", "/var/log/nvidia-mps", ())
    (one,) = instances(policy("[instance.x]\nserver_scope = 'all'\n"), ())
    assert (one.instance, one.server, one.log_directory) == ("x", "all", "/var/log/nvidia-mps")


def test_each_has_what_its_section_says_and_logs_of_its_own() -> None:
    found = made(TWO + 'server_scope = "all"\nlog_directory = "/var/log/b"\n')
    assert [one.devices for one in found.values()] == [(UUIDS[0],), (UUIDS[1],)]
    assert [one.server for one in found.values()] == ["user", "all"]
    assert [one.log_directory for one in found.values()] == ["/var/log/nvidia-mps/a", "/var/log/b"]


def test_limits_and_switch_of_an_instance_hold_there_for_everybody_and_nowhere_else() -> None:
    text = f"""
[limits]
active_threads = '50%'
memory_limit = "8G"
[turn]
time_limit = "10m"
[user.alice]
active_threads = '70%'
{TWO}
[instance.b.limits]
active_threads = '20%'
[instance.b.turn]
time_limit = "1m"
"""
    found = made(text)
    carol, alice = Identity(5, "carol"), Identity(6, "alice")
    assert found["a"].rules(carol).limits(MACHINE[:1]).threads == 50
    assert found["b"].rules(carol).limits(MACHINE[:1]).threads == 20
    assert [found[name].rules(alice).limits(MACHINE[:1]).threads for name in "ab"] == [70, 70]
    assert [found[name].rules(carol).switch_after for name in "ab"] == [600, 60]
    assert found["b"].rules(carol).origin("active_threads").key == "instance.b.limits.active_threads"
    assert [found[name].fail_safe(MACHINE[:1]).threads for name in "ab"] == [50, 20]
    assert found["b"].rules(carol).limits(MACHINE[:1]).memory == {0: 8 << 30}


def test_each_makes_an_instance_for_every_gpu_that_no_other_one_names() -> None:
    text = f'[instance.gpu]\ndevices = ["each"]\n[instance.big]\ndevices = ["{UUIDS[1]}"]\n'
    assert needs_devices(policy(text))
    found = made(text)
    assert {name: one.devices for name, one in found.items()} == {
        "gpu0": (UUIDS[0],),
        "gpu2": (UUIDS[2],),
        "big": (UUIDS[1],),
    }
    assert found["gpu2"].log_directory == "/var/log/nvidia-mps/gpu2"
    assert instances(policy('[instance.gpu]\ndevices = ["each"]\n'), ()) == ()


@pytest.mark.parametrize(
    ("text", "key", "problem"),
    [
        (TWO + 'log_directory = "/var/log/nvidia-mps/a"\n', "instance.b.log_directory", "has the log_directory of a"),
        (TWO + 'pipe_directory = "/tmp/other"\n', "instance.b.pipe_directory", "has another pipe_directory than a"),
        ('[instance.a]\ndevices = ["each"]\n[instance.b]\ndevices = ["each"]\n', "instance.b.devices", '"each"'),
        ('[instance.a]\ndevices = ["each", "GPU-x"]\n', "instance.a.devices.0", "is not the UUID of a GPU"),
        ('[instance."a/b"]\n', 'instance."a/b"', "is not a name"),
        (f'[instance.{"x" * 61}]\ndevices = ["each"]\n', f"instance.{'x' * 61}.devices", "a number is added"),
        ("".join(f"[instance.i{number}]\n" for number in range(65)), "", "more than 64 instances"),
        ('[instance.a]\nusers = "alice"\n', "instance.a.users", "is not a list"),
        ("[instance.a.limits]\nthread = 5\n", "instance.a.limits.thread", "unknown key"),
    ],
)
def test_what_cannot_be_is_refused_with_its_place(text: str, key: str, problem: str) -> None:
    errors = wrong(text)
    assert key in [one.key for one in errors]
    assert any(problem in one.problem for one in errors), errors


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (TWO.replace(UUIDS[1], UUIDS[0]), "is served by a too"),
        ("[instance.a]\n[instance.b]\n", "serves all GPUs, beside other instances"),
        (TWO.replace("[instance.b]", 'users = ["x"]\n[instance.b]') + 'users = ["x"]\n', "x is named in a too"),
        (TWO.replace("[instance.b]", 'users = ["x"]\n[instance.b]') + 'groups = ["y"]\n', "no instance serves"),
    ],
)
def test_what_is_surely_not_meant_is_a_warning(text: str, problem: str) -> None:
    assert any(problem in one.problem for one in in_itself(policy(text))), in_itself(policy(text))


def test_two_proper_instances_need_no_warning() -> None:
    assert in_itself(policy(TWO)) == ()
    assert in_itself(policy('[instance.gpu]\ndevices = ["each"]\n')) == ()


def test_users_are_told_which_gpus_every_instance_has() -> None:
    """PyTorch counts by NVML, and would take a GPU that its instance does not have."""
    assert environment(instances(Policy(), ())) == {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps"}
    assert environment(list(made(TWO).values()))["CUDA_VISIBLE_DEVICES"] == "0"
    pairs = f'[instance.a]\ndevices = ["{UUIDS[0]}", "{UUIDS[1]}"]\n'
    assert environment(list(made(pairs).values()))["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert environment(list(made(f'{pairs}[instance.b]\ndevices = ["{UUIDS[2]}"]\n').values())) == {
        "CUDA_MPS_PIPE_DIRECTORY": "/tmp/nvidia-mps",
        "CUDA_VISIBLE_DEVICES": "0",
    }


def test_a_user_apart_has_an_instance_named_after_section_and_uid_with_logs_of_its_own() -> None:
    (section,) = instances(policy('[instance.gpu0]\nsharing = "per-user"\nmax_users = 4\n'), ())
    assert apart.log_directory(section, 1001) == "/var/log/nvidia-mps/u1001"
    assert (apart.daemon_name("gpu0", None), apart.daemon_name("gpu0", 1001)) == ("gpu0", "gpu0-u1001")
    assert apart.split("gpu0-u1001") == ("gpu0", 1001)
    assert apart.users("gpu0", ["gpu0", "gpu0-u7", "gpu1-u8", "gpu0-u1x", "gpu0-u9"]) == [7, 9]
    assert not section.multiuser
    for name in ("gpu0", "gpu0-u", "gpu0-u01", "-u1", "gpu0-u12345678901", "gpu0-u1x"):
        assert apart.split(name) is None
    assert apart.split("a-u1-u2") == ("a-u1", 2)


def test_what_cannot_be_apart_is_said() -> None:
    (mistake,) = wrong('[instance.a]\nsharing = "per-user"\ncompute_mode = "exclusive-process"\n')
    assert (mistake.line, mistake.key) == (3, "instance.a.compute_mode")
    (mistake,) = wrong(f'[instance.{"a" * (apart.LONGEST + 1)}]\nsharing = "per-user"\n')
    assert "47 characters" in mistake.problem
    longest = f"/run/mpsagent/instances/{apart.daemon_name('a' * apart.LONGEST, 0xFFFFFFFE)}/pipe/control_privileged"
    assert len(longest) <= LONGEST_SOCKET_PATH


def test_no_instance_is_named_like_the_control_daemon_of_a_user() -> None:
    """A process of user 7 that had left its server was refused when it came back: "has worked at instance a, which the
    policy does not have any more", and metrics counted it there."""
    for text in ("[instance.a-u7]\n", '[instance.a-u]\ndevices = ["each"]\n'):
        (mistake,) = wrong(text)
        assert "names the control daemons of users so" in mistake.problem
        assert mistake.hint == "choose another name"


# --- GPUs in EXCLUSIVE_PROCESS mode -----------------------------------------------------------------------------------


def split(text: str, *shut: int, machine: tuple[Device, ...] = MACHINE) -> dict[str, tuple[str, tuple[str, ...]]]:
    """By instance: the way of sharing, and the GPUs that its control daemons serve."""
    found = instances(policy(text), machine, {UUIDS[number] for number in shut})
    return {one.instance: (one.sharing, one.devices) for one in found}


ALL_BUT_B = ("per-user", (UUIDS[0], UUIDS[2]))
OF_B = ("turns", (UUIDS[1],))


@pytest.mark.parametrize(
    ("text", "shut", "found"),
    [
        ("", (), {"default": ("per-user", ())}),
        ("", (1,), {"default": ALL_BUT_B, "default-gpu1": OF_B}),
        ("", (0, 1, 2), {
            "default": ("turns", (UUIDS[0],)), "default-gpu1": OF_B, "default-gpu2": ("turns", (UUIDS[2],)),
        }),
        (f'[instance.a]\ndevices = ["{UUIDS[1]}"]\n', (1,), {"a": OF_B}),
        (f'[instance.a]\ndevices = ["{UUIDS[1]}"]\n', (0,), {"a": ("per-user", (UUIDS[1],))}),
        (f'[instance.a]\ndevices = ["{UUIDS[2]}", "{UUIDS[0]}", "{UUIDS[1]}"]\n', (1,), {
            "a": ("per-user", (UUIDS[2], UUIDS[0])), "a-gpu1": OF_B,
        }),
        ('[instance.g]\ndevices = ["each"]\n', (1,), {
            "g0": ("per-user", (UUIDS[0],)), "g1": OF_B, "g2": ("per-user", (UUIDS[2],)),
        }),
        ('[instance.a]\nsharing = "turns"\n', (1,), {"a": ("turns", ())}),
        ('[instance.a]\nsharing = "one-server"\n', (1,), {"a": ("one-server", ())}),
        ('[instance.a]\ncompute_mode = "default"\n', (1,), {"a": ("per-user", ())}),
        ('mode = "report"\n[instance.a]\nsharing = "one-server"\n', (1,), {"a": ALL_BUT_B, "a-gpu1": OF_B}),
    ],
)  # fmt: skip
def test_a_gpu_in_exclusive_process_mode_has_an_instance_in_which_users_take_turns(
    text: str, shut: tuple[int, ...], found: dict[str, tuple[str, tuple[str, ...]]]
) -> None:
    """No control daemon serves such a GPU together with others, and all other GPUs are shared as the policy says."""
    assert split(text, *shut) == found
    stays = '"report"' not in text and ("sharing" in text or "compute_mode" in text)
    assert needs_modes(policy(text)) is not stays


def test_the_only_gpu_of_a_machine_is_not_named() -> None:
    """So a mode that changes takes effect without another start of the agent."""
    assert split("", 0, machine=MACHINE[:1]) == {"default": ("turns", ())}


def test_a_turn_on_such_a_gpu_has_no_end_unless_the_policy_sets_one() -> None:
    for text, after in (
        ("", None),
        ('[turn]\ntime_limit = "10m"\n', 600.0),
        ('[instance.a.turn]\ntime_limit = "1m"\n', 60.0),
    ):
        (one,) = instances(policy(text), MACHINE[:1], {UUIDS[0]})
        assert one.rules(Identity(7)).switch_after == after
        assert one.rules(Identity(7)).has_to_leave is (after is not None)
        why = exclusive(one)
        assert why is not None
        assert "EXCLUSIVE_PROCESS" in why
        assert "nvidia-smi -c DEFAULT" in why
        assert ("without a time limit" in why) is (after is None)
        assert why in words(one)
    assert exclusive(Policy()) is None


def test_programs_see_the_gpus_that_are_shared() -> None:
    """CUDA numbers the GPUs of an instance from 0."""
    mixed = environment(instances(Policy(), MACHINE, {UUIDS[1]}))
    assert mixed["CUDA_VISIBLE_DEVICES"] == "0,1"
    shut = environment(instances(Policy(), MACHINE, set(UUIDS)))
    assert shut["CUDA_VISIBLE_DEVICES"] == "0"


def test_a_control_daemon_serves_one_mig_device() -> None:
    (mistake,) = wrong('[instance.a]\ndevices = ["MIG-1", "MIG-2"]\n')
    assert (mistake.key, mistake.line) == ("instance.a.devices", 2)
    (mistake,) = wrong(f'[instance.a]\ndevices = ["MIG-1", "{UUIDS[0]}"]\nsharing = "turns"\n')
    assert "MIG" in mistake.problem
    assert policy('[instance.a]\ndevices = ["MIG-1"]\n').devices == ("MIG-1",)
    (mistake,) = wrong(f'[instance.a]\ndevices = ["{UUIDS[0]}"]\n[instance.a-gpu1]\ndevices = ["{UUIDS[1]}"]\n')
    assert "names an instance for a GPU of a in EXCLUSIVE_PROCESS mode so" in mistake.problem


def test_an_instance_that_is_no_longer_exclusive_keeps_its_turns_without_an_end() -> None:
    """Until the agent is started again: its users did not agree to a limit of time."""
    (shared, shut) = instances(Policy(), MACHINE, {UUIDS[1]})
    left = without_section(policy("[limits]\nactive_threads = '20%'\n"), shut)
    assert (left.sharing, left.devices, left.rules(Identity(7)).switch_after) == ("turns", (UUIDS[1],), None)
    assert left.rules(Identity(7)).threads == Percent(20.0)
    assert exclusive(left) == exclusive(shut)
    assert exclusive(without_section(Policy(), shared)) is None
