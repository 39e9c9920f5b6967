"""Values of a record in words, and the templates of sentences. Pure.

Texts of others (process names, MPS's answers) are passed on as they are: the program that prints them makes them safe.
"""

from __future__ import annotations

import re
import signal
import string
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from mpsagent.mps.units import duration_text

Record = Mapping[str, Any]
"""A record of the history: ``kind``, ``at`` and the fields of its kind."""
Names = Callable[[int], str | None]
"""Returns the name of a uid, None if it is not known."""
_USER = re.compile(r"\b(?:user|uid) (\d{1,10})\b", re.ASCII)
_USERS = re.compile(r"\busers: (\d[\d, ]*)", re.ASCII)


_PART = re.compile(r"\[([^]]*)\]")


class Words(string.Formatter):
    """The values of a record in words.

    A template names fields of the record. After a colon it says how a value is shown: ``{uid:user}`` "alice",
    ``{uid:of}`` " of alice" or nothing, ``{seconds:span}`` "1m30s", ``{why:text}`` with names of users,
    ``{signal:signal}`` "SIGTERM", ``{lost:yes|no}`` one of two texts. A part in brackets is left out if one of its
    values is missing or empty.
    """

    def __init__(self, record: Record, names: Names) -> None:
        self.record, self.names = record, names

    def __getitem__(self, key: str) -> Any:
        return self.record[key]

    def get(self, key: str) -> Any:
        return self.record.get(key)

    def __call__(self, template: str) -> str:
        """Return the template with this record's values. Raises LookupError, TypeError or ValueError if one is missing
        or of another type."""
        return self.vformat(_PART.sub(self._part, template), (), {})

    def _part(self, found: re.Match[str]) -> str:
        values = (self.record.get(name) for _, name, _, _ in self.parse(found[1]) if name is not None)
        return "" if any(one is None or one == "" for one in values) else found[1]

    def get_value(self, key: int | str, args: object, kwargs: object) -> Any:
        return self.record.get(str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        match format_spec:
            case "user":
                return user(value, self.names)
            case "of":
                return "" if value is None else f" of {user(value, self.names)}"
            case "span":
                return duration_text(float(value))
            case "text":
                return "" if value is None else named(str(value), self.names)
            case "signal":
                return _signal_name(value)
        if "|" in format_spec:
            yes, _, no = format_spec.partition("|")
            return yes if value else no
        if value is None:
            raise LookupError(format_spec)
        return str(value)


Sentence = Callable[[Words], str]


class Described:
    """A value whose records are told as sentences. ``template``: see :class:`Words`; a class whose sentence has other
    parts for other values has a method of its own."""

    template: ClassVar[str] = ""

    @classmethod
    def sentence(cls, words: Words) -> str:
        return words(cls.template)


def named(text: str, names: Names) -> str:
    """Return the text with the names of users instead of ``user 1001`` and ``users: 1001, 1002``, if they are known."""

    def one(match: re.Match[str]) -> str:
        return names(int(match[1])) or ("root" if int(match[1]) == 0 else match[0])

    def several(match: re.Match[str]) -> str:
        return "users: " + ", ".join(names(int(uid)) or uid for uid in re.findall(r"\d+", match[1]))

    return _USERS.sub(several, _USER.sub(one, text))


def user(uid: Any, names: Names) -> str:
    if not isinstance(uid, int):
        return "an unknown user"
    return names(uid) or ("root" if uid == 0 else f"user {uid}")


def _signal_name(number: Any) -> str:
    try:
        return signal.Signals(int(number)).name
    except ValueError:
        return f"signal {number}"


def worth_telling(record: Record) -> bool:
    """Return whether events and the journal show a record.

    They show an action once, with its result. A question to the control daemon and a line on a terminal are too
    frequent. Sessions have the use of a client.
    """
    kind, action = record.get("kind"), record.get("action")
    if kind == "action.done" and action == "Reconcile":
        return not record.get("ok")
    return kind not in ("action", "client.used") and action != "Tell"
