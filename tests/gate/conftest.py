"""The stage of the gate's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gate.rig import Rig, rigs


@pytest.fixture
def rig() -> Iterator[Rig]:
    yield from rigs()
