"""`mpsagent-cli policy advise`: reasons in the history for another way of sharing and other limits.

Waiting is counted for each user: a user with ten waiting processes counts once, and two users who wait at the same time
count twice.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import accumulate
from textwrap import wrap

import click

from mpsagent.cli import ask, options
from mpsagent.cli.ask import Json
from mpsagent.cli.wording import many, safe
from mpsagent.mps.units import duration_text, limit_text
from mpsagent_tools.timeline import Reader

CLIENTS, HOURS = 20, 12.0
"""Fewer clients, or fewer hours between the first and the last event, are not enough to judge a policy."""
MUCH, LONG = 0.05, 600.0
"""Waiting is worth a change from this part of the time in use, and these seconds, on."""
ALONE, HANDED = 0.9, 70.0
"""A user is nearly always alone from this part of the time in use on; less than this share in percent is little."""
MEMORY = 0.5
"""A client that uses less than this part of its memory limit needs only half of the limit."""


@click.command()
@click.option("--since", callback=options.moment, default="7d", show_default=True, metavar="TIME",
              help='Start at this time: "2d" for two days ago, 2026-11-22, "2026-11-22 08:00".')  # fmt: skip
@options.json
@click.pass_obj
def advise(path: str, since: float, as_json: bool) -> None:
    """Recommend a way of sharing and limits from the history.

    It looks at waiting times, at users who worked at the same time, and at the unused part of the GPU. It changes
    nothing.
    """
    from mpsagent.policy import apart

    status = ask.asked(path, "/v1/status")[0]
    read = Reader(path, "sessions", since, None)
    sessions = list(read.rows())
    loaded = len([*Reader(path, "events", since, None, "policy.loaded").rows()])
    parts = {part.get("name"): part["mode"]["sharing"] for part in status.get("instances") or [status]}
    mine: dict[str | None, list[Json]] = {name: [] for name in parts}
    for one in sessions:  # that of a user apart has the name of its section and the uid
        instance = one["instance"]
        if instance not in parts and (of := apart.split(instance or "")) is not None:
            instance = of[0]
        for name in parts if instance is None else {instance} & parts.keys():
            mine[name].append(one)
    found = [{"instance": name, **judged(facts(mine[name], loaded), sharing)} for name, sharing in parts.items()]
    if as_json:
        click.echo(json.dumps({"note": read.note or None, "instances": found}))
        return
    click.echo("\n\n".join("\n".join(page(one)) for one in found))
    if read.note:
        click.echo(f"mpsagent-cli: {read.note}", err=True)


def facts(sessions: Iterable[Json], policies: int = 0) -> Json:
    """Return the figures of one instance.

    ``users_at_once_usual``: the number of users at work or waiting that was not exceeded in 95 % of the time in use.
    ``threads_in_use_percent``: at most 100. ``waited_behind_others``: waiting while another user was at work.
    ``turns_would_cost``: waiting of the users at work at the same time, if they had taken turns. ``fullest``: the
    client nearest to its limit.
    """
    sums, at_work, waiting = Counter[str](), Counter[int](), Counter[int]()
    wanted, times = defaultdict[int, float](float), defaultdict[str, float](float)
    steps: list[tuple[float, int, int, float, int]] = []  # at, uid, clients more, percent more, waiting more
    used: list[tuple[float, int, int]] = []
    threads, most, longest, users = 0.0, 0, 0.0, set[int]()
    for one in sessions:
        sums["faults"] += one["kind"] == "fault"
        if one["kind"] != "client" or one["outcome"] == "refused":
            continue
        came, uid, longest = datetime.fromisoformat(one["came"]).timestamp(), one["uid"], max(longest, one["waited"])
        passed = came + one["waited"]
        steps += [(came, uid, 0, 0.0, 1), (passed, uid, 0, 0.0, -1)]
        if one["began"] is not None:
            limits = one.get("limits") or {}
            percent = float(limits.get("threads", 100.0))
            steps += [(passed, uid, 1, percent, 0), (passed + one["worked"], uid, -1, -percent, 0)]
            users.add(uid)
            sums.update(["clients", one["outcome"]])
            if one.get("memory") and (limit := max((limits.get("memory") or {}).values(), default=0)):
                used.append((one["memory"] / limit, one["memory"], limit))
    steps.sort()
    for number, (at, uid, clients, percent, waits) in enumerate(steps[:-1]):
        at_work[uid] += clients
        waiting[uid] += waits
        threads += percent
        if (seconds := steps[number + 1][0] - at) <= 0:
            continue
        busy, queue = +at_work, +waiting
        times["waited"] += seconds * len(queue)
        if busy:
            most = max(most, len(busy))
            wanted[len(busy | queue)] += seconds
            times["busy"] += seconds
            times["alone"] += seconds * (len(busy) == 1)
            times["turns_would_cost"] += seconds * (len(busy) - 1)
            times["waited_behind_others"] += seconds * sum(len(busy) > (one in busy) for one in queue)
            times["handed"] += seconds * min(100.0, threads)
    counts = sorted(wanted)
    so_far = zip(counts, accumulate(wanted[one] for one in counts), strict=True)
    fullest = max(used, default=None)
    return {
        "hours": round((steps[-1][0] - steps[0][0]) / 3600, 1) if steps else 0.0, "users": len(users),
        "users_at_once_usual": next((one for one, seconds in so_far if seconds >= 0.95 * times["busy"]), 0),
        "users_at_once_most": most, "longest_wait_seconds": round(longest),
        "threads_in_use_percent": round(times["handed"] / (times["busy"] or 1.0), 1),
        **{f"{name}_seconds": round(times[name])
           for name in ("busy", "alone", "waited", "waited_behind_others", "turns_would_cost")},
        "clients": sums["clients"], "faults": sums["faults"], "faulted": sums["faulted"], "forced": sums["ended"],
        "policies_loaded": policies,
        "fullest": fullest and {"used": fullest[1], "limit": fullest[2], "clients": len(used)},
    }  # fmt: skip


def judged(found: Json, sharing: str) -> Json:
    """Return the figures and the advice for an instance that has this ``sharing``.

    Each advice has ``what``, ``why`` and ``cost``. The list is empty if the policy cannot be improved.
    """
    enough = found["clients"] >= CLIENTS and found["hours"] >= HOURS
    advice = [*_advice(found, sharing)] if enough else []
    return {"sharing": sharing, "enough": enough, "facts": found,
            "advice": [dict(zip(("what", "why", "cost"), one, strict=True)) for one in advice]}  # fmt: skip


def _advice(found: Json, sharing: str) -> Iterator[tuple[str, str, str]]:
    busy, waited, behind, longest, overlap = (
        duration_text(found[f"{name}_seconds"])
        for name in ("busy", "waited", "waited_behind_others", "longest_wait", "turns_would_cost")
    )
    usual, faults, days = found["users_at_once_usual"], found["faults"], max(found["hours"] / 24, 1.0)
    each, much = max(1, round(100 / max(1, usual))), max(LONG, MUCH * found["busy_seconds"])
    if sharing == "turns":
        if found["waited_behind_others_seconds"] >= much:
            yield (
                f'sharing = "one-server", active_threads = "{each}%" in [limits]',
                f"users waited {behind} in all while another had the GPU, in {busy} of use; the longest wait was "
                f"{longest}, and for 95 % of the time at most {usual} wanted it at once",
                f"each client has {each} % of the threads, and a fault hits all users: there were {faults}",
            )
    else:
        alone = found["alone_seconds"] / (found["busy_seconds"] or 1)
        if alone >= ALONE and found["threads_in_use_percent"] < HANDED:
            yield (
                f'active_threads = "{min(100, 2 * each)}%" in [limits]',
                f"one user alone was at work in {alone:.0%} of {busy} of use, and only "
                f"{found['threads_in_use_percent']:.0f} % of the threads were in use",
                f'two at once share more often; with sharing = "turns" they would have waited {overlap}',
            )
        if faults >= days and found["users"] > 1 and sharing != "per-user":  # apart they are their users' alone
            yield (
                'sharing = "turns"',
                f"{faults} faults in {many(round(days), 'day')} ended {found['faulted']} clients, of all users who "
                "were at work",
                f"users would have waited {overlap} for each other in {busy} of use",
            )
        if found["waited_seconds"] >= much:
            yield (
                "look at who waits and why, then at total_active_threads, total_memory_limit and max_clients",
                f"users waited {waited} although all may be at work at once, the longest {longest}: for totals, "
                "max_clients, 48 contexts, a fault or a drain",
                "more at once on one GPU",
            )
    if (one := found["fullest"]) and (part := one["used"] / one["limit"]) < MEMORY:
        yield (
            "lower memory_limit in [limits]",
            f"of {many(one['clients'], 'client')} the fullest used {limit_text(one['used'])} of "
            f"{limit_text(one['limit'])} ({part:.0%})",
            "who needs more then cannot have it",
        )


def page(one: Json) -> list[str]:
    """Return the lines for a terminal."""
    from mpsagent.cli.answer_text import PAGE

    found = one["facts"]
    name = f"{safe(one['instance'])}: " if one["instance"] else ""
    lines = [
        f'{name}sharing = "{one["sharing"]}", {found["hours"]:g} hours on record',
        f"{many(found['clients'], 'client')} of {many(found['users'], 'user')}, "
        f"{duration_text(found['busy_seconds'])} with one at work, {found['threads_in_use_percent']:g} % of the "
        f"threads in use then",
        f"usually at most {many(found['users_at_once_usual'], 'user')} at once; users waited "
        f"{duration_text(found['waited_seconds'])}, the longest {duration_text(found['longest_wait_seconds'])}; "
        f"{many(found['faults'], 'fault')}",
    ]
    if found["policies_loaded"] > 1:
        lines.append(f"policies were loaded {found['policies_loaded']} times: what users had may have changed")
    if not one["enough"]:
        lines.append(f"Too little is on record: advice takes {CLIENTS} clients in {HOURS:g} hours at least.")
    elif not one["advice"]:
        lines.append("No other setting would have served better.")
    for row in one["advice"]:
        lines += ["", row["what"], f"  why: {row['why']}", f"  costs: {row['cost']}"]
    return [
        part
        for line in lines
        for part in wrap(line, PAGE, subsequent_indent="    " if line[:1] == " " else "  ", break_on_hyphens=False)
        or [""]
    ]
