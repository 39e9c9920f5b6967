"""`mpsagent-cli doctor`: what goes wrong in practice is looked for, and each finding says how to mend it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from textwrap import wrap
from typing import NamedTuple

import click

from mpsagent.cli import answer_text, checkup, client, wording
from mpsagent.cli.ask import FINE, UNHEALTHY, UNREACHABLE, Json, now
from mpsagent.cli.checkup import NOTE, OK, PROBLEM, WARNING, Finding
from mpsagent.cli.policy_check import surely_not_meant
from mpsagent.core.words import named
from mpsagent.linux.threads import in_thread
from mpsagent.policy.keys import default

ANSWER = 5.0
"""Seconds for the agent to answer a question."""
CHECK = 20.0
"""Seconds for one check."""
FUTURE = 5.0
"""Seconds that the newest event may lie in the future."""


class _Seen(NamedTuple):
    """What the agent says; ``status`` None: it does not answer. ``settings``: by key, as the policy has them."""

    status: Json | None
    settings: Json
    clients: list[Json]
    events: list[Json]

    def setting(self, name: str) -> str:
        """Of the instance."""
        keys = [key for key in self.settings if key.startswith("instance.") and key.endswith(f".{name}")]
        return str(self.settings[keys[0]]["value"] if keys else default("instance", name))


def doctor(path: str, as_json: bool, strict: bool) -> int:
    """Print the findings; the exit status. ``strict``: warnings count as problems."""
    seen = _ask(path)
    once: dict[str, Finding] = {}  # what the agent says is not said again
    for one in _findings(path, seen):
        once.setdefault(named(one.what, _no_name), one)
    findings = list(once.values())
    counts = {grade: sum(one.grade == grade for one in findings) for grade in (PROBLEM, WARNING, NOTE)}
    good = not counts[PROBLEM] and not (strict and counts[WARNING])
    if as_json:
        click.echo(json.dumps({"ok": good, "findings": [one._asdict() for one in findings]}))
    else:
        for one in findings:
            click.echo("\n".join(_lines(one)))
        found = [wording.many(count, grade) for grade, count in counts.items() if count]
        click.echo(", ".join(found) or "nothing is wrong")
    return UNREACHABLE if seen.status is None else FINE if good else UNHEALTHY


def _no_name(uid: int) -> None:
    """A name service may be what is wrong, so none is asked; root is root all the same."""


def _lines(one: Finding) -> list[str]:
    head = f"{one.grade:<8} "
    room = answer_text.PAGE - len(head)
    lines = wrap(f"{one.topic}: {wording.safe(named(one.what, _no_name), 600)}", room, break_on_hyphens=False)
    lines += (
        wrap(f"-> {wording.safe(one.do, 400)}", room, subsequent_indent="   ", break_on_hyphens=False) if one.do else []
    )
    return [(head if number == 0 else " " * len(head)) + line for number, line in enumerate(lines)]


def _ask(path: str) -> _Seen:
    def get(target: str) -> Json:
        found: Json = client.ask(path, target, timeout=ANSWER)[0]
        return found

    try:
        return _Seen(
            get("/v1/status"), get("/v1/policy")["sections"], get("/v1/clients")["clients"],
            get("/v1/events?limit=1")["events"],
        )  # fmt: skip
    except (client.Unreachable, client.RequestRefused):
        return _Seen(None, _settings_on_disk(), [], [])


def _settings_on_disk() -> Json:
    """Those of the policy files, when no agent says which are in force."""
    from mpsagent.cli.policy_check import DIRECTORY
    from mpsagent.policy.files import load
    from mpsagent.system.policy_files import read_policy

    policy, _ = load(read_policy(DIRECTORY / "policy.toml", own=0)[0])
    return {} if policy is None else policy.sections()


def _findings(path: str, seen: _Seen) -> Iterator[Finding]:
    public, directory, control = map(seen.setting, ("pipe_directory", "log_directory", "control_daemon_path"))
    status = seen.status
    daemons, count, logs = list[int](), 0, [directory]
    if status is not None:
        instances = status["instances"]
        daemons = [one["pid"] for part in instances for one in [part["control"], *part["servers"]] if one is not None]
        daemons += [one["control"] for part in instances for one in part["daemons"] if one["control"]]
        count = min(len(part["devices"]) for part in instances)
        logs = [part["log_directory"] for part in instances]
        logs += [f"{part['log_directory']}/u{one['uid']}" for part in instances for one in part["daemons"]]
    limited = [one["pid"] for one in seen.clients if one["limits"] and one["limits"]["memory"]]
    checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("mpsagent", lambda: _agent(path, seen)),
        ("programs", lambda: checkup.programs(control)),
        ("compute mode", lambda: checkup.compute_mode(status["devices"] if status else ())),
        ("driver", lambda: checkup.driver(bool(status and status["devices"]))),
        ("PyTorch", lambda: checkup.device_count(count)),
        ("public directory", lambda: checkup.public_directory(public)),
        ("other daemons", lambda: _others(public, daemons, control)),
        ("programs", lambda: checkup.replaced(daemons)),
        ("logs", lambda: (one for log in logs for one in checkup.logs(log, daemons))),
        ("logs", lambda: (one for log in logs for one in checkup.log_rotation(log))),
        ("environment", lambda: checkup.environment_files(public)),
        ("processes", lambda: checkup.processes(public, daemons)),
        ("JAX", lambda: checkup.jax(limited)),
        ("units", checkup.units),
        ("units", checkup.agents_command),
        ("clock", checkup.clock),
    ]
    for topic, check in checks:
        try:
            yield from asyncio.run(in_thread(lambda check=check: list(check()), deadline=CHECK))
        except TimeoutError:
            what = f"could not be looked at within {CHECK:g} s: something does not answer, or a user's process keeps "
            yield Finding(WARNING, topic, f"{what}who reads it waiting, as it does with `ps`")
        except OSError as error:
            yield Finding(WARNING, topic, f"could not be looked at: {error}")
    if os.geteuid() != 0:
        yield Finding(NOTE, "doctor", "processes of other users were not looked at", "run it as root")


def _agent(path: str, seen: _Seen) -> Iterator[Finding]:
    status = seen.status
    if status is None:
        yield Finding(PROBLEM, "mpsagent", f"no answer on {path}", "systemctl status mpsagent")
        return
    if status["health"]["ok"]:
        controls = [part["control"] for part in status["instances"] if part["control"]]
        version = controls[0]["version"] if controls else None
        mps = f", MPS of CUDA {version // 1000}.{version % 1000 // 10}" if isinstance(version, int) else ""
        yield Finding(OK, "mpsagent", f"{status['agent']['version']}{mps}, healthy")
    for one in status["health"]["problems"]:
        yield _later(one) or Finding(PROBLEM, "mpsagent", one["what"], one["do"])
    for error in status["policy"]["errors"]:
        yield Finding(PROBLEM, "policy", error, "mpsagent-cli policy check")
    for warning in surely_not_meant():
        yield Finding(WARNING, "policy", f"{warning._replace(hint='')}", warning.hint)
    for one in status["not_guaranteed"]:
        where = f"{one['instance']}: " if "instance" in one else ""
        yield Finding(NOTE, "not sure", where + one["what"], one["do"])
    for part in status["instances"]:
        if part["mode"]["why"]:
            yield Finding(NOTE, "sharing", part["mode"]["why"])
    if seen.events and _ahead(seen.events[-1]) > FUTURE:
        what = f"the newest event lies {_ahead(seen.events[-1]):.0f} s in the future: the clock was set back"
        yield Finding(WARNING, "clock", what, "timedatectl set-ntp true")


def _later(problem: Json) -> Finding | None:
    """Return what to wait for if a program that the agent has missed is there by now."""
    program, _, _ = problem["what"].partition(" is not installed")
    found = None if program == problem["what"] else shutil.which(program)
    if found is None:
        return None
    what = f"{program} is there now ({found}), and was not before"
    do = "the agent tries again within a minute, or now: systemctl restart mpsagent"
    return Finding(WARNING, "mpsagent", what, do)


def _ahead(event: Json) -> float:
    from datetime import datetime

    return (datetime.fromisoformat(event["at"]) - now()).total_seconds()


def _others(public: str, own: list[int], control: str) -> Iterator[Finding]:
    from mpsagent.system.control_search import foreign

    for one in asyncio.run(foreign(public, own, control)):
        yield Finding(PROBLEM if one.public else NOTE, "other daemons", one.text(), one.command() if one.public else "")
