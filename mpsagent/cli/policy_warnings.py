"""What of a good policy is surely not meant on this machine: users, groups, programs and GPUs are looked up here, and
`policy.plausible` compares. For warnings, never for decisions."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from mpsagent.cli.policy_drafts import passed_over
from mpsagent.linux.threads import in_thread
from mpsagent.mps.limits import Device
from mpsagent.policy import plausible, totals
from mpsagent.policy.identity import Identity
from mpsagent.policy.origins import PolicyError
from mpsagent.policy.policy import Policy
from mpsagent.system.hooks import refused
from mpsagent.system.names import identity_of

DEADLINE = 5.0
HOMES = ("/home/", "/root/", "/run/user/")
HIDDEN = "in a home directory, which mpsagent.service cannot see (ProtectHome=)"
SYSTEMD = Path("/run/systemd/system")
"""There where systemd is the first process."""
FIRST_UID, EVERYBODY = 1000, ("users", "nogroup", "nobody", "domain users")
"""Uids of users who log in begin there; groups that have all users."""
MOST_PEOPLE = 500
"""Users whose groups are asked for."""
MOST_LISTED = 5000
"""Entries of a directory that are listed; it may have hundreds of thousands."""


class KnownNames(NamedTuple):
    """``users`` and ``groups``: those asked for that exist, and others for comparison. ``programs``: what is wrong with
    each path; a program that is fine is not in it."""

    users: frozenset[str]
    groups: frozenset[str]
    programs: dict[str, str]


async def warnings(
    policy: Policy,
    devices: Sequence[Device],
    texts: Sequence[tuple[str, str]] = (),
    parts: Path | None = None,
    *,
    deadline: float = DEADLINE,
) -> tuple[PolicyError, ...]:
    """By file and line. ``texts``: of the policy's files; ``parts``: the directory from which its parts were read.
    After ``deadline`` seconds without what the name service would have said."""
    found = [*plausible.in_itself(policy, texts), *plausible.against_devices(policy, devices)]
    found += totals.against_devices(policy, devices)
    with suppress(TimeoutError, OSError):
        found += await in_thread(_of_this_machine, policy, parts, devices, deadline=deadline)
    return tuple(sorted(dict.fromkeys(found), key=lambda one: (one.file, one.line)))


def _of_this_machine(policy: Policy, parts: Path | None, devices: Sequence[Device]) -> list[PolicyError]:
    """May block."""
    over = [] if parts is None else passed_over(parts)
    users, groups = plausible.names_in(policy)
    here = known(users, groups, plausible.programs_in(policy))
    unknown = plausible.unknown_names(policy, here.users, here.groups)
    waiting = totals.of_users(policy, _people(policy), devices) if totals.needs_users(policy) else ()
    return [
        *over,
        *unknown,
        *_many_administrators(policy),
        *plausible.unusable_programs(policy, here.programs),
        *waiting,
    ]


def _many_administrators(policy: Policy) -> Iterator[PolicyError]:
    """Warn about a group of administrators that is the first group of several users who log in, like "users"."""
    setting = policy.settings.get(("agent", "admin_group"))
    if setting is None:
        return
    with suppress(KeyError, ValueError):
        gid = grp.getgrnam(setting.value).gr_gid
        people = {one.pw_uid for one in pwd.getpwall()[:MOST_LISTED] if one.pw_gid == gid and one.pw_uid >= FIRST_UID}
        if len(people) > 1 or setting.value in EVERYBODY:
            problem = "is a group of ordinary users: each of them may terminate all programs"
            yield setting.origin.wrong(problem, "name a group of administrators only")


def _people(policy: Policy) -> Iterator[Identity]:
    """Those whom a section names, if the name service lists them: users, and members of groups."""
    names = dict.fromkeys(path[1] for path in policy.named if path[0] == "user")
    for _, name in (path for path in policy.named if path[0] == "group"):
        with suppress(KeyError, ValueError):
            names |= dict.fromkeys(grp.getgrnam(name).gr_mem)
    for name in islice(names, MOST_PEOPLE):
        with suppress(KeyError, ValueError, OverflowError, OSError):
            yield identity_of(int(name) if name.isascii() and name.isdigit() else pwd.getpwnam(name).pw_uid)


def known(users: Iterable[str], groups: Iterable[str], programs: Iterable[str]) -> KnownNames:
    """Asks for each name itself: a directory service often lists no one. May block."""

    def there(ask: Callable[[str], object], name: str) -> bool:
        with suppress(KeyError, ValueError):
            return ask(name) is not None
        return False

    people = {name for name in users if there(pwd.getpwnam, name)}
    teams = {name for name in groups if there(grp.getgrnam, name)}
    people |= {entry.pw_name for entry in pwd.getpwall()[:MOST_LISTED]}
    teams |= {entry.gr_name for entry in grp.getgrall()[:MOST_LISTED]}
    wrong = {path: problem for path in programs if (problem := problem_of(path))}
    return KnownNames(frozenset(people), frozenset(teams), wrong)


def problem_of(path: str) -> str:
    """Why root could or should not run a program. ``path``: absolute, or a name to look for on PATH."""
    if not path.startswith("/"):
        return "" if shutil.which(path) else f"{path} is not on PATH ({os.environ.get('PATH', '')})"
    if path.startswith(HOMES) and SYSTEMD.is_dir():  # seen at a prompt, and not by the agent
        return f"{path} lies {HIDDEN}"
    return refused(path) or ""
