"""The service manager's socket: read once, and no child sees it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from mpsagent.linux.notify import Notifier


@pytest.mark.parametrize("abstract", [True, False])
def test_a_service_reports_to_its_manager_and_its_children_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool
) -> None:
    name = f"@mpsagent-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0", 1) if abstract else name)
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        monkeypatch.setenv("WATCHDOG_USEC", "2500000")
        service = Notifier()
        assert not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & os.environ.keys()
        service.tell("READY=1", "STATUS=well")
        assert manager.recv(100) == b"READY=1\nSTATUS=well"
        assert service.watchdog == 2.5


def test_without_a_manager_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.setenv("WATCHDOG_USEC", "soon")
    service = Notifier()
    service.tell("READY=1")
    assert service.watchdog is None
