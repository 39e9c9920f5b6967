"""Shared by the tests of api and command line: an API, and that no descriptor and no zombie is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpsagent.api import database
from tests.api.stand_in import Served, serve
from tests.system.conftest import no_leak

__all__ = ["no_leak"]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a question to the history takes longer, and is no wrong answer."""
    monkeypatch.setattr(database, "PATIENCE", 60.0)


@pytest.fixture
def served() -> Iterator[Served]:
    with serve() as one:
        yield one
