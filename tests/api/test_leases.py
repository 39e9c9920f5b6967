"""Leases over the API and on the command line: who may, what is checked, what is shown."""

from __future__ import annotations

import os

import pytest

from mpsagent.cli import client
from mpsagent.policy.values import Multiprocessors, Percent
from mpsagent.snapshot.lease_body import asked
from mpsagent.snapshot.problem import Problem
from tests.api.stand_in import OTHER, START, serve
from tests.api.test_permissions import ask, order
from tests.cli.program import run

NOW = START


def test_what_is_asked_for() -> None:
    found = asked({"uid": 7, "cgroup": "/a", "active_threads": 26, "memory_limit": "25%", "until": "2h"}, NOW)
    assert (found.uid, found.cgroup, found.pid, found.seconds) == (7, "/a", None, 7200.0)
    assert found.share == {"threads": Multiprocessors(26), "memory": {"": Percent(25.0)}}
    of_all = {"total_active_threads": "50%", "total_memory_limit": "10G", "max_clients": 3}
    found = asked({"uid": 7, **of_all, "until": "2h"}, NOW)
    assert found.share == {"total_threads": Percent(50.0), "total_memory": 10 << 30, "max_clients": 3}
    at = asked({"pid": 5, "active_threads": 3, "until": "2026-11-21T00:00:00+01:00"}, NOW - 7200)
    assert at.until == 1795215600.0


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"active_threads": "5%", "until": "1h"}, "uid"),
        ({"uid": -1, "active_threads": "5%", "until": "1h"}, "uid"),
        ({"uid": 1, "until": "1h"}, "active_threads"),
        ({"uid": 1, "active_threads": "101%", "until": "1h"}, "active_threads"),
        ({"uid": 1, "active_threads": {"clients": 2}, "until": "1h"}, "active_threads"),
        ({"uid": 1, "memory_limit": "5", "until": "1h"}, "memory_limit"),
        ({"uid": 1, "total_memory_limit": "5", "until": "1h"}, "total_memory_limit"),
        ({"uid": 1, "max_clients": 0, "until": "1h"}, "max_clients"),
        ({"cgroup": "a/b", "active_threads": "5%", "until": "1h"}, "cgroup"),
        ({"uid": 1, "active_threads": "5%"}, "until"),
        ({"uid": 1, "active_threads": "5%", "until": "0s"}, "until"),
        ({"uid": 1, "active_threads": "5%", "until": "2026-11-21T00:00:00"}, "until"),  # whose clock?
        ({"uid": 1, "active_threads": "5%", "until": "2020-01-01T00:00:00Z"}, "until"),
        ({"uid": 1, "active_threads": "5%", "until": "400d"}, "until"),
        ({"uid": 1, "active_threads": "5%", "until": "1h", "name": "job 7"}, "name"),
        ({"uid": 1, "active_threads": "5%", "until": "1h", "name": ""}, "name"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(body: dict[str, object], where: str) -> None:
    with pytest.raises(Problem) as problem:
        asked(body, NOW)
    assert (problem.value.status, problem.value.where) == (400, where)


def test_over_the_socket() -> None:
    with serve() as served:
        body = {"uid": OTHER, "active_threads": "30%", "memory_limit": {"0": "4G"}, "until": "10m"}
        given, _ = client.order(str(served.path), "lease", body)
        assert (given["active_threads"], given["in_force"], given["memory_limit"]) == ("30%", True, {"0": 4 << 30})
        (listed,) = client.ask(str(served.path), "/v1/leases")[0]["leases"]
        assert (listed["id"], listed["uid"], listed["clients"]) == (1, OTHER, [])
        for name, wrong, status in (("delete-lease", {"number": 7}, 404), ("lease", {"uid": "x"}, 400)):
            with pytest.raises(client.RequestRefused) as refused:
                client.order(str(served.path), name, wrong)
            assert refused.value.status == status
        assert client.order(str(served.path), "delete-lease", {"number": 1})[0] == {"ended": 1}


def test_an_old_key_of_an_order_has_its_new_name() -> None:
    """An order with "threads" said only which keys are known."""
    with serve() as served:
        with pytest.raises(client.RequestRefused) as refused:
            client.order(str(served.path), "lease", {"uid": OTHER, "threads": 30, "until": "10m"})
        assert refused.value.error["hint"] == 'it is called "active_threads" now'
        with pytest.raises(client.RequestRefused) as refused:
            client.order(str(served.path), "lease", {"uid": OTHER, "until": "10m"})
        assert refused.value.error["detail"] == "the lease has no limits"


def test_on_the_command_line() -> None:
    with serve() as served:
        added = run(
            served,
            "lease",
            "add",
            "--uid",
            str(OTHER),
            "--active-threads",
            "26",
            "--memory-limit",
            "1G",
            "--until",
            "10m",
        )
        assert (added.returncode, added.stdout, added.stderr) == (0, "1\n", "")
        run(served, "lease", "add", "--cgroup", "/slurm/job_7", "--active-threads", "30%", "--until", "1h")
        lines = run(served, "lease", "list").stdout.splitlines()
        assert "26 multiprocessors, 1G" in lines[1]
        assert "/slurm/job_7" in lines[2]
        assert "30% of the multiprocessors" in lines[2]
        total = ("--total-active-threads", "15%", "--total-memory-limit", "512M", "--max-clients", "2")
        whose = ("--cgroup", "/slurm/job_8", "--name", "8")
        run(served, "lease", "add", *whose, "--active-threads", "10%", *total, "--until", "1h")
        assert (
            "10% of the multiprocessors; 15% of the multiprocessors, 512M, 2 clients in all"
            in run(served, "lease", "list").stdout
        )
        assert run(served, "lease", "delete", "3").returncode == 0
        assert run(served, "lease", "delete", "1").stdout == "lease 1 has ended\n"
        assert run(served, "lease", "delete", "1").returncode == 6
        assert run(served, "lease", "add", "--active-threads", "30%", "--until", "1h").returncode == 2
        assert run(served, "lease", "delete", "2").returncode == 0
        assert run(served, "lease", "list").stdout == "no leases\n"


def test_a_lease_above_what_its_user_may_have_is_said_and_shown() -> None:
    """`--active-threads 90%` for a user who may have 20 said nothing, and the list showed 90."""
    with serve() as served:
        added = run(served, "lease", "add", "--uid", str(OTHER), "--active-threads", "90%", "--until", "10m")
        assert (added.returncode, added.stdout) == (0, "1\n")
        assert "more than its user may have: 20 %, 1G for each process" in added.stderr
        assert "90% of the multiprocessors (its user may have 20 %, 1G)" in run(served, "lease", "list").stdout
        fits = run(
            served,
            "lease",
            "add",
            "--uid",
            str(OTHER),
            "--active-threads",
            "20%",
            "--memory-limit",
            "1G",
            "--until",
            "10m",
        )
        assert (fits.returncode, fits.stderr) == (0, "")
        more = run(served, "lease", "add", "--uid", str(OTHER), "--memory-limit", "2G", "--until", "10m")
        assert "20 %, 1G for each process" in more.stderr


def test_an_epilog_ends_what_its_prolog_gave() -> None:
    with serve() as served:
        for cgroup in ("/slurm/job_7", "/slurm/job_70", "/slurm/job_7"):
            run(served, "lease", "add", "--cgroup", cgroup, "--active-threads", "30%", "--until", "1h")
        ended = run(served, "lease", "delete", "--cgroup", "/slurm/job_7")
        assert (ended.returncode, ended.stdout) == (0, "lease 1 has ended\nlease 3 has ended\n")
        again = run(served, "lease", "delete", "--cgroup", "/slurm/job_7")
        assert (again.returncode, again.stdout) == (0, "")
        assert run(served, "lease", "delete").returncode == 2
        named = ["--cgroup", "/slurm/job_70", "--active-threads", "30%", "--until", "1h", "--name", "slurm-70"]
        number = run(served, "lease", "add", *named).stdout.strip()
        assert run(served, "lease", "list").stdout.splitlines()[-1].split()[:2] == [number, "slurm-70"]
        assert run(served, "lease", "delete", "--name", "slurm-70", "--cgroup", "/slurm/job_70").returncode == 2
        assert run(served, "lease", "delete", "--name", "slurm-70").stdout == f"lease {number} has ended\n"
        assert run(served, "lease", "delete", "2", "--cgroup", "/slurm/job_70").returncode == 2
        gone = run(served, "lease", "delete", "--name", "nosuch")
        assert (gone.returncode, gone.stdout) == (6, "")
        assert "there is no lease with the name 'nosuch'" in gone.stderr
        (left,) = client.ask(str(served.path), "/v1/leases")[0]["leases"]
        assert left["id"] == 2


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="asks as another user")
def test_other_users_may_read_and_not_act() -> None:
    body = {"uid": OTHER, "active_threads": "90%", "until": "1h"}
    with serve() as served:
        assert ask(served, OTHER, "/v1/leases")[0] == 200
        assert order(served, OTHER, "lease", **body)[0] == 403
        assert order(served, OTHER, "delete-lease", number=1)[0] == 403


def test_a_lease_that_the_gate_does_not_go_by_yet_is_given_and_said() -> None:
    """A prolog gets its number all the same, and its log says why the first process may have had other limits."""
    with serve() as served:
        served.backend.settled = False
        added = run(served, "lease", "add", "--uid", str(OTHER), "--active-threads", "20%", "--until", "1h")
        assert (added.returncode, added.stdout) == (0, "1\n")
        assert "the gate does not apply it yet" in added.stderr
