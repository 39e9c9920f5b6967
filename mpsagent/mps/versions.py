"""What the MPS of a driver can do, by the driver's version. Pure.

Each row says with which driver an ability was seen first and with which it was missing last; where each was tried
stands in docs/mps-field-guide.md. A driver between the two may or may not have it: it counts as missing and is named
``unsure``. The list of commands that ``nvidia-cuda-mps-control -h`` prints (driver 580 does, 470 to 550 do not) settles
those.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_VERSION = re.compile(r"(\d{1,5})(?:\.\d{1,5}){0,3}", re.ASCII)


class Ability(NamedTuple):
    """``since``: the first driver with which it was seen. ``missing``: the last with which it was tried and is missing
    (0: it was never missing). ``listed``: how ``-h`` names it, where it does."""

    since: int
    missing: int
    source: str
    listed: str = ""


ROWS: dict[str, Ability] = {
    "memory_limits": Ability(
        535, 470, "recording 10: set_default_device_pinned_mem_limit", "set_default_device_pinned_mem_limit"
    ),
    "terminate_client": Ability(535, 470, "recording 10", "terminate_client"),
    "client_priority": Ability(535, 470, "recording 10", "set_default_client_priority"),
    "processes": Ability(535, 470, "recording 10: the command ps", "ps"),
    "quit_timeout": Ability(535, 470, "recording 10: `quit -t N`; 470 takes it for `quit`"),
    "server_status": Ability(550, 535, "recording 10: the command get_server_status", "get_server_status"),
    "pid_file": Ability(550, 535, "recording 10: nvidia-cuda-mps-control.pid"),
    "defaults_protected": Ability(
        550, 535, "recording 10: users may not set the defaults, and root only at control_privileged"
    ),
    "multiuser_server": Ability(
        580, 550, "recordings 02 and 10: --multiuser-server, exit status 1 before", "--multiuser-server"
    ),
    "device_query": Ability(580, 550, "recording 01: listed by -h", "device_query"),
    "version_line": Ability(580, 550, "recordings 07 and 10: `CUDA MPS Control binary version` in control.log"),
    "clients_named": Ability(580, 550, "recordings 01 to 07; libcuda of 550: pids of clients in server.log"),
}


def places(driver: int) -> int:
    """Contexts that a server takes on a device: 48 since Volta (recording 02, R13; 580 on two H200), 60 from 590 on by
    NVIDIA's pages."""
    return 60 if driver >= 590 else 48


class Abilities(NamedTuple):
    """What this driver's MPS can do (names of ``ROWS``). What is not known to be there counts as missing; ``unsure``:
    this driver was never asked for it, it lies between the last without and the first with it. ``driver``: its branch
    (535 for 535.261.03); None when it is not known."""

    driver: int | None
    has: frozenset[str]
    unsure: frozenset[str]


def of(driver: str | None, help_text: str = "") -> Abilities:
    """The abilities of driver ``535.261.03``; ``help_text`` is what ``nvidia-cuda-mps-control -h`` printed.

    A text that is no version gives what ``-h`` lists, and nothing beyond it.
    """
    branch = _branch(driver)
    listed = _listed(help_text)
    has, unsure = set(), set()
    for name, row in ROWS.items():
        if listed is not None and row.listed:
            has |= {name} if row.listed in listed else set()
        elif branch is not None and branch >= row.since:
            has.add(name)
        elif branch is None or branch > row.missing:
            unsure.add(name)
    return Abilities(branch, frozenset(has), frozenset(unsure))


def _branch(driver: str | None) -> int | None:
    match = _VERSION.fullmatch((driver or "").strip())
    return int(match[1]) if match else None


def _listed(help_text: str) -> set[str] | None:
    """The options and commands that the help names; None when it lists none (drivers before 580)."""
    if "COMMAND" not in help_text:
        return None
    return set(re.findall(r"(?m)^ {0,8}(?:-\w,)?(-{0,2}[a-z][a-z_-]*)", help_text))
