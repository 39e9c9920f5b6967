"""`policy explain` shows only keys that a policy can have, and `status` names the process that can make room."""

from __future__ import annotations

import pytest

from mpsagent.policy.files import load
from mpsagent.policy.keys import ATTRIBUTES_OF_CGROUPS, KEYS
from tests.agent.stage import A, Stage

pytestmark = pytest.mark.root
CGROUP = '[cgroup."/few"]\nmax_clients = 1\nactive_threads = "20%"\n'


@pytest.mark.parametrize("mode", ["enforce", "report"])
def test_explain_shows_only_keys_that_exist(stage: Stage, mode: str) -> None:
    """It showed `enforce.limits` and `kill_grace`, which a policy refuses."""
    agent = stage.with_agent(f'mode = "{mode}"\n[limits]\nactive_threads = "50%"\n{CGROUP}')
    for cgroup in ("", "&cgroup=/few", "&cgroup=/none"):
        shown = agent.api.get(f"/v1/policy/explain?user={A}{cgroup}")
        keys = {name for name, one in shown.items() if isinstance(one, dict) and "from" in one}
        of_cgroups = {name.removeprefix("cgroup.") for name in keys if name.startswith("cgroup.")}
        assert of_cgroups == ({"max_clients", "active_threads"} if cgroup == "&cgroup=/few" else set())
        assert of_cgroups <= ATTRIBUTES_OF_CGROUPS.keys()
        assert {name for name in keys if not name.startswith("cgroup.")} <= {one.shown for one in KEYS}
    printed = stage.cli(agent, "policy", "explain", str(A), "--cgroup", "/few")[1]
    assert ("Report mode: no value of this table is in force" in printed) == (mode == "report"), "it shows limits"
    table = printed.split("\n\n")[1].splitlines()
    names = [row.split()[0] for row in table[1:] if not row.startswith(" ")]
    assert "max_clients" in names
    for name in names:
        section, _, key = name.rpartition(".")
        place = f'[cgroup."/few"]\n{key}' if section == "cgroup" else f"[user.x]\n{name}"
        if section in ("timeouts", "hooks"):
            place = f"[{section}]\n{key}"
        _, errors = load([("x.toml", f"{place} = 1\n")])
        assert all("unknown key" not in str(one) for one in errors), errors


def test_status_names_the_process_that_holds_its_own_user_up(stage: Stage) -> None:
    """A user's launcher had the only place, and nothing said which process could make room."""
    agent = stage.with_agent(f'[user."{A}"]\nmax_clients = 1\n')
    first = stage.client(A, "sleep", 600)
    first.known()
    stage.client(A, "query")
    stage.until(lambda: agent.api.get("/v1/status")["waiting"], "it waits")
    said = " ".join(stage.cli(agent, "status")[1].split())
    assert f"this user may have 1 process at a time (user.{A}.max_clients, " in said
    assert "policy.toml:2)" in said
    assert (
        f"only this user's own process {first.pid} can make room: wait, or run mpsagent-cli terminate {first.pid}"
    ) in said
