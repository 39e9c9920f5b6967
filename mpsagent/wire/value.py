"""The base of values that are declared in one place: fields with types, and the name of their kind. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, dataclass_transform


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Value:
    """A frozen value. A subclass is a dataclass without a decorator."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class OfKind(Value):
    """A value with the name of its kind in packets or in the event stream: ``class Left(FromGate, kind="left")``."""

    kind: ClassVar[str] = ""

    def __init_subclass__(cls, kind: str = "") -> None:
        super().__init_subclass__()
        cls.kind = kind
