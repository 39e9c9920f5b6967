"""The base of values that are declared in one place: fields with types, and the name of their kind. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, dataclass_transform


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Value:
    """A frozen value. A subclass is a dataclass without a decorator: ``class Left(FromGate, kind="left")``.

    ``kind``: its name in packets and in the event stream.
    """

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, kind: str = "") -> None:
        cls.kind = kind or cls.kind
        dataclass(frozen=True)(cls)
