"""The directories of instances: a reason that stays the same is reported once."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from mpsagent.gate.instance_directories import OwnDirectories
from mpsagent.gate.store import DescriptorStore


def test_a_directory_that_cannot_be_made_is_reported_once_and_again_when_the_reason_changes(tmp_path: Path) -> None:
    said: list[str] = []
    own = OwnDirectories(tmp_path / "run" / "instances", cast("DescriptorStore", None), lambda *_: None, said.append)
    own.use(["gpu0"])
    own.look()
    assert ["gpu0" in one for one in said] == [True]
    (tmp_path / "run").write_text("a file is in the way")
    own.look()
    own.look()
    assert len(set(said)) == len(said) == 2
