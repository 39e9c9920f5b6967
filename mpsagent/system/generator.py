"""A systemd generator: drop-ins for units, where the policy puts directories, the control program or the admin group
elsewhere. It runs early in the boot and at each ``systemctl daemon-reload``, and never fails: a policy that it cannot
read leaves the defaults, and the agent says what is wrong with it."""

from __future__ import annotations

import sys
from pathlib import Path

from mpsagent.system.policy_files import read_policy
from mpsagent.system.unit_places import UnitPlaces, places

POLICY = "/etc/mpsagent/policy.toml"
PREPARE = "/usr/lib/mpsagent/mpsagent-directories"
DROP_IN = "50-policy.conf"
_HEAD = "# Written by mpsagent-generator from {policy}.\n"


def drop_ins(where: UnitPlaces, policy: str = POLICY) -> dict[str, str]:
    """Unit to text of its drop-in; none for what is as the units have it."""
    default, texts = UnitPlaces(), {}
    if where.public != default.public:
        prepare = f"ExecStartPre=\nExecStartPre={PREPARE} public {where.public}\n"
        for unit, name, more in (("", "control", prepare), ("-privileged", "control_privileged", "")):
            listen = f"ListenSequentialPacket=\nListenSequentialPacket={where.public}/{name}\n"
            texts[f"mpsagent-gate{unit}.socket"] = f"[Socket]\n{more}{listen}"
    known = f"MPSAGENT_PUBLIC={where.public} MPSAGENT_HIDDEN={where.hidden} MPSAGENT_LOG={where.log}"
    if (where.public, where.hidden, where.log) != (default.public, default.hidden, default.log):
        texts["mpsagent-gate.service"] = f"[Service]\nEnvironment={known}\n"
    if "mpsagent-gate.service" in texts or where.control != default.control:
        texts["mpsagent-open.service"] = f"[Service]\nEnvironment={known} MPSAGENT_PROGRAM={where.control}\n"
    if where.admins != default.admins:
        texts["mpsagent-admin.socket"] = f"[Socket]\nSocketGroup={where.admins}\n"
    # Made before the sandbox is set up, which leaves out a place that is not there.
    logs = [log for log in (where.log, *where.logs) if not f"{log}/".startswith(f"{default.log}/")]
    if logs:
        lines = [f"ExecStartPre=-+{PREPARE} log {log}\nReadWritePaths=-{log}\n" for log in logs]
        texts["mpsagent.service"] = "[Service]\n" + "".join(lines)
    return {unit: _HEAD.format(policy=policy) + text for unit, text in texts.items()}


def main(policy: str = POLICY) -> int:
    """``mpsagent-generator NORMAL EARLY LATE``, as systemd calls it."""
    if len(sys.argv) < 2:  # a default below /tmp would be another user's to prepare
        print("usage: mpsagent-generator NORMAL [EARLY LATE]", file=sys.stderr)  # noqa: T201
        return 2
    normal = Path(sys.argv[1])
    texts, errors = read_policy(Path(policy))
    for one in errors:  # what others could have written is left out, too: it names a program that root runs
        print(f"mpsagent-generator: {one}", file=sys.stderr)  # noqa: T201
    try:
        for unit, text in drop_ins(places([text for _, text in texts]), policy).items():
            directory = normal / f"{unit}.d"
            directory.mkdir(exist_ok=True)
            (directory / DROP_IN).write_text(text)
    except OSError as error:
        print(f"mpsagent-generator: {error}", file=sys.stderr)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
