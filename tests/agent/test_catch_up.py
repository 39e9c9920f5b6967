"""Both logs together: what is left out of control.log must not be missed when server.log's lines come in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpsagent.agent import catch_up as catching
from mpsagent.agent.catch_up import Caught
from mpsagent.core.skim import NOBODY, Served, Skimmer
from mpsagent.mps.loglines import LogParser
from tests import recordings


class Everything(Skimmer):
    """Leaves nothing out."""

    def take(self, data: bytes, known: Served = NOBODY) -> bytes:
        return data

    def end(self) -> bytes:
        return b""


def caught(place: Path) -> Caught:
    control, server = LogParser("control"), LogParser("server")
    return catching.catch_up(str(place / "control.log"), str(place / "server.log"), control, server, 0.0, "/p/control")


@pytest.mark.parametrize("name", recordings.names())
@pytest.mark.parametrize("step", [100, 1000])
def test_skimmed_or_not_both_recorded_logs_give_the_same(
    name: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in small steps, so that what is known in between decides; also after a rotation (the first lines gone)."""
    monkeypatch.setattr(catching, "STEP", step)
    for logs in recordings.sections(name).values():
        (tmp_path / "server.log").write_bytes(logs.server)
        for gone in (0, len(logs.control) // 3):
            (tmp_path / "control.log").write_bytes(logs.control[gone:])
            with monkeypatch.context() as patch:
                patch.setattr(catching, "Skimmer", Everything)
                whole = caught(tmp_path)
            assert caught(tmp_path) == whole
