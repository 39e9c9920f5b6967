"""Mistakes of administrators, made in a booted systemd: each fails closed, and is said where people look."""

from __future__ import annotations

import pytest

from tests.booted.machine import Machine
from tests.booted.service import (
    ALICE,
    BOB,
    CLIENT,
    SIMULATED,
    agent_pid,
    api,
    assert_served_exactly,
    enable,
    ready,
    until,
)

PROGRAM = "/usr/bin/nvidia-cuda-mps-control"


def cli(node: Machine, *words: str, user: str | None = None) -> tuple[int, str]:
    done = node.run("mpsagent-cli", *words, user=user, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.timeout(600)
def test_mps_is_not_installed_or_elsewhere(node: Machine) -> None:
    """A first installation: the reason stands in `status` and not in another unit's journal alone. Then it is installed
    under another path, behind a wrapper, and without an agent the gate is opened with the same program."""
    node.run("rm", PROGRAM)
    enable(node, wait=False)
    status, said = cli(node, "status")
    assert (status, "nvidia-cuda-mps-control is not installed (looked in /" in said) == (1, True), said
    assert "apt install nvidia-cuda-mps" in said
    node.write("/opt/site-mps", f'#!/bin/sh\nexec {SIMULATED}/nvidia-cuda-mps-control "$@"\n', 0o755)
    node.write("/etc/mpsagent/policy.d/20-program.toml", '[instance.default]\ncontrol_daemon_path = "/opt/site-mps"\n')
    assert cli(node, "policy", "check", "--strict")[0] == 0
    node.systemctl("restart", "mpsagent.service")
    until("ready for users", lambda: ready(node), 60)
    assert_served_exactly(node, ALICE)

    node.systemctl("stop", "mpsagent.socket", "mpsagent.service", "mpsagent-control@default.service")
    node.run("rm", "/run/mpsagent/instance-default.env")  # as after a boot
    node.systemctl("daemon-reload")
    node.systemctl("start", "mpsagent-open.service")
    assert node.systemctl("is-active", "mpsagent-control@default.service") == "active"
    assert node.run(CLIENT, "query", user=BOB).returncode == 0


@pytest.mark.timeout(600)
def test_check_and_reload_judge_alike_and_a_policy_that_is_gone_opens_nothing(running: Machine) -> None:
    """What `policy check` says at the prompt is what the agent says in its sandbox."""
    main, part = "/etc/mpsagent/policy.toml", "/etc/mpsagent/policy.d/30-new.toml"
    digest = api(running, "/v1/policy")["digest"]

    def refused(words: str) -> None:
        status, said = cli(running, "policy", "check")
        assert (status, words in said) == (2, True), said
        done = running.run("systemctl", "reload", "mpsagent.service", check=False)
        policy = api(running, "/v1/policy")
        assert (done.returncode != 0, policy["digest"]) == (True, digest)
        assert words in policy["errors"][0], policy["errors"]

    # As those do it who keep their files in a checkout of their own.
    running.run("sh", "-c", f"cp {main} /root/site.toml && mv {main} {main}.kept && ln -s /root/site.toml {main}")
    refused("is a link to /root/site.toml, where the agent cannot read: its unit has ProtectHome=yes")
    running.run("mv", f"{main}.kept", main)
    running.write(part, "[limits]\nactive_threads = '100%'\n", 0o666)
    refused("may be written by everybody")
    running.run("chmod", "644", part)
    running.run("chown", ALICE, part)
    refused(f"belongs to uid {ALICE}")
    running.run("rm", part)
    running.run("mkfifo", part)
    refused("is not a regular file")
    running.run("rm", part)
    running.run("mv", main, f"{main}.lost")
    refused("is missing")
    running.systemctl("restart", "mpsagent.service")
    until("the last good policy", lambda: api(running, "/v1/policy")["digest"] == digest)
    status, said = cli(running, "status")
    assert (status, "the last good policy stays in force" in said) == (1, True), said
    until("a control daemon", lambda: (api(running, "/v1/status")["control"] or {}).get("running"))
    assert_served_exactly(running, BOB)
    running.run("mv", f"{main}.lost", main)

    hook = "/root/save"
    running.write(hook, "#!/bin/sh\n", 0o755)
    running.write(part, f'[hooks]\npre_terminate = "{hook}"\n')
    running.systemctl("reload", "mpsagent.service")
    words = f"{hook} lies in a home directory, which mpsagent.service cannot see"
    status, said = cli(running, "policy", "check", "--strict")
    assert (status, words in said) == (2, True), said
    assert words in cli(running, "reload")[1]


@pytest.mark.timeout(600)
def test_a_first_start_without_the_policy_admits_no_one(node: Machine) -> None:
    """It meant everything for everybody. Who comes is refused, and not outside MPS; the reason is said."""
    node.run("mv", "/etc/mpsagent/policy.toml", "/root/")
    enable(node, wait=False)
    until("the reason", lambda: "no one is admitted" in cli(node, "status")[1])
    status, said = cli(node, "status")
    assert (status, "/etc/mpsagent/policy.toml: is missing" in said) == (1, True), said
    done = node.run(CLIENT, "query", user=ALICE, check=False)
    assert (done.returncode != 0, "CUDA_ERROR_MPS" in done.stdout) == (True, True), done.stdout
    until("no one waits", lambda: api(node, "/v1/queue")["queue"] == [])
    assert api(node, "/v1/clients")["clients"] == []
    node.run("mv", "/root/policy.toml", "/etc/mpsagent/")
    node.systemctl("reload", "mpsagent.service")
    until("ready for users", lambda: ready(node))
    assert_served_exactly(node, ALICE)
    node.write("/etc/systemd/system/mpsagent-gate.service.d/few.conf", "[Service]\nLimitNOFILE=32\n")
    node.systemctl("daemon-reload")
    node.systemctl("restart", "mpsagent-gate.service")
    until("the gate's limit", lambda: "the gate may open only 32 files" in cli(node, "status")[1])


@pytest.mark.timeout(600)
def test_an_agent_that_is_stopped_alone_is_started_by_the_next_order(running: Machine) -> None:
    """As the manual says; with its socket it stays stopped, which the api says."""
    running.systemctl("stop", "mpsagent.service")
    until("it is said", lambda: "the agent is silent" in cli(running, "status", user=ALICE)[1])
    assert agent_pid(running) == "0"
    assert cli(running, "resume", user=ALICE)[0] == 5, "that is not for her to order"
    assert agent_pid(running) != "0"
    running.systemctl("stop", "mpsagent.socket", "mpsagent.service")
    assert cli(running, "resume", user=ALICE)[0] == 3
    assert cli(running, "resume")[0] == 3
    until("it is said", lambda: cli(running, "status")[0] == 1)
    assert agent_pid(running) == "0"

    running.systemctl("start", "mpsagent.service")
    admin = "/run/mpsagent/mpsagent-admin.sock"
    assert running.run("stat", "-c", "%a %U %G", admin).stdout.split() == ["660", "root", "mpsagent-admin"]
    until("an answer on it", lambda: cli(running, "resume")[0] == 0)
    assert "no socket for administrators" not in running.journal("-u", "mpsagent")
