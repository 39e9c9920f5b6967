"""For all tests: which of them `make test` leaves to `make test-all`; signals as a terminal's user has them; and no
test that fails because the machine is slow.

A shell ignores SIGINT and SIGQUIT for what it runs in the background, nohup ignores SIGHUP, and children inherit it:
programs under test would then not hear what the tests send.
"""

import inspect
import signal

import pytest
from hypothesis import HealthCheck, settings

from tests.coroutines import play

LONG = (
    # whole systems: a booted systemd, NVIDIA's daemons, Slurm, Kubernetes, the demo, the pages
    "booted", "nvidia", "slurm", "kubernetes", "bench", "scenes", "test_demo.py", "test_docs_built.py",
    "test_release.py::test_two_builds_are_the_same_and_the_second_needs_no_network",
    # the same work ten times as large, or on two GPUs
    "test_linear.py", "test_hostile_day.py", "agent/test_openapi_fuzz.py",
    "gate/test_hostile.py",
    # the simulator by itself: quick scenarios of tests/conformance hold it against real MPS
    "sim/test_daemon.py", "sim/test_users.py",
    "world/test_heart.py", "world/test_tenth.py",
    "world/test_trouble.py", "world/test_tenth.py", "world/test_administrator.py", "world/test_hours.py",
    "fuzz/test_fuzz.py::test_new_words",
    "api/test_views.py::test_every_state_of_every_recording_can_be_shown",
    "cli/test_replay.py::test_a_hundred_megabytes_need_little_memory",
    "disorder/test_disorder.py::test_disorder_with_an_instance_for_each_gpu",
    # the whole agent beside the simulator, and the whole gate before it, where core and gate have the same in small
    "agent/test_adoption.py", "agent/test_ansible.py", "agent/test_attacks.py", "agent/test_busy_machine.py",
    "agent/test_bypass.py", "agent/test_containers.py", "agent/test_device_plugin.py", "agent/test_doctor.py",
    "agent/test_history.py", "agent/test_identity.py", "agent/test_instances.py",
    "agent/test_leases.py", "agent/test_pause.py", "agent/test_policy_diff.py",
    "agent/test_relayed.py", "agent/test_restarts.py", "agent/test_run_verb.py", "agent/test_terminate_each.py",
    "agent/test_use.py", "agent/test_warning.py",
    "agent/test_unlimited.py::test_who_waits_learns_that_its_environment_would_lift_its_limit",
    "gate/test_simulator.py", "disorder/test_disorder.py::test_without_the_product_the_same_run_fails_in_every_way",
)  # fmt: skip
"""Folders, files and tests that take more than half of the time: `make test` is for after each change."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.removeprefix("tests/").split("[")[0]
        if any(f"{name}/".startswith((f"{one}/", f"{one}::")) for one in LONG):
            item.add_marker("long")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    play(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


# An example may take long when other programs have the processors; the usual bound is 200 ms.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGQUIT, signal.SIG_DFL),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)
