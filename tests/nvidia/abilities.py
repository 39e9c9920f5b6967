"""What the MPS of a driver can do, by the driver's version: the table of docs/mps-field-guide.md. A driver between the
last without an ability and the first with it counts as without, unless ``nvidia-cuda-mps-control -h`` lists it."""

from __future__ import annotations

from typing import NamedTuple

from mpsagent.mps.versions import listed


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


def able(driver: str, help_text: str = "") -> frozenset[str]:
    """Names of ``ROWS`` that driver ``535.261.03`` has. ``help_text``: what ``-h`` printed."""
    branch, said = int(driver.split(".")[0]), listed(help_text)
    has = {name: row.listed in said if said and row.listed else branch >= row.since for name, row in ROWS.items()}
    return frozenset(name for name, there in has.items() if there)
