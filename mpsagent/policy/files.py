"""The texts of policy files to a Policy, or to everything that is wrong with them.

``load`` is pure and never raises: each text is parsed (tomli), checked key by key (pydantic, with messages for people)
and laid over the texts before it, so that the later file wins key by key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import tomli
from pydantic import BaseModel, ValidationError

from mpsagent.mps import units
from mpsagent.policy import parse, values
from mpsagent.policy.lines import key_lines, line_of
from mpsagent.policy.policy import Origin, Path, Policy, PolicyError, Setting, build, key_text
from mpsagent.policy.sections import SECTIONS, PolicyFile, Section, SwitchSection, WhoSection, section_at

LARGEST = 256 * 1024
"""Characters in one file. With LONGEST_LINE it bounds the time that a parser can take."""
LONGEST_LINE = 4096
MOST_ERRORS = 100
"""Reported of one file."""


def load(texts: Sequence[tuple[str, str]]) -> tuple[Policy | None, list[PolicyError]]:
    """The policy that (file name, text) pairs make, in this order; or None and every mistake in all of them.

    No texts at all make the default policy. Never raises.
    """
    errors: list[PolicyError] = []
    settings: dict[Path, Setting] = {}
    instances: dict[str, Origin] = {}
    for file, text in texts:
        tables, lines, unreadable = _read(file, text)
        model, wrong = _check(file, tables, lines)
        found = [*unreadable, *wrong, *_instances(file, tables, lines, instances)]
        errors += sorted(found, key=lambda one: one.line or 10**9)
        for path, value in _flat(model, ()) if model is not None else ():
            _lay(settings, path, value, Origin(key_text(path), file, line_of(lines, path)), lines)
    if errors:
        return None, errors
    return build(settings, [file for file, _ in texts], _digest(texts)), []


def _digest(texts: Sequence[tuple[str, str]]) -> str:
    state = hashlib.sha256()
    for part in (part for pair in texts for part in pair):
        data = part.encode("utf-8", "surrogatepass")
        state.update(b"%d:" % len(data) + data)
    return state.hexdigest()[:12]


def _flat(section: BaseModel, path: Path) -> Iterator[tuple[Path, Any]]:
    """Every value that was written, by path, in the order of the file where that matters (users and groups)."""
    for name, value in section:
        if name not in section.model_fields_set:
            continue
        here = (*path, name)
        if isinstance(value, Section):
            yield from _flat(value, here)
        elif path == () and isinstance(value, dict):
            for one, inner in value.items():
                yield from _flat(inner, (*here, one))
        else:
            yield here, value


def _lay(settings: dict[Path, Setting], path: Path, value: Any, origin: Origin, lines: dict[Path, int]) -> None:
    """Put a value over what earlier files said. A memory table keeps earlier entries for devices it does not name."""
    if path[-1] == "memory":
        before = settings.get(path)
        kept = {} if before is None or values.ALL_DEVICES in value else before.value
        new = {}
        for device, amount in value.items():
            key = path if device == values.ALL_DEVICES else (*path, device)
            new[device] = Setting(amount, Origin(key_text(key), origin.file, line_of(lines, key)))
        value = {**kept, **new}
    settings[path] = Setting(value, origin)


def _read(file: str, text: str) -> tuple[dict[str, Any], dict[Path, int], list[PolicyError]]:
    """What is written in a text, and on which lines."""
    if len(text) > LARGEST:
        hint = "split it into files in policy.d, and write groups instead of single users"
        return {}, {}, [PolicyError(file, 0, "", f"is larger than {LARGEST // 1024} KiB", hint)]
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > LONGEST_LINE:
            problem = f"this line has more than {LONGEST_LINE} characters"
            return {}, {}, [PolicyError(file, number, "", problem, "break it into several lines")]
    try:
        return tomli.loads(text), key_lines(text), []
    except (ValueError, RecursionError, OverflowError) as error:
        return {}, {}, [_syntax_error(file, text, error)]


def _check(file: str, tables: dict[str, Any], lines: dict[Path, int]) -> tuple[PolicyFile | None, list[PolicyError]]:
    try:
        return PolicyFile.model_validate(tables), []
    except ValidationError as error:
        details = error.errors(include_url=False)
    found = [one for detail in details[:MOST_ERRORS] for one in _translate(detail)]
    errors = [PolicyError(file, line_of(lines, path), key_text(_clean(path)), *rest) for path, *rest in found]
    errors = list(dict.fromkeys(errors))
    if len(details) > MOST_ERRORS:
        problem = f"and {len(details) - MOST_ERRORS} mistakes more"
        errors.append(PolicyError(file, 0, "", problem, "correct these first"))
    return None, errors


def _instances(file: str, tables: dict[str, Any], lines: dict[Path, int], seen: dict[str, Origin]) -> list[PolicyError]:
    """Complaints about more than one instance, in all files together (``seen``, which is added to)."""
    errors = []
    section = tables.get("instance")
    for name in section if isinstance(section, dict) else ():
        path = ("instance", name)
        here = Origin(key_text(_clean(path)), file, line_of(lines, path))
        first = next(iter(seen.values()), None)
        if first is not None and name not in seen:
            problem = f"a second instance beside {first.key} ({first.file}:{first.line})"
            errors.append(PolicyError(file, here.line, here.key, problem, "the agent handles one for now: remove one"))
        seen.setdefault(name, here)
    return errors[:MOST_ERRORS]


# What tomli says, and what a person can do about it.
_SYNTAX_HINTS = (
    ("at end of document", "the file ends in the middle of a value: a bracket or a quote is missing"),
    ("Cannot overwrite", "the key is there twice: remove one of them"),
    ("Cannot declare", "the section is there twice: join the two"),
    ("Cannot mutate", "the table was closed before: write all its keys in one place"),
    ("Invalid value", 'a text needs quotes: "10m", "20G"'),
    ("Expected '='", 'write key = value; a name with a dot or a space needs quotes: [user."jane.doe"]'),
    ("Expected ']'", "close the section's name with ]; a name with a space or other signs needs quotes"),
    ("Invalid initial character", "a key has letters, digits, - and _; put any other name in quotes"),
    ("Invalid statement", "write key = value, [section], or a comment behind #"),
    ("Expected newline or end", "one key = value on a line; a text needs quotes on both sides"),
    ("Illegal character", "a text ends on the line on which it begins, with a quote, and has no control characters"),
    ("Unterminated", "the closing quote is missing"),
    ("Unclosed", "the closing bracket is missing"),
    ("nested more", "no value of a policy needs that"),
)


def _syntax_error(file: str, text: str, error: Exception) -> PolicyError:
    said = str(error)
    place = re.search(r" \(at line (\d+), column (\d+)\)$", said)
    line = int(place[1]) if place else text.rstrip().count("\n") + 1 if "at end of document" in said else 0
    if not isinstance(error, tomli.TOMLDecodeError) and "nested" not in said:
        return PolicyError(file, line, "", "is not TOML: a number is too long", "write numbers with a few digits")
    hint = next((hint for word, hint in _SYNTAX_HINTS if word in said), "see https://toml.io")
    said = re.sub(r" \(at .*\)$", "", said)
    said = said[:1].lower() + said[1:] + (f" (column {place[2]})" if place else "")
    return PolicyError(file, line, "", f"is not TOML: {_printable(said)}", hint)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _clean(path: Path) -> Path:
    """A path as an error may show it."""
    return tuple(_printable(part if len(part) <= parse.SHOWN else part[: parse.SHOWN - 1] + "…") for part in path)


def _translate(detail: Any) -> Iterator[tuple[Any, ...]]:
    """(path, problem, hint) for each mistake behind one error of pydantic's."""
    path = tuple(str(part) for part in detail["loc"] if part != "[key]")
    value, kind = detail["input"], detail["type"]
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, parse.Wrong):
        for fault in cause.faults:
            yield (*path, fault.key) if fault.key else path, fault.problem, fault.hint
    elif kind == "extra_forbidden":
        yield path, "unknown key", _meant(path, value)
    elif kind in ("model_type", "model_attributes_type", "dict_type"):
        yield path, f"{parse.shown(value)} is not a section", f"write [{key_text(_clean(path))}] and its keys below"
    else:
        yield path, str(detail["msg"]), "see docs/policy.md"


def _meant(path: Path, value: object) -> str:
    model = section_at(path[:-1])
    known = sorted(model.model_fields)
    near = units.nearest(path[-1][: parse.SHOWN], known)
    if near is not None:
        return f'did you mean "{near}"?'
    if model is WhoSection and path[-1] in SwitchSection.model_fields:
        return f"write switch.{path[-1]}"
    if model is WhoSection and isinstance(value, dict):
        whole = key_text((path[0], ".".join(path[1:])))
        return f"a name with a dot needs quotes: [{whole}]"
    for section, other in SECTIONS.items():
        if path[-1] in other.model_fields and other is not WhoSection:
            return f"it belongs in [{section}]"
    return "possible here: " + ", ".join(known)
