"""Leases on the command line: a share for a job, for prologs and epilogs of batch systems."""

from __future__ import annotations

import sys
from typing import Any

import click

from mpsagent.cli import ask, completions, options
from mpsagent.cli.wording import Json


class _Share(click.ParamType[str | int]):
    """A percentage with its sign, or a number of multiprocessors. The agent checks what it means."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | int:
        text = str(value).strip()
        if text.isascii() and text.isdigit():
            return int(text[:18])
        if not text.endswith("%"):
            self.fail(f'{text[:40]!a} is neither a percentage like "25%" nor a number of multiprocessors', param, ctx)
        return text


SHARE = _Share()


@click.group()
def lease() -> None:
    """Give jobs a share within the limits of their users."""


@lease.command()
@click.option("--uid", type=options.UserArgument(), shell_complete=completions.users,
              help="Set the job's user, by uid or name.")  # fmt: skip
@click.option(
    "--cgroup", metavar="PATTERN", help='Set the job\'s cgroup: "/slurm/uid_1001/job_17", or a unit or slice.'
)
@click.option("--pid", type=options.Whole(min=1), shell_complete=completions.pids,
              help="Set the job to this process and its descendants.")  # fmt: skip
@click.option("--active-threads", type=SHARE, metavar="SHARE",
              help='Limit the multiprocessors of each client process: "25%" or their number.')  # fmt: skip
@click.option("--memory-limit", metavar="SIZE", help='Limit the device memory of each client process: "10G", "25%".')
@click.option("--total-active-threads", type=SHARE, metavar="SHARE", help="Limit the multiprocessors of the whole job.")
@click.option("--total-memory-limit", metavar="SIZE", help="Limit the memory of the whole job on each device.")
@click.option("--max-clients", type=options.Whole(min=1), help="Limit the number of client processes at a time.")
@click.option(
    "--until", required=True, metavar="TIME", help='End the lease: "2h" from now, or a time like 2026-11-22T18:00:00Z.'
)
@click.option("--name", help="Set the batch system's name of the job. It replaces a lease with the same name.")
@options.json
@click.pass_obj
def add(
    path: str, uid: int | None, cgroup: str | None, pid: int | None, active_threads: str | int | None,
    memory_limit: str | None, total_active_threads: str | int | None, total_memory_limit: str | None,
    max_clients: int | None, until: str, name: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Give a job a share until a given time.

    A process that does not fit with the others of its job waits.
    For root and the admin group. Prints the number of the lease. `report --by job` adds up by name.
    """
    share = {
        "active_threads": active_threads, "memory_limit": memory_limit, "total_active_threads": total_active_threads,
        "total_memory_limit": total_memory_limit, "max_clients": max_clients,
    }  # fmt: skip
    body = {"uid": uid, "cgroup": cgroup, "pid": pid, **share, "until": until, "name": name}
    asked = {key: value for key, value in body.items() if value is not None}
    answer, raw = ask.ordered(path, "lease", asked)
    click.echo(raw.decode().rstrip("\n") if as_json else str(answer["id"]))
    if _cut(answer):
        click.echo(f"mpsagent-cli: it is more than its user may have: {_cut(answer)} for each process", err=True)
    if not answer["in_force"]:
        click.echo("mpsagent-cli: the gate does not apply it yet; see mpsagent-cli status", err=True)


@lease.command("list")
@click.option(
    "--waiting", is_flag=True, help="List only jobs whose processes wait: number, name and reason in one line."
)
@options.json
@click.pass_obj
def listed(path: str, waiting: bool, as_json: bool) -> None:
    """List the leases in force."""
    ask.show(path, "/v1/leases", as_json, _waiting if waiting else _table)


@lease.command()
@click.argument("number", type=options.Whole(min=1), required=False, shell_complete=completions.leases)
@click.option("--cgroup", metavar="PATTERN", help="Delete all leases of this cgroup, written as in `lease add`.")
@click.option("--name", shell_complete=completions.jobs, help="Delete the lease with this name.")
@options.json
@click.pass_obj
def delete(path: str, number: int | None, cgroup: str | None, name: str | None, as_json: bool) -> None:
    """Delete a lease, or all leases of a cgroup.

    Admitted processes keep their limits.
    """
    if sum(one is not None for one in (number, cgroup, name)) != 1:
        raise click.UsageError("give a number, --cgroup or --name")
    numbers = [number]
    if number is None:
        key, value = ("cgroup", cgroup) if name is None else ("name", name)
        answer, _ = ask.asked(path, "/v1/leases")
        numbers = [one["id"] for one in answer["leases"] if one[key] == value]
        if name is not None and not numbers:
            hint = "see mpsagent-cli lease list"
            ask.failed({"detail": f"there is no lease with the name {name!a}", "hint": hint})
            sys.exit(ask.NOT_FOUND)
    for one in numbers:
        _, raw = ask.ordered(path, "delete-lease", {"number": one})
        click.echo(raw.decode().rstrip("\n") if as_json else f"lease {one} has ended")


def _waiting(body: Json) -> list[str]:
    from mpsagent.cli.wording import safe

    waits = [one for one in body["leases"] if one["waits"] is not None]
    return [f"{one['id']} {safe(one['name'] or '-')} {safe(one['waits'])}" for one in waits]


def _table(body: Json) -> list[str]:
    from mpsagent.cli.tables import table
    from mpsagent.cli.wording import local, safe

    rows = [
        [
            str(one["id"]),
            safe(one["name"] or "-"),
            safe(_whose(one)),
            safe(_how_much(one)),
            local(one["until"], ask.now()),
            str(len(one["clients"])),
        ]
        for one in body["leases"]
    ]
    head = ["ID", "NAME", "WHOSE", "SHARE", "UNTIL", "CLIENTS"]
    return table(head, rows, ask.width(), names=(2, 1)) if rows else ["no leases"]


def _whose(one: Json) -> str:
    user = None if one["uid"] is None else f"user {one['user'] or one['uid']}"
    process = None if one["pid"] is None else f"process {one['pid']} and its own"
    return ", ".join(part for part in (user, one["cgroup"], process) if part)


def _how_much(one: Json) -> str:
    from mpsagent.mps.units import limit_text

    def parts(threads: Any, memory: Json) -> list[str]:
        found = []
        if threads is not None:
            found.append(
                f"{threads} of the multiprocessors" if isinstance(threads, str) else f"{threads} multiprocessors"
            )
        for device, size in memory.items():
            on = f" on device {device}" if device else ""
            found.append(f"{limit_text(size) if isinstance(size, int) else size}{on}")
        return found

    each = parts(one["active_threads"], one["memory_limit"] or {})
    most, total = one["max_clients"], {"": one["total_memory_limit"]} if one["total_memory_limit"] is not None else {}
    whole = parts(one["total_active_threads"], total)
    whole += [] if most is None else [f"{most} client{'s' * (most > 1)}"]
    cut = f" (its user may have {_cut(one)})" if _cut(one) else ""
    return "; ".join([*([", ".join(each) + cut] if each else []), *([", ".join(whole) + " in all"] if whole else [])])


def _cut(one: Json) -> str:
    """What its processes get, where that is less than the lease says."""
    from mpsagent.mps.units import limits_words

    limits, threads = one.get("limits") or {}, one["active_threads"]
    less = isinstance(threads, str) and limits.get("threads", 100.0) < float(threads.rstrip("%"))
    for device, size in (one["memory_limit"] or {}).items():
        given = [most for on, most in limits.get("memory", {}).items() if device in ("", on)]
        less = less or (isinstance(size, int) and any(most < size for most in given))
    return limits_words(limits) if less else ""
