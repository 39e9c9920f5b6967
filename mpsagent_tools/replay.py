"""`mpsagent-cli replay`: sessions from MPS's own logs, and the same clients under another policy."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from mpsagent.api.views import session as session_json
from mpsagent.cli import ask, completions, options, report, wording
from mpsagent.cli.ask import USAGE, Json
from mpsagent.core.sessions import Session
from mpsagent.mps.limits import Device
from mpsagent.mps.units import parse_bytes
from mpsagent.policy import apart
from mpsagent.policy.policy import Policy
from mpsagent.system.names import identity_of
from mpsagent_tools import timeline, timeline_rows

UNNAMED = (
    "This log does not name all clients (a driver before 580, or a control daemon in a container). Who was let in is\n"
    "known, and not for how long; so it cannot be told either what another policy would have done."
)
_MORE = ("limits", "lease", "memory", "gap", "before", "clients")
_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option("--control", type=_file, help="Read this control.log.")
@click.option("--server", type=_file, help="Read this server.log of the same daemon.")
@click.option(
    "--both", type=_file, help="Read the output of a control daemon in the foreground (-f): both logs in one."
)
@click.option("--since", callback=options.moment, default="1d", show_default=True, metavar="TIME",
              help="Without logs, read the history from this time on.")  # fmt: skip
@click.option(
    "--until", callback=options.moment, metavar="TIME", help="Read the history until this time.  [default: now]"
)
@click.option("--policy", "files", multiple=True, type=_file, help="Show what would have happened under this policy.")
@click.option("--instance", metavar="NAME", shell_complete=completions.instances,
              help="Use this instance of the policy, if there are several.")  # fmt: skip
@click.option("--gpu", default="143155M,132", show_default=True, metavar="MEMORY,MULTIPROCESSORS",
              help="Assume this GPU with --policy.")  # fmt: skip
@timeline.pictures
@click.pass_obj
def replay(
    path: str, control: Path | None, server: Path | None, both: Path | None, since: float, until: float | None,
    files: tuple[Path, ...], instance: str | None, gpu: str, svg: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Replay logs, or the history under another policy.

    From MPS's logs, without an agent, or with --policy from the history: each client starts and works as it did, and
    agent and gate decide under the other policy. Logs of a daemon that mpsagent started are in UTC, others in local
    time, and the time of the file's last change decides. For a copied file set TZ=UTC, or TZ=Europe/Berlin.
    """
    from_log = control is not None or server is not None
    if from_log + (both is not None) != 1 and (from_log or not files):
        raise click.UsageError("give --control FILE and --server FILE, one of them, or --both FILE")
    try:
        policy = _policy(files, instance) if files else None
        devices = _devices(gpu, max(1, len(policy.devices)) if policy is not None else 1)
        if from_log or both is not None:
            body, rows, last = _of_logs(control, server, both)
        else:
            body, rows, last = _of_history(path, since, until, instance)
        users = {one.uid: identity_of(one.uid) for one in rows if one.uid is not None}
    except (OSError, ValueError) as error:
        click.echo(f"mpsagent-cli: {wording.safe(error, 4000)}", err=True)
        sys.exit(USAGE)
    names = {uid: one.name for uid, one in users.items()}
    body |= _shown(rows, last, names)
    drawn = body
    if policy is not None:
        from mpsagent_tools.policy_trial import tried

        body["would"] = None  # nothing is decided where it is not known who is at work
        if body["clients_named"]:
            drawn = body["would"] = _shown(tried(policy, rows, last, users.__getitem__, devices), last, names)
    if as_json and svg is None:
        json.dump(body, sys.stdout, indent=1)
        print()
        return
    start = min((one.came for one in rows), default=last)
    picture = timeline_rows.picture(drawn["sessions"], (), start, last, timeline.clock)
    if svg is not None:
        timeline.draw(picture, svg, as_json)
        return
    width = ask.width()
    click.echo("\n".join(report.table(body["report"], width)))
    if drawn is not body:
        shown = f"With {', '.join(map(wording.safe, files))}:"
        click.echo("\n".join(["", shown, *report.table(drawn["report"], width)]))
    click.echo("\n".join(["", *timeline.page(picture, width)]))
    if not body["clients_named"]:
        click.echo(f"\n{UNNAMED}")
    if body["unknown_lines"]:
        click.echo(f"\n{wording.many(body['unknown_lines'], 'line')} not understood")


def _of_logs(control: Path | None, server: Path | None, both: Path | None) -> tuple[Json, list[Session], float]:
    from mpsagent_tools.log_files import lines_of
    from mpsagent_tools.logged import Logged

    found = Logged()
    for line in lines_of(control, server, both):
        found.feed(line)
    rows = found.finish()
    return {"unknown_lines": found.unknown_lines, "clients_named": not found.unnamed}, rows, found.last


def _of_history(
    path: str, since: float, until: float | None, instance: str | None
) -> tuple[Json, list[Session], float]:
    read = timeline.Reader(path, "sessions", since, until)
    rows = of_one(map(_session, read.rows()), instance)
    if read.note:
        click.echo(f"mpsagent-cli: {read.note}", err=True)
    return {"unknown_lines": 0, "clients_named": True}, rows, until or ask.now().timestamp()


def of_one(rows: Iterable[Session], instance: str | None) -> list[Session]:
    """Return the rows of one instance, including those of its users' own daemons. Raises ValueError if no instance is
    given and there are several."""
    found: dict[str | None, list[Session]] = {}
    for one in rows:
        of_user = apart.split(one.instance or "")
        found.setdefault(one.instance if of_user is None else of_user[0], []).append(one)
    if instance is None and len(found) > 1:
        names = ", ".join(sorted(name for name in found if name is not None))
        raise ValueError(f"the history is of several instances: say which with --instance ({names})")
    return found.get(instance, []) if instance is not None else next(iter(found.values()), [])


def _session(one: Json) -> Session:
    """Return a session from the API's form."""
    came, passed, ended = (None if one[name] is None else datetime.fromisoformat(one[name]).timestamp()
                           for name in ("came", "began", "ended"))  # fmt: skip
    more = {name: one[name] for name in _MORE if name in one}
    assert came is not None
    return Session(one["cursor"], one["kind"], one["instance"], one["uid"], one["pid"] or 0, came, passed, ended,
                   one["outcome"], one["why"], one["job"], more)  # fmt: skip


def _shown(rows: Sequence[Session], last: float, names: Mapping[int, str | None]) -> Json:
    """Return sessions and their sums in the API's form."""
    return {"sessions": [session_json(one, last, names.get) for one in rows], "report": _sums(rows, last, names)}


def _sums(rows: Sequence[Session], last: float, names: Mapping[int, str | None]) -> Json:
    """Return the report of these sessions, from a temporary history."""
    from mpsagent.api import database

    first, end = (datetime.fromtimestamp(at).date().isoformat() for at in (rows[0].came if rows else last, last))
    with TemporaryDirectory(prefix="mpsagent-replay-") as directory:
        path = Path(directory, database.NAME)
        file = database.Database(path)
        numbered = (replace(one, number=number) for number, one in enumerate(rows, 1) if one.uid is not None)
        file.save(map(database.session_row, numbered))
        file.close()
        sums = database.report(path, first, end, "uid", last)
    return {"by": "user", "first": first, "last": end,
            "rows": [{**row, "user": names.get(int(str(row["uid"])))} for row in sums]}  # fmt: skip


def _policy(files: tuple[Path, ...], instance: str | None) -> Policy:
    """Raises ValueError for a bad one."""
    from mpsagent.cli.policy_drafts import read_files
    from mpsagent.policy.files import load
    from mpsagent.policy.instances import names, of

    texts, unreadable, _ = read_files(files, judged=False)
    policy, errors = load(texts)
    if policy is None or unreadable:
        raise ValueError(f"the policy is not valid: {[*unreadable, *errors][0]} (see mpsagent-cli policy check)")
    there = names(policy)
    section = there[0] if instance is None else instance
    if section not in there:  # each GPU of a section may have an instance, whose number is added
        section = section.rstrip("0123456789")
    if section not in there:
        raise ValueError(f"no instance {instance} in the policy: {', '.join(there)}")
    return of(policy, section)


def _devices(text: str, count: int) -> list[Device]:
    memory, _, multiprocessors = text.partition(",")
    if not multiprocessors.isdecimal():
        raise ValueError(f'--gpu "{text}": write it like 80G,108 (memory, multiprocessors)')
    size = parse_bytes(memory)
    return [Device(number, f"GPU-{number}", "assumed", size, int(multiprocessors)) for number in range(count)]
