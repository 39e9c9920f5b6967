"""The texts of policy files to a Policy, or to everything that is wrong with them.

``load`` is pure and never raises: each text is parsed (tomli), checked key by key (`check`, with words for people) and
laid over the texts before it, so that the later file wins key by key.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import tomli

from mpsagent.policy import totals, values
from mpsagent.policy.check import MOST_ERRORS as MOST_ERRORS
from mpsagent.policy.check import Checked, check, shown_path
from mpsagent.policy.instances import mistakes
from mpsagent.policy.lines import key_lines, line_of
from mpsagent.policy.origins import Origin, Path, PolicyError, Setting, key_text, printable
from mpsagent.policy.policy import Policy, build

LARGEST = 256 * 1024
"""Characters in one file. With LONGEST_LINE it bounds the time that a parser can take."""
LONGEST_LINE = 4096
MOST_INSTANCES = 64
Explain = Callable[[str, str, Exception], PolicyError]


def not_toml(file: str, text: str, error: Exception) -> PolicyError:
    """In the parser's words; ``policy check`` has better ones (`syntax`)."""
    said = str(error)
    place = re.search(r"\(at line (\d+)", said)
    line = int(place[1]) if place else text.rstrip().count("\n") + 1 if "at end of document" in said else 0
    problem = f"is not TOML: {printable(said[:200])}"
    return PolicyError(file, line, "", problem, "mpsagent-cli policy check says what to do about it")


def load(texts: Sequence[tuple[str, str]], explain: Explain = not_toml) -> tuple[Policy | None, list[PolicyError]]:
    """The policy that (file name, text) pairs make, in this order, or every mistake in them; of none the defaults.
    ``explain``: why a text is not TOML."""
    errors: list[PolicyError] = []
    settings: dict[Path, Setting] = {}
    named: dict[Path, Origin] = {}
    for file, text in texts:
        tables, lines, unreadable = _read(file, text, explain)
        checked = check(tables)
        found = [*unreadable, *_mistakes(file, checked, lines)]
        for path in checked.named:
            named.setdefault(path, Origin(key_text(shown_path(path)), file, line_of(lines, path)))
        errors += sorted(found, key=lambda one: one.line or 10**9)
        for path, value in checked.values:
            _lay(settings, path, value, Origin(key_text(path), file, line_of(lines, path)), lines)
    if errors:
        return None, errors
    if sum(path[0] == "instance" for path in named) > MOST_INSTANCES:
        return None, [PolicyError(texts[-1][0], 0, "", f"has more than {MOST_INSTANCES} instances", "name fewer")]
    policy = build(settings, named, [file for file, _ in texts], _digest(texts))
    errors = [*mistakes(policy), *totals.mistakes(policy)]
    return (None, errors[:MOST_ERRORS]) if errors else (policy, [])


def _digest(texts: Sequence[tuple[str, str]]) -> str:
    state = hashlib.sha256()
    for part in (part for pair in texts for part in pair):
        data = part.encode("utf-8", "surrogatepass")
        state.update(b"%d:" % len(data) + data)
    return state.hexdigest()[:12]


def _lay(settings: dict[Path, Setting], path: Path, value: Any, origin: Origin, lines: dict[Path, int]) -> None:
    """Put a value over what earlier files said. A memory table keeps earlier entries for devices it does not name."""
    if path[-1] == "memory_limit":
        before = settings.get(path)
        kept = {} if before is None or values.ALL_DEVICES in value else before.value
        new = {}
        for device, amount in value.items():
            key = path if device == values.ALL_DEVICES else (*path, device)
            new[device] = Setting(amount, Origin(key_text(key), origin.file, line_of(lines, key)))
        value = {**kept, **new}
    settings[path] = Setting(value, origin)


def _read(file: str, text: str, explain: Explain) -> tuple[dict[str, Any], dict[Path, int], list[PolicyError]]:
    """What is written in a text, and on which lines."""
    if len(text) > LARGEST:
        hint = "split it into files in policy.d, and write groups instead of single users"
        return {}, {}, [PolicyError(file, 0, "", f"is larger than {LARGEST // 1024} KiB", hint)]
    if text.startswith("\ufeff"):
        hint = "save it as UTF-8 without BOM: sed -i '1s/^\\xef\\xbb\\xbf//' FILE"
        return {}, {}, [PolicyError(file, 1, "", "begins with a byte order mark (BOM), which TOML does not know", hint)]
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > LONGEST_LINE:
            problem = f"this line has more than {LONGEST_LINE} characters"
            return {}, {}, [PolicyError(file, number, "", problem, "break it into several lines")]
    try:
        return tomli.loads(text), key_lines(text), []
    except (ValueError, RecursionError, OverflowError) as error:
        return {}, {}, [explain(file, text, error)]


def _mistakes(file: str, checked: Checked, lines: dict[Path, int]) -> list[PolicyError]:
    errors = [
        PolicyError(file, line_of(lines, one.path), key_text(shown_path(one.path)), one.problem, one.hint)
        for one in checked.mistakes
    ]
    if checked.more:
        errors.append(PolicyError(file, 0, "", f"and {checked.more} more mistakes", "correct these first"))
    return list(dict.fromkeys(errors))
