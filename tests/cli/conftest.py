"""The API that the command line asks."""

from tests.api.conftest import served

__all__ = ["served"]
