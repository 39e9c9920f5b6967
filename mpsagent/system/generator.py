"""A systemd generator: units name paths, and where they lie is the policy's to say. For a policy with another public
directory, log directory or instance name than the default it writes drop-ins for the units that need to know.

It runs early in the boot and at each ``systemctl daemon-reload``, reads the policy files and nothing else, and never
fails: a policy that it cannot read leaves the defaults, and the agent says what is wrong with it.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

POLICY = "/etc/mpsagent/policy.toml"
RUN = "/run/mpsagent"
PREPARE = "/usr/lib/mpsagent/mpsagent-directories"
DROP_IN = "50-policy.conf"
LARGEST = 256 << 10
_HEAD = "# Written by mpsagent-generator from {policy}.\n"


class Places(NamedTuple):
    """What the units need to know of the policy."""

    instance: str = "default"
    public: str = "/tmp/nvidia-mps"
    log: str = "/var/log/nvidia-mps"

    @property
    def hidden(self) -> str:
        return f"{RUN}/instances/{self.instance}/pipe"


def places(texts: list[str]) -> Places:
    """From the texts of the policy files, later ones over earlier ones. What is missing or unfit for a unit file has
    its default. Pure, never raises."""
    found: dict[str, str] = {}
    for text in texts:
        try:
            table: Any = tomllib.loads(text)
        except (ValueError, RecursionError):
            continue
        instances = table.get("instance")
        if not isinstance(instances, dict):
            continue
        for name, values in instances.items():
            if isinstance(values, dict) and re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
                found["instance"] = name
                for key, field in (("pipe_directory", "public"), ("log_directory", "log")):
                    if _plain(values.get(key)):
                        found[field] = values[key]
    return Places(**found)


def drop_ins(where: Places, policy: str = POLICY) -> dict[str, str]:
    """Unit to text of its drop-in; none for what is as the units have it."""
    default, texts = Places(), {}
    if where.public != default.public:
        prepare = f"ExecStartPre=\nExecStartPre={PREPARE} public {where.public}\n"
        for unit, name, more in (("", "control", prepare), ("-privileged", "control_privileged", "")):
            listen = f"ListenSequentialPacket=\nListenSequentialPacket={where.public}/{name}\n"
            texts[f"mpsagent-gate{unit}.socket"] = f"[Socket]\n{more}{listen}"
    if where != default:
        known = f"MPSAGENT_PUBLIC={where.public} MPSAGENT_HIDDEN={where.hidden} MPSAGENT_LOG={where.log}"
        for unit in ("mpsagent-gate.service", "mpsagent-open.service"):
            texts[unit] = f"[Service]\nEnvironment={known}\n"
    if where.log != default.log:
        # Made before the sandbox is set up, which leaves out a place that is not there.
        texts["mpsagent.service"] = (
            f"[Service]\nExecStartPre=-+{PREPARE} log {where.log}\nReadWritePaths=-{where.log}\n"
        )
    return {unit: _HEAD.format(policy=policy) + text for unit, text in texts.items()}


def read(policy: str = POLICY) -> list[str]:
    """The texts of the policy file and of policy.d beside it, in the agent's order."""
    path, texts = Path(policy), []
    for file in [path, *sorted(path.with_name("policy.d").glob("*.toml"))]:
        try:
            if file.is_file():
                with file.open("rb") as opened:
                    texts.append(opened.read(LARGEST).decode("utf-8", "replace"))
        except OSError as error:
            print(f"mpsagent-generator: {file}: {error.strerror}", file=sys.stderr)  # noqa: T201
    return texts


def main(policy: str = POLICY) -> int:
    """``mpsagent-generator NORMAL EARLY LATE``, as systemd calls it."""
    normal = Path(sys.argv[1] if len(sys.argv) > 1 else "/tmp")
    try:
        for unit, text in drop_ins(places(read(policy)), policy).items():
            directory = normal / f"{unit}.d"
            directory.mkdir(exist_ok=True)
            (directory / DROP_IN).write_text(text)
    except OSError as error:
        print(f"mpsagent-generator: {error}", file=sys.stderr)  # noqa: T201
    return 0


def _plain(value: Any) -> bool:
    """An absolute path without anything that a unit file would read in another way."""
    return isinstance(value, str) and re.fullmatch(r"(/[A-Za-z0-9_.+@-]+)+", value) is not None and ".." not in value


if __name__ == "__main__":
    sys.exit(main())
