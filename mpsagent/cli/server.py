"""`mpsagent-cli server shutdown`: one MPS server is ended, after it was said and asked whose work that costs."""

from __future__ import annotations

import sys

import click

from mpsagent.cli import ask, complete


@click.group()
def server() -> None:
    """Act on one MPS server."""


@server.command()
@click.argument("pid", type=ask.Whole(min=1), required=False, shell_complete=complete.servers)
@click.option("--timeout", metavar="SPAN", callback=ask.span,
              help='How long its clients get to end by themselves ("10m"; kill_grace).')  # fmt: skip
@click.option("--force", is_flag=True, help="At once: its clients get an error at each call, and live on.")
@click.option("--yes", is_flag=True, help="Do not ask, although clients lose their work.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done, and to whom.")
@click.option("--no-wait", is_flag=True, help="Do not wait to say what became of it.")
@click.option("--instance", metavar="NAME", help="The server of this instance of MPS, where there are several.",
              shell_complete=complete.instances)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.pass_obj
def shutdown(
    path: str, pid: int | None, timeout: float | None, force: bool, yes: bool, dry_run: bool, no_wait: bool,
    instance: str | None, as_json: bool,
) -> None:  # fmt: skip
    """End one MPS server; without PID the only one.

    Who comes waits at the gate meanwhile, and gets the next server. Clients that still work after the timeout are ended
    one by one, so it asks first. Waits for the server's end and says it. For root and the admin group.
    """
    from mpsagent.cli import event_lines

    if force and timeout is not None:
        raise click.UsageError("by force nobody is waited for: leave out --timeout, or --force")
    chosen = _chosen(path, pid, instance)
    body = {"pid": chosen, **({} if timeout is None else {"timeout": timeout}), "force": force}
    if dry_run:
        ask.act(path, "shutdown", {**body, "dry_run": True}, as_json)
        return
    if not yes:
        _may_lose(ask.ordered(path, "shutdown", {**body, "dry_run": True})[0])
    cursor = None if no_wait or as_json else ask.newest(path)
    if cursor is None:
        ask.act(path, "shutdown", body, as_json)
        return
    ask.ordered(path, "shutdown", body)
    sys.exit(event_lines.until_shut_down(path, cursor, chosen, timeout or 0.0))


def _chosen(path: str, pid: int | None, instance: str | None) -> int:
    """The server that is meant. Ends the program where that is not one."""
    rows = ask.asked(path, "/v1/servers")[0]["servers"]
    found = [one["pid"] for one in rows if pid in (None, one["pid"]) and instance in (None, one.get("instance"))]
    if len(found) == 1:
        return int(found[0])
    if found:
        what = f"which one? {len(found)} servers run: {', '.join(map(str, found))}"
    else:
        what = ("no server runs" if pid is None else f"process {pid} is not a server of MPS") + (
            "" if instance is None else f" at instance {instance!r}"
        )
    ask.complain({"detail": what, "where": "pid", "hint": "see `mpsagent-cli servers`"})
    sys.exit(ask.USAGE)


def _may_lose(would: ask.Json) -> None:
    """Ends the program where work would be lost and no person can be asked, or the answer is no."""
    from mpsagent.cli.order_text import at_work

    if not would["clients"]:
        return
    what = at_work(would)
    if not sys.stdin.isatty():
        click.echo(f"mpsagent-cli: {what} would lose work; say --yes, or use drain first", err=True)
        sys.exit(ask.USAGE)
    if not click.confirm(f"{what} will lose work. End server {would['pid']}?"):
        sys.exit(ask.USAGE)
