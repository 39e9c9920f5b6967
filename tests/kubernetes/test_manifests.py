"""packaging/kubernetes against Kubernetes' own schemas, and against what this repository has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from mpsagent.agent.settings import Settings
from mpsagent.policy.files import load
from mpsagent_kubernetes.main import main
from tests.conformance.backends import REPOSITORY

PLACE = REPOSITORY / "packaging" / "kubernetes"
VERSIONS = ("1.27.0", "1.34.0")
"""Of Kubernetes: CDI devices of device plugins are on by default from 1.29, and stable from 1.31."""


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(PLACE.glob("*.yaml")):
        for one in yaml.safe_load_all(path.read_text()):
            yield f"{one['kind']}-{one['metadata'].get('namespace', '')}-{one['metadata']['name']}", one


EVERY = dict(documents())
DAEMON_SET = EVERY["DaemonSet-mpsagent-mpsagent"]


def mistakes(one: dict[str, Any], version: str) -> str:
    """Strict: what a schema does not name is a mistake."""
    validate = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate, which has the schemas (PyPI)")
    try:
        validate.validate(one, version, strict=True)
    except validate.ValidationError as error:
        return f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
    return ""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", EVERY)
def test_kubernetes_takes_each(name: str, version: str) -> None:
    assert mistakes(EVERY[name], version) == ""


def test_the_schemas_see_mistakes() -> None:
    """A field that there is not, and a value of another type, deep inside."""
    wrong = json.loads(json.dumps(DAEMON_SET))
    wrong["spec"]["template"]["spec"]["containers"][0]["securityContext"]["privilege"] = True
    assert "privilege" in mistakes(wrong, VERSIONS[0])
    wrong = json.loads(json.dumps(DAEMON_SET))
    wrong["spec"]["template"]["spec"]["hostPID"] = "yes"
    assert "hostPID" in mistakes(wrong, VERSIONS[0])


def test_the_policy_is_one() -> None:
    policy, errors = load([("policy.toml", EVERY["ConfigMap-mpsagent-mpsagent"]["data"]["policy.toml"])])
    assert errors == []
    assert policy is not None
    assert (policy.cdi_file, policy.pipe_directory) == ("/etc/cdi/mpsagent.json", "/run/nvidia-mps")


def test_what_containers_see_is_what_agent_and_plugin_use() -> None:
    """Every place that they have by default or by the policy is the node's, at the same path; the plugin writes
    where it must and nowhere else."""
    pod = DAEMON_SET["spec"]["template"]["spec"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounted: dict[str, dict[str, bool]] = {}
    for container in pod["containers"]:
        for one in container["volumeMounts"]:
            mounted.setdefault(container["name"], {})[one["mountPath"]] = one.get("readOnly", False)
            volume = volumes[one["name"]]
            assert "configMap" in volume or volume["hostPath"]["path"] == one["mountPath"]
    settings, policy = Settings(), load([("", EVERY["ConfigMap-mpsagent-mpsagent"]["data"]["policy.toml"])])[0]
    assert policy is not None
    assert mounted["agent"].keys() == {
        str(Path(settings.policy).parent), settings.run_directory, settings.state_directory, settings.api_directory,
        policy.pipe_directory, policy.log_directory, str(Path(policy.cdi_file or "").parent),
    }  # fmt: skip
    options = {one.name: one.default for one in main.params}
    assert mounted["device-plugin"] == {
        str(Path(options["socket"]).parent): False, str(options["plugins"]): False,
        str(Path(options["pod_resources"]).parent): True, str(options["logs"]): True, str(options["cgroups"]): True,
    }  # fmt: skip


def test_the_example_asks_for_what_there_is() -> None:
    options = {one.name: one.default for one in main.params}
    (container,) = EVERY["Pod--train"]["spec"]["containers"]
    assert list(container["resources"]["limits"]) == [options["resource"]]


def test_the_account_may_what_the_plugin_does_and_no_more() -> None:
    allowed = [
        (kind, rule) for kind in ("ClusterRole--mpsagent", "Role-default-mpsagent") for rule in EVERY[kind]["rules"]
    ]
    assert allowed == [
        ("ClusterRole--mpsagent", {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]}),
        ("Role-default-mpsagent", {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]}),
    ]


def test_the_agent_is_started_again_until_the_container_is_stopped(tmp_path: Path) -> None:
    """Killed it comes back; a signal for the container is passed on, and waited for."""
    program = (  # run-agent may pass a signal on twice, when it comes while the agent is started
        "import os, signal, sys, time\n"
        "def end(*_):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    time.sleep(0.2), os.write(1, b'ended\\n'), sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "os.write(1, b'%d\\n' % os.getpid())\n"  # the signal may come before this is over: no print, which has a buffer
        "while True: signal.pause()"
    )
    run = subprocess.Popen(
        [PLACE / "run-agent", sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert run.stdout is not None
    try:
        pids = [int(run.stdout.readline())]
        os.kill(pids[0], signal.SIGKILL)
        pids.append(int(run.stdout.readline()))
        assert pids[0] != pids[1]
        run.terminate()
        assert run.communicate(timeout=60) == ("ended\n", None)
        assert run.returncode == 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
