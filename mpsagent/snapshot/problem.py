"""An answer that is an error, of an order or over HTTP."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

Json = dict[str, Any]


class Problem(Exception):
    """``status`` is an HTTP status; the texts are for the person who asked.

    The body is a problem detail (RFC 9457); ``more`` goes into it too (the oldest cursor of a 410, for instance).
    """

    def __init__(self, status: int, what: str, where: str = "", hint: str = "", **more: Any) -> None:
        super().__init__(what)
        self.status, self.what, self.where, self.hint, self.more = status, what, where, hint, more

    def body(self) -> Json:
        title = HTTPStatus(self.status).phrase
        told = {"detail": self.what, "where": self.where, "hint": self.hint}
        return {"type": "about:blank", "title": title, "status": self.status, **told, **self.more}
