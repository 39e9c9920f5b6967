"""What all verbs of the command line share: asking the agent, showing the answer, exit statuses."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from mpsagent.cli import client

FINE, UNHEALTHY, USAGE, UNREACHABLE, DRAINING, DENIED, NOT_FOUND, CONFLICT = range(8)
"""Exit statuses."""
_OF_ANSWERS = {403: DENIED, 404: NOT_FOUND, 409: CONFLICT, 429: UNREACHABLE, 503: UNREACHABLE}
PROBE = 1.0
"""Seconds that a probe waits for the agent: with its own start, on a busy machine too, it takes less than two."""
Json = dict[str, Any]
Text = Callable[[Json], list[str]]


def iso(at: float | None) -> str | None:
    return None if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def asked(path: str, target: str) -> tuple[Json, bytes]:
    return _answered(lambda: client.ask(path, target, 15.0))


def target(path: str, query: Mapping[str, object]) -> str:
    """What is asked for, without what is not given."""
    from urllib.parse import urlencode

    given = {name: value for name, value in query.items() if value is not None}
    return f"{path}?{urlencode(given, errors='surrogateescape')}"


def ordered(path: str, order: str, body: Any = None) -> tuple[Json, bytes]:
    """An order is the agent's own business, also while nothing can be read."""
    return _answered(lambda: client.order(path, order, body, 120.0))


def newest(path: str) -> int | None:
    """The cursor from which to watch what becomes of an order; None: nothing can be read."""
    try:
        return int(client.ask(path, "/v1/status", 15.0)[0]["history"]["newest"])
    except (client.Unreachable, client.RequestRefused):
        return None


def _answered(ask: Callable[[], tuple[Json, bytes]]) -> tuple[Json, bytes]:
    try:
        return ask()
    except client.Unreachable as gone:
        unreachable(gone)
    except client.RequestRefused as refused:
        refused_and_exit(refused)
    raise AssertionError  # both have exited


def show(path: str, target: str, as_json: bool, text: Text) -> Json:
    body, raw = asked(path, target)
    print(raw.decode().rstrip("\n") if as_json else "\n".join(text(body)))
    return body


def probe(path: str, as_json: bool) -> int:
    """Say whether all is well, or that there is no answer; the exit status."""
    import json

    problems, status, drains = ["mpsagent does not answer"], UNREACHABLE, list[Json]()
    try:
        code, raw = client.request(path, "/healthz", PROBE)
        body = json.loads(raw)
        if code in (200, 503) and isinstance(body.get("problems"), list):
            problems, status = [str(one) for one in body["problems"]], FINE if body["ok"] else UNHEALTHY
            drains = list(body.get("drains", ()))
            if status == FINE and drains:
                status = DRAINING
        elif "detail" in body:
            problems = [str(body["detail"])]
    except client.Unreachable as gone:
        problems = [str(gone)]
    except (ValueError, AttributeError, KeyError, TypeError):
        pass
    if as_json:
        print(json.dumps({"ok": status == FINE, "problems": problems, "drains": drains}))
    else:
        from mpsagent.cli.wording import draining, safe

        lines = [*problems, *(draining(one, now()) for one in drains)]
        print("\n".join(safe(one, 400) for one in lines) or "healthy")
    return status


def act(path: str, order: str, body: Any, as_json: bool) -> None:
    from mpsagent.cli import order_text

    answer, raw = ordered(path, order, body)
    if as_json:
        print(raw.decode().rstrip("\n"))
    else:
        for line in order_text.answered(answer, now()):
            say(line)
    if "unsaved" in answer:
        from mpsagent.cli.wording import safe

        why = safe(answer["unsaved"], 400)
        say(f"mpsagent-cli: This is in force, but it is not on disk and ends with the agent: {why}", err=True)
    if answer.get("ok") is False or "unsaved" in answer:
        sys.exit(UNHEALTHY)


def unreachable(gone: client.Unreachable) -> None:
    hint = "see: systemctl status mpsagent; start it: systemctl enable --now mpsagent"
    failed({"detail": str(gone), "hint": hint})
    sys.exit(UNREACHABLE)


def refused_and_exit(refused: client.RequestRefused) -> None:
    failed(refused.error or {"detail": f"status {refused.status}"})
    sys.exit(_OF_ANSWERS.get(refused.status, UNHEALTHY if refused.status >= 500 else USAGE))


_PLAIN = {
    "pid",
    "user",
    "policy",
    "server",
    "lease",
    "drain",
    "timeout",
    "instance",
    "after",
    "cursor",
    "order",
    "turn",
    "until",
    "uid",
    "active_threads",
}
"""Places of a mistake that its words name anyhow."""


def failed(error: Json) -> None:
    """Say why nothing else comes: as JSON on standard output if JSON was asked for."""
    if "--json" in sys.argv:
        import json

        print(json.dumps({"error": error}))
    else:
        complain(error)


def complain(error: Json) -> None:
    from mpsagent.cli.wording import safe

    where = f" ({safe(error['where'])})" if error.get("where") and str(error["where"]) not in _PLAIN else ""
    say(f"mpsagent-cli: {safe(error.get('detail', 'refused'), 400)}{where}", err=True)
    if error.get("hint"):
        say(f"  {safe(error['hint'], 400)}", err=True)


def say(line: str, indent: str = "  ", *, err: bool = False) -> None:
    """As wide as the terminal is; whole into a pipe, where an editor or grep reads it."""
    from textwrap import wrap

    most = width(sys.stderr if err else sys.stdout)
    parts = wrap(line, most, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    print("\n".join(parts) if len(line) > most else line, file=sys.stderr if err else sys.stdout)


MOST_COMMAND = 160
"""Letters of a command line: `python -c` has a whole program, and a pipe cuts nothing."""


COMMAND_LINES = 1.0
"""Seconds for all of them."""
_silent = set[int]()


_INTERPRETERS = frozenset({"python", "bash", "sh", "dash", "perl", "julia"})
_CODE = frozenset({"-c", "-m", "-e", "-W", "-X"})
"""Options after which no script follows, or another word first."""


def command_lines(found: list[Json]) -> list[Json]:
    """Clients with their whole command line instead of the name that the agent knows, as far as who asks may see it.
    A process can keep its command line from coming: then its name stands there, and it is not asked again."""
    from threading import Thread

    lines = dict[int, str]()
    asked = [one for one in found if one["pid"] not in _silent]
    look = Thread(target=lambda: lines.update((one["pid"], _command_line(one)) for one in asked), daemon=True)
    look.start()
    look.join(COMMAND_LINES)
    if look.is_alive():
        _silent.update([one["pid"] for one in asked if one["pid"] not in lines][:1])
    return [{**one, "command": lines.get(one["pid"]) or one["command"]} for one in found]


def _command_line(one: Json) -> str:
    """Return the command line of the process with this pid, if it is still that user's with that name, and of our pid
    namespace. The program is without its directory, and a script without its interpreter: there is little room."""
    try:
        place = f"/proc/{one['pid']}"
        with open(f"{place}/comm", "rb", 0) as name, open(f"{place}/cmdline", "rb", 0) as words:
            if os.fstat(name.fileno()).st_uid != one["uid"] or name.read(64).decode().strip() != one["command"]:
                return ""
            text = shown_command(words.read(4096).decode(errors="replace").rstrip("\0").split("\0"))
            return text if len(text) <= MOST_COMMAND else text[:MOST_COMMAND] + "…"
    except (OSError, UnicodeDecodeError):
        return ""


def shown_command(words: list[str]) -> str:
    """Return a command line as tables show it: `client sleep 600` for `python3 -IS /opt/x/client sleep 600`."""
    if words[0].rpartition("/")[2].rstrip(".0123456789") in _INTERPRETERS:
        script = next((n for n, word in enumerate(words) if n and (not word.startswith("-") or word in _CODE)), None)
        if script is not None and words[script] not in _CODE:
            words = words[script:]
    return " ".join([words[0].rpartition("/")[2], *words[1:]]).strip()


def now() -> datetime:
    return datetime.now().astimezone()


def width(file: TextIO | None = None) -> int:
    """Columns of the terminal that standard output (or ``file``) is; a pipe takes more."""
    if not (file or sys.stdout).isatty():
        return 1000
    from shutil import get_terminal_size

    return get_terminal_size((160, 24)).columns


def paint() -> Callable[[str, str], str]:
    from mpsagent.cli import answer_text

    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return answer_text.painted if coloured else answer_text.plain
