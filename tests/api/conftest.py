"""Shared by the tests of api and command line: an API, and that no descriptor and no zombie is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.api.stand_in import Served, serve
from tests.system.conftest import no_leak

__all__ = ["no_leak"]


@pytest.fixture
def served() -> Iterator[Served]:
    with serve() as one:
        yield one
