"""Errors in answers to orders and to HTTP requests."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

Json = dict[str, Any]


class Problem(Exception):
    """An error with an HTTP status and texts for the caller.

    The body is a problem detail (RFC 9457). ``more``: further members of it, such as the oldest cursor of a 410.
    """

    def __init__(self, status: int, what: str, where: str = "", hint: str = "", **more: Any) -> None:
        super().__init__(what)
        self.status, self.what, self.where, self.hint, self.more = status, what, where, hint, more

    def body(self) -> Json:
        """Return the problem detail."""
        title = HTTPStatus(self.status).phrase
        told = {"detail": self.what, "where": self.where, "hint": self.hint}
        return {"type": "about:blank", "title": title, "status": self.status, **told, **self.more}
