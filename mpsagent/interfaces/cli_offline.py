"""The verbs of the command line that need no agent: ``policy check`` and ``replay``."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from datetime import tzinfo
from pathlib import Path
from typing import Any

from mpsagent.interfaces import cli_text
from mpsagent.mps.limits import Device
from mpsagent.mps.units import parse_bytes
from mpsagent.policy.identity import Identity

Json = dict[str, Any]
DIRECTORY = Path("/etc/mpsagent")
_LARGEST = 1024 * 1024


def check(files: tuple[Path, ...], as_json: bool) -> int:
    """Print every mistake; the exit status. No file at all is the default policy, and fine."""
    from mpsagent.policy.files import load

    texts, unreadable = _texts(files or default_files())
    policy, errors = load(texts)
    found: list[Json] = [*unreadable, *(error._asdict() for error in errors)]
    digest = policy.digest if policy is not None and not found else None
    if as_json:
        print(json.dumps({"ok": not found, "files": [name for name, _ in texts], "digest": digest, "errors": found}))
        return 2 if found else 0
    for one in found:
        line = f":{one['line']}" if one["line"] else ""
        key = f"{cli_text.safe(one['key'])}: " if one["key"] else ""
        print(f"{cli_text.safe(one['file'])}{line}: {key}{cli_text.safe(one['problem'], 400)}")
        if one["hint"]:
            print(f"    {cli_text.safe(one['hint'], 400)}")
    names = ", ".join(cli_text.safe(name) for name, _ in texts) or "no files: the built-in defaults"
    print(cli_text.many(len(found), "mistake") if found else f"good: {names}")
    return 2 if found else 0


def default_files() -> tuple[Path, ...]:
    """What the agent reads, in its order."""
    first = DIRECTORY / "policy.toml"
    return (*([first] if first.exists() else []), *sorted((DIRECTORY / "policy.d").glob("*.toml")))


def _texts(files: tuple[Path, ...]) -> tuple[list[tuple[str, str]], list[Json]]:
    texts: list[tuple[str, str]] = []
    unreadable: list[Json] = []
    for file in files:
        try:
            with file.open("rb") as opened:  # one byte over the most that is read, so that it is refused as too large
                texts.append((str(file), opened.read(_LARGEST + 1).decode()))
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "is not UTF-8"
            unreadable.append(
                {"file": str(file), "line": 0, "key": "", "problem": f"cannot be read: {why}", "hint": ""}
            )
    return texts, unreadable


def replay(
    control: Path | None, server: Path | None, files: tuple[Path, ...], zone: str | None, gpu: str, as_json: bool
) -> int:
    """Print the story; the exit status."""
    from mpsagent.core.story import Story
    from mpsagent.interfaces.replay import events_of, story_json

    story = Story()
    would: Any = None
    try:
        if files:
            would = _would(files, gpu)
        for event in events_of(control, server, _zone(zone)):
            story.feed(event)
            if would is not None:
                would.feed(event)
    except (OSError, ValueError) as error:
        print(f"mpsagent-cli: {cli_text.safe(error, 4000)}", file=sys.stderr)
        return 2
    body = story_json(story.finish())
    if would is not None:
        body["would"] = would.finish()
    if as_json:
        json.dump(body, sys.stdout, indent=1)
        print()
    else:
        print("\n".join(cli_text.story(body)))
    return 0


def _zone(name: str | None) -> tzinfo | None:
    """Raises ValueError for a name that is none."""
    if name is None:
        return None
    if name.upper() == "UTC":
        from datetime import UTC

        return UTC
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)
    except (KeyError, OSError, ValueError) as error:
        raise ValueError(f"{name} is not a time zone; write it like Europe/Berlin or UTC") from error


def _would(files: tuple[Path, ...], gpu: str) -> Any:
    """The fold that says what the agent would have done. Raises ValueError for a bad policy or GPU."""
    import pwd

    from mpsagent.interfaces.would import Would
    from mpsagent.policy.files import load

    texts, unreadable = _texts(files)
    policy, errors = load(texts)
    if policy is None or unreadable:
        first = unreadable[0]["problem"] if unreadable else str(errors[0])
        raise ValueError(f"the policy is not valid: {first} (see mpsagent-cli policy check)")
    try:
        parked = pwd.getpwnam(policy.parked_user).pw_uid
    except KeyError:
        parked = 65534
    return Would(policy, _identity, _devices(gpu, max(1, len(policy.devices))), parked)


def _devices(text: str, count: int) -> list[Device]:
    memory, _, multiprocessors = text.partition(",")
    if not multiprocessors.isdecimal():
        raise ValueError(f'--gpu "{text}": write it like 80G,108 (memory, multiprocessors)')
    size = parse_bytes(memory)
    return [Device(number, f"GPU-{number}", "assumed", size, int(multiprocessors)) for number in range(count)]


def _identity(uid: int) -> Identity:
    """Who a uid is on this machine; the log may come from another."""
    import grp
    import os
    import pwd

    try:
        entry = pwd.getpwuid(uid)
    except (KeyError, OverflowError):
        return Identity(uid)
    groups: list[str] = []
    for gid in dict.fromkeys([entry.pw_gid, *os.getgrouplist(entry.pw_name, entry.pw_gid)]):
        with suppress(KeyError):
            groups.append(grp.getgrgid(gid).gr_name)
    return Identity(uid, entry.pw_name, tuple(groups))
