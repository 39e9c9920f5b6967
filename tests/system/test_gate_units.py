"""The gate's units, against a stand-in for systemd (a real one: tests/booted/test_bus.py)."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from mpsagent.system import control_unit, gate_units
from mpsagent.system.directories import directories
from mpsagent.system.gate_units import GateState, GateUnits, sockets_again
from tests.system.conftest import Play

HERE = directories("default", "/tmp/nvidia-mps", "/var/log/nvidia-mps")
THERE = directories("gpu0", "/run/there", "/var/log/nvidia-mps")


class Bus:
    """Units for one place; after a reload, for another."""

    def __init__(self, socket: str, after_start: str = "active", after_reload: str = "") -> None:
        self.calls: list[str] = []
        self.active, self.after_start = socket, after_start
        self.listens, self.hidden = f"{HERE.public}/control", HERE.hidden
        self.after_reload = after_reload
        self.hang = 0.0
        self.queued = 0

    def both(self) -> GateState:
        time.sleep(self.hang)
        if self.queued:
            self.queued -= 1
            return GateState("inactive", "inactive", "", (), job=True)
        environment = (f"MPSAGENT_HIDDEN={self.hidden}",) if self.hidden else ()
        return GateState(self.active, self.active, self.listens, environment)

    def reload(self) -> None:
        self.calls.append("reload")
        if self.after_reload:
            self.listens, self.hidden = f"{THERE.public}/control", THERE.hidden

    def begin(self) -> None:
        self.calls.append("start")
        self.active = self.after_start

    def restart(self) -> None:
        self.calls.append("restart")
        self.active = self.after_start


def listening(place: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(place / "control"))


def test_what_runs_as_it_should_is_left_alone(play: Play, tmp_path: Path) -> None:
    """Asked again and again by the agent, without disturbing who waits; but a socket that was removed by hand
    is made again: who starts without it runs outside MPS."""
    bus = Bus("active")
    here = directories("default", str(tmp_path), "/var/log")
    bus.listens = f"{tmp_path}/control"
    listening(tmp_path)
    assert play(GateUnits(bus).ensure(here)) is None
    assert bus.calls == []
    (tmp_path / "control").unlink()
    assert play(GateUnits(bus).ensure(here)) is None
    (tmp_path / "control").touch()
    assert play(GateUnits(bus).ensure(here)) is None
    assert bus.calls == ["restart", "restart"]


def test_what_is_about_to_start_is_not_called_stopped(play: Play, tmp_path: Path) -> None:
    bus = Bus("active")
    bus.queued = 3
    bus.listens = f"{tmp_path}/control"
    listening(tmp_path)
    assert play(GateUnits(bus).ensure(directories("default", str(tmp_path), "/var/log"))) is None
    assert (bus.calls, bus.queued) == ([], 0)


def test_what_does_not_run_is_started_and_a_failure_says_where_to_look(play: Play) -> None:
    """The reason stands in the socket's journal: a directory of another user, a daemon started by hand."""
    bus = Bus("failed")
    assert play(GateUnits(bus).ensure(HERE)) is None
    assert bus.calls == ["start"]
    said = play(GateUnits(Bus("failed", after_start="failed")).ensure(HERE))
    assert "failed" in said
    assert "journalctl -b -u mpsagent-gate.socket" in said


def test_what_an_administrator_has_stopped_stays_stopped(play: Play) -> None:
    bus = Bus("inactive")
    assert "systemctl start mpsagent-gate.socket" in play(GateUnits(bus).ensure(HERE))
    assert bus.calls == []


def test_a_service_that_is_masked_is_called_so(play: Play) -> None:
    """Its environment is not known, and the message spoke of a drop-in and of two places that are one."""
    bus = Bus("active")
    bus.hidden = ""
    said = play(GateUnits(bus).ensure(HERE))
    assert "systemctl unmask mpsagent-gate.service" in said
    assert bus.calls == []


@pytest.mark.parametrize("place", [None, "etc", "run"])
def test_a_socket_is_unmasked_only_if_it_is_masked(tmp_path: Path, place: str | None) -> None:
    for one in ("etc", "run"):
        (tmp_path / one / "systemd/system").mkdir(parents=True)
    if place is not None:
        (tmp_path / place / "systemd/system/mpsagent-admin.socket").symlink_to("/dev/null")
    restart = "systemctl restart mpsagent.socket mpsagent-api.socket mpsagent"
    unmask = "" if place is None else "systemctl unmask mpsagent-admin.socket; "
    assert sockets_again(tmp_path) == unmask + restart


def test_another_place_in_the_policy_moves_them(play: Play) -> None:
    """The generator reads the policy at a reload; where that is no help, a drop-in stands in the way."""
    bus = Bus("active", after_reload="there")
    assert play(GateUnits(bus).ensure(THERE)) is None
    assert bus.calls == ["reload", "restart"]
    bus = Bus("active")
    said = play(GateUnits(bus).ensure(THERE))
    assert "/run/there" in said
    assert "systemctl cat" in said
    assert bus.calls == ["reload"]


def test_a_systemd_that_hangs_or_is_not_there_is_a_sentence(
    play: Play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing raises, nothing waits for ever."""
    monkeypatch.setattr(gate_units, "CALL_DEADLINE", 0.05)
    monkeypatch.setattr(control_unit, "CALL_DEADLINE", 0.05)
    bus = Bus("active")
    bus.hang = 0.5
    assert "does not answer" in play(GateUnits(bus).ensure(HERE))
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/no-bus")
    monkeypatch.setattr(gate_units, "CALL_DEADLINE", 60.0)
    assert "could not be started" in play(GateUnits().ensure(HERE))
