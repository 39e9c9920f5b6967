"""Drop-ins for a policy that puts things elsewhere: what may stand in a unit file, and that it never fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpsagent.policy.files import load
from mpsagent.system import generator
from mpsagent.system.generator import drop_ins
from mpsagent.system.unit_places import UnitPlaces, places

DEFAULT = UnitPlaces()


def test_the_default_policy_needs_no_drop_in() -> None:
    """The units are as they should be."""
    assert places([]) == DEFAULT
    assert places(["[limits]\nactive_threads = '50%'\n", ""]) == DEFAULT
    assert drop_ins(DEFAULT) == {}


def test_the_last_file_that_says_it_counts() -> None:
    """As for the agent: key by key."""
    first = '[instance.gpu0]\npipe_directory = "/run/a"\nlog_directory = "/srv/log"\n'
    assert places([first, '[instance.gpu0]\npipe_directory = "/run/b"\n']) == UnitPlaces("gpu0", "/run/b", "/srv/log")


def test_a_text_that_the_agent_takes_is_no_other_here() -> None:
    """Python's own reader knows no line breaks in an inline table, and the agent's does: the units had the defaults of
    such a policy, and the agent its directories."""
    text = '[instance.gpu0]\npipe_directory = "/run/a"\n[limits]\nactive_threads = {\n  clients = 4,\n}\n'
    policy, errors = load([("policy.toml", text)])
    assert (errors, policy and policy.pipe_directory) == ([], "/run/a")
    assert places([text]) == UnitPlaces("gpu0", "/run/a")


def test_of_several_instances_the_first_is_the_gates_and_all_logs_can_be_written() -> None:
    """The others' directories lie beside the first one's; the gate hears of them from the agent."""
    two = places(['[instance.a]\ncontrol_daemon_path = "/opt/mps"\n[instance.b]\nlog_directory = "/srv/b"\n'])
    assert two == UnitPlaces("a", log="/var/log/nvidia-mps/a", control="/opt/mps", logs=("/srv/b",))
    assert "ReadWritePaths=-/srv/b\n" in drop_ins(two)["mpsagent.service"]
    assert "/var/log" not in drop_ins(two)["mpsagent.service"], "the unit has that"
    each = places(['[instance.gpu]\ndevices = ["each"]\n'])
    assert each == UnitPlaces("gpu0", log="/var/log/nvidia-mps/gpu0")
    assert "instances/gpu0/pipe" in drop_ins(each)["mpsagent-gate.service"]
    assert places(['[instance.gpu]\ndevices = ["each"]\nlog_directory = "/srv/log"\n']).log == "/srv/log/0"


def test_each_unit_gets_what_it_needs() -> None:
    """Emptied before it is set: systemd would listen in both places otherwise."""
    texts = drop_ins(UnitPlaces("gpu0", "/run/a", "/srv/log"))
    assert "ListenSequentialPacket=\nListenSequentialPacket=/run/a/control\n" in texts["mpsagent-gate.socket"]
    assert (
        "ExecStartPre=\nExecStartPre=/usr/lib/mpsagent/mpsagent-directories public /run/a\n"
        in (texts["mpsagent-gate.socket"])
    )
    assert "=/run/a/control_privileged\n" in texts["mpsagent-gate-privileged.socket"]
    hidden = "MPSAGENT_HIDDEN=/run/mpsagent/instances/gpu0/pipe"
    assert hidden in texts["mpsagent-gate.service"]
    assert hidden in texts["mpsagent-open.service"]
    assert "ReadWritePaths=-/srv/log\n" in texts["mpsagent.service"]
    assert drop_ins(UnitPlaces("gpu0")).keys() == {"mpsagent-gate.service", "mpsagent-open.service"}


def test_the_program_and_the_group_of_the_policy_reach_their_units() -> None:
    """Without an agent the gate was opened with another program than the policy's; the group's socket is systemd's."""
    where = places(['[instance.default]\ncontrol_daemon_path = "/opt/mps"\n[agent]\nadmin_group = "gpu-admins"\n'])
    texts = drop_ins(where)
    assert texts.keys() == {"mpsagent-open.service", "mpsagent-admin.socket"}
    assert "MPSAGENT_PROGRAM=/opt/mps\n" in texts["mpsagent-open.service"]
    assert "SocketGroup=gpu-admins\n" in texts["mpsagent-admin.socket"]
    hostile = ['[instance.default]\ncontrol_daemon_path = "x y"\n[agent]\nadmin_group = "a\\nb"\n']
    assert drop_ins(places(hostile)) == {}


def test_what_others_could_have_written_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the agent refuses it: it would name a program that root runs."""
    policy = tmp_path / "policy.toml"
    policy.write_text('[agent]\nadmin_group = "others"\n')
    for mode, there in ((0o644, True), (0o666, False)):
        policy.chmod(mode)
        normal = tmp_path / f"{mode:o}"
        normal.mkdir()
        monkeypatch.setattr("sys.argv", ["mpsagent-generator", str(normal)])
        assert generator.main(str(policy)) == 0
        assert (normal / "mpsagent-admin.socket.d/50-policy.conf").exists() is there


@pytest.mark.parametrize(
    "place",
    [
        "relative",
        "/run/a b",
        "/run/%n",
        "/run/a\\nExecStart=/bin/sh",
        "/run/../etc",
        "/tmp",
        "/run//x",
        "/run/x/",
        "/run/$HOME",
        "/run/ä",
        "/",
        "",
    ],
)
def test_what_a_unit_file_would_read_in_another_way_is_left_out(place: str) -> None:
    """The agent says that such a policy is wrong; here it must not become a line of a unit."""
    text = f'[instance.gpu0]\npipe_directory = "{place}"\nlog_directory = "{place}"\n'
    assert places([text]) == UnitPlaces("gpu0")


@pytest.mark.parametrize(
    "text",
    [
        "[instance",
        "instance = 3",
        "[instance]\ngpu0 = 4",
        "[instance.default]\npipe_directory = 7",
        '[instance."a/b"]\npipe_directory = "/x"',
        "\0",
        "a = " + "[" * 5000,
    ],
)
def test_a_policy_that_cannot_be_read_leaves_the_defaults(text: str) -> None:
    """A boot must not hang or fail on a typing mistake."""
    assert places([text]) == DEFAULT


def test_it_writes_where_systemd_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three directories are given; the first one is for us. A FIFO in place of a file does not stop the boot."""
    policy, normal = tmp_path / "policy.toml", tmp_path / "normal"
    normal.mkdir()
    (tmp_path / "policy.d").mkdir()
    policy.write_text('[instance.gpu0]\npipe_directory = "/run/a"\n')
    (tmp_path / "policy.d/10.toml").write_text('[instance.gpu0]\npipe_directory = "/run/b"\n')
    os.mkfifo(tmp_path / "policy.d/20.toml")
    monkeypatch.setattr("sys.argv", ["mpsagent-generator", str(normal), "/early", "/late"])
    assert generator.main(str(policy)) == 0
    text = (normal / "mpsagent-gate.socket.d/50-policy.conf").read_text()
    assert "/run/b/control" in text
    assert str(policy) in text.splitlines()[0]
    monkeypatch.setattr("sys.argv", ["mpsagent-generator", str(tmp_path / "missing")])
    assert generator.main(str(policy)) == 0


def test_without_a_directory_it_writes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wrote below /tmp by a name that any user could have taken."""
    monkeypatch.setattr(generator.sys, "argv", ["mpsagent-generator"])
    assert generator.main("/nowhere/policy.toml") == 2
