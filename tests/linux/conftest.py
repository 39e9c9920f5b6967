"""Fixtures that these tests share with those of tests/system."""

from tests.system.conftest import no_leak

__all__ = ["no_leak"]
