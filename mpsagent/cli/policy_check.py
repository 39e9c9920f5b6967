"""``mpsagent-cli policy check``: every mistake and every warning, without an agent."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mpsagent.cli import wording
from mpsagent.cli.ask import say
from mpsagent.mps.limits import Device
from mpsagent.policy.origins import PolicyError
from mpsagent.policy.policy import Policy

DIRECTORY = Path("/etc/mpsagent")
GPU_DEADLINE = 10.0
"""Seconds for the GPUs to answer."""


def check(files: tuple[Path, ...], as_json: bool, strict: bool = False, devices: Path | None = None) -> int:
    """Print what a reload would say; the exit status. Without ``files`` those of the agent. ``devices``: GPUs as JSON,
    instead of those of this machine. ``strict``: warnings count as mistakes."""
    from mpsagent.cli.policy_drafts import read_files
    from mpsagent.policy.files import load
    from mpsagent.policy.instances import names, of
    from mpsagent.policy.sharing import WORDS
    from mpsagent.policy.syntax import syntax_error
    from mpsagent.system.policy_files import read_policy

    if files:
        texts, errors, notes = read_files(files)
    else:
        with _rights_of_the_agent():
            texts, errors = read_policy(DIRECTORY / "policy.toml", own=0)
        errors += _hidden([Path(name) for name, _ in texts])
        notes = []
    policy, mistakes = load(texts, syntax_error)
    errors += mistakes
    warnings: list[PolicyError] = []
    remarks = [f"{path} is not read: name its files too" for path in _parts_beside(files)]
    if policy is not None and not errors:
        try:
            errors, warnings, more = _of_this_machine(policy, texts, devices, None if files else DIRECTORY / "policy.d")
            remarks += more
        except (OSError, ValueError) as error:
            print(f"mpsagent-cli: {wording.safe(error, 4000)}", file=sys.stderr)
            return 2
    good = not errors and not (strict and warnings)
    sections = [of(policy, name) for name in names(policy)] if policy is not None else []
    if as_json:
        body = {
            "ok": good,
            "files": [name for name, _ in texts],
            "digest": policy.digest if policy is not None and good else None,
            "sharing": {one.sharing: WORDS[one.sharing] for one in sections} if good else None,
            "instances": {one.instance: _instance_json(one) for one in sections} if good else None,
            "errors": [one._asdict() for one in errors],
            "warnings": [one._asdict() for one in warnings],
            "notes": [*(one._asdict() for one in notes), *remarks],
        }
        print(json.dumps(body))
        return 0 if good else 2
    _tell(errors, "")
    _tell(warnings, "warning: ")
    _tell(notes, "note: an agent that runs as root refuses this file: ")
    for remark in remarks:
        say(f"note: {wording.safe(remark, 400)}")
    counts = [wording.many(len(found), word) for found, word in ((errors, "mistake"), (warnings, "warning")) if found]
    if not good:
        print(", ".join(counts) + (" (not good because of --strict)" if not errors else ""))
    else:
        read = ", ".join(wording.safe(name) for name, _ in texts)
        say(f"{read}: OK{', with ' + counts[0] if counts else ''}")
    return 0 if good else 2


def _hidden(files: Sequence[Path]) -> list[PolicyError]:
    """Return the mistakes of links into directories that the agent's unit hides from it, and not from this program."""
    from mpsagent.system.policy_files import linked

    found = [one for one in map(linked, files) if one is not None]
    if not found or shutil.which("systemctl") is None:
        return []
    words = ["systemctl", "show", "--property=ProtectHome,LoadState", "mpsagent.service"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=GPU_DEADLINE, check=False).stdout.split()
    return found if "ProtectHome=yes" in shown and "LoadState=loaded" in shown else []


@contextmanager
def _rights_of_the_agent() -> Iterator[None]:
    """Without what lets root read each file, CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: the agent's unit has neither."""
    libc, header, rights = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, rights)
    effective = rights[0]
    rights[0] &= ~0b110
    libc.capset(header, rights)
    try:
        yield
    finally:
        rights[0] = effective
        libc.capset(header, rights)


def _parts_beside(files: Sequence[Path]) -> list[Path]:
    """Directories whose parts a reload lays over one of these files, and of which none is named with it."""
    found = dict.fromkeys(one.with_suffix(".d") for one in files if one.suffix == ".toml")
    return [path for path in found if path not in {one.parent for one in files} and any(path.glob("*.toml"))]


def _instance_json(one: Policy) -> dict[str, object]:
    users, groups = list(one.only_users), list(one.only_groups)
    return {
        "devices": list(one.devices),
        "users": users,
        "groups": groups,
        "sharing": one.sharing,
        "server": one.server,
    }


def _tell(found: Sequence[PolicyError], kind: str) -> None:
    for one in found:
        line = f":{one.line}" if one.line else ""
        key = f"{wording.safe(one.key)}: " if one.key else ""
        say(f"{wording.safe(one.file)}{line}: {kind}{key}{wording.safe(one.problem, 400)}")
        if one.hint:
            say(f"    {wording.safe(one.hint, 400)}", "    ")


def surely_not_meant() -> list[PolicyError]:
    """Of the files that the agent reads, for who has just put them in force; nothing where they cannot be read."""
    from mpsagent.policy.files import load
    from mpsagent.system.policy_files import read_policy

    texts, errors = read_policy(DIRECTORY / "policy.toml", own=0)
    policy = None if errors else load(texts)[0]
    return [] if policy is None else _of_this_machine(policy, texts, None, DIRECTORY / "policy.d")[1]


def _of_this_machine(
    policy: Policy, texts: Sequence[tuple[str, str]], devices: Path | None, parts: Path | None
) -> tuple[list[PolicyError], list[PolicyError], list[str]]:
    """What this machine does not have, what is surely not meant, and notes. Raises OSError and ValueError for
    ``devices``."""
    import asyncio

    from mpsagent.cli.policy_warnings import warnings
    from mpsagent.policy.instances import names
    from mpsagent.policy.plausible import needs_devices
    from mpsagent.system.devices import from_file, probe
    from mpsagent.system.unsupported import unsupported

    remarks: list[str] = []
    found: tuple[Device, ...] = ()
    if devices is not None:
        found = from_file(str(devices))
    elif needs_devices(policy):
        answer = asyncio.run(probe(os.environ, deadline=GPU_DEADLINE))
        if isinstance(answer, str):
            remarks.append(f"not compared with GPUs: {answer}")
        else:
            found = answer
    if (
        policy.devices and len(names(policy)) == 1 and policy.devices != ("each",)
    ):  # the daemon numbers those that it is given
        chosen = [one for uuid in policy.devices for one in found if one.uuid.lower() == uuid.lower()]
        found = tuple(replace(one, ordinal=number) for number, one in enumerate(chosen)) or found
    return (
        list(asyncio.run(unsupported(policy))),
        list(asyncio.run(warnings(policy, found, texts, parts))),
        remarks,
    )
