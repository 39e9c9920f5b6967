"""Where things lie that units name, by the texts of a policy, also of one that is wrong."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import tomli

from mpsagent.policy.parse import SHARED

RUN = "/run/mpsagent"


class UnitPlaces(NamedTuple):
    """What the units need to know of the policy: ``instance``, ``log`` and ``control`` are those of the first instance;
    ``logs`` the log directories of the others that are not below the default one."""

    instance: str = "default"
    public: str = "/tmp/nvidia-mps"
    log: str = "/var/log/nvidia-mps"
    control: str = "nvidia-cuda-mps-control"
    admins: str = "mpsagent-admin"
    logs: tuple[str, ...] = ()

    @property
    def hidden(self) -> str:
        return f"{RUN}/instances/{self.instance}/pipe"


def places(texts: list[str]) -> UnitPlaces:
    """From the texts of the policy files, later ones over earlier ones. What is missing or unfit for a unit file has
    its default. Pure, never raises."""
    found: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {}
    for text in texts:
        try:
            table: Any = tomli.loads(text)
        except (ValueError, RecursionError):
            continue
        agent, instances = table.get("agent"), table.get("instance")
        if isinstance(agent, dict) and _name(agent.get("admin_group")):
            found["admins"] = agent["admin_group"]
        for name, values in instances.items() if isinstance(instances, dict) else ():
            if isinstance(values, dict) and re.fullmatch(r"[A-Za-z0-9_.-]{1,60}", name):
                sections.setdefault(name, {}).update(values)
    for number, (name, values) in enumerate(sections.items()):
        each, log = values.get("devices") == ["each"], values.get("log_directory")
        log = log if _plain(log) else None
        if _plain(values.get("pipe_directory")):
            found["public"] = values["pipe_directory"]
        if number:
            found["logs"] = (*found.get("logs", ()), *([log] if log is not None else []))
            continue
        found["instance"] = f"{name}0" if each else name
        if each and log is not None:
            log = f"{log}/0"
        if log is not None:
            found["log"] = log
        elif each or len(sections) > 1:
            found["log"] = f"{UnitPlaces().log}/{found['instance']}"
        program = values.get("control_daemon_path")
        if isinstance(program, str) and (_plain(program) or _name(program)):
            found["control"] = program
    return UnitPlaces(**found)


def _name(value: Any) -> bool:
    """Of a group, or of a program on PATH."""
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", value) is not None


def _plain(value: Any) -> bool:
    """An absolute path without anything that a unit file would read in another way."""
    fit = isinstance(value, str) and re.fullmatch(r"(/[A-Za-z0-9_.+@-]+)+", value) is not None and ".." not in value
    return fit and value not in SHARED
