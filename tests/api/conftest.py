"""Shared by the tests of the api: no descriptor and no zombie is left behind."""

from tests.system.conftest import no_leak

__all__ = ["no_leak"]
