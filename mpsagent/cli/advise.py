"""`mpsagent-cli policy advise`: what the history says for another way of sharing and other limits."""

from __future__ import annotations

import json
from textwrap import wrap

import click

from mpsagent.cli import ask, options
from mpsagent.cli.ask import Json
from mpsagent.cli.timeline import Reader


@click.command()
@click.option("--since", callback=options.moment, default="7d", show_default=True, metavar="TIME",
              help='"2d" for two days ago, 2026-11-22, "2026-11-22 08:00".')  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.pass_obj
def advise(path: str, since: float, as_json: bool) -> None:
    """Which way of sharing and which limits would have served better.

    By the history: who waited, who was at work at the same time, how much of the GPU was handed out. Changes nothing.
    """
    from mpsagent.cli import advice
    from mpsagent.policy import apart

    status = ask.asked(path, "/v1/status")[0]
    read = Reader(path, "sessions", since, None)
    sessions = list(read.rows())
    loaded = len([*Reader(path, "events", since, None, "policy.loaded").rows()])
    found = []
    parts = status.get("instances") or [status]
    names = {part.get("name") for part in parts}

    def section(session: Json) -> str | None:
        """Of a session's instance, which may be a user's of one that is apart."""
        instance = session["instance"]
        of = None if instance is None or instance in names else apart.split(instance)
        return instance if of is None else of[0]

    for part in parts:
        name = part.get("name")
        mine = [one for one in sessions if section(one) in (None, name)]
        found.append({"instance": name, **advice.advise(advice.seen(mine, loaded), part["mode"]["sharing"])})
    if as_json:
        click.echo(json.dumps({"note": read.note or None, "instances": found}))
        return
    for number, one in enumerate(found):
        click.echo("\n".join(([""] if number else []) + page(one)))
    if read.note:
        click.echo(f"mpsagent-cli: {read.note}", err=True)


def page(one: Json) -> list[str]:
    """For people."""
    from mpsagent.cli.advice import CLIENTS, HOURS
    from mpsagent.cli.answer_text import PAGE
    from mpsagent.cli.wording import many, safe
    from mpsagent.mps.units import duration_text

    facts = one["facts"]
    name = f"{safe(one['instance'])}: " if one["instance"] else ""
    lines = [
        f'{name}sharing = "{one["sharing"]}", {facts["hours"]:g} hours on record',
        f"{many(facts['clients'], 'client')} of {many(facts['users'], 'user')}, "
        f"{duration_text(facts['busy_seconds'])} with one at work, {facts['threads_in_use_percent']:g} % of the "
        f"threads in use then",
        f"usually at most {many(facts['users_at_once_usual'], 'user')} at once; users waited "
        f"{duration_text(facts['waited_seconds'])}, the longest {duration_text(facts['longest_wait_seconds'])}; "
        f"{many(facts['faults'], 'fault')}",
    ]
    if facts["policies_loaded"] > 1:
        lines.append(f"policies were loaded {facts['policies_loaded']} times: what they had may have changed")
    if not one["enough"]:
        lines.append(f"Too little to advise anything: that takes {CLIENTS} clients in {HOURS:g} hours at least.")
    elif not one["advice"]:
        lines.append("Nothing that would have served better is to be seen.")
    for row in one["advice"]:
        lines += ["", row["what"], f"  why: {row['why']}", f"  costs: {row['cost']}"]
    found: list[str] = []
    for line in lines:
        indent = "  " if line.startswith("  ") else ""
        found += wrap(line, PAGE, subsequent_indent=f"{indent}  ", break_on_hyphens=False) or [""]
    return found
