"""``mpsagent-cli``: what people type. Asks the agent over its socket; ``policy check`` and ``replay`` need no agent.

Imports are late on purpose: a status must cost little more than a bare interpreter.

Exit status: 0 fine, 1 unhealthy or drifted, 2 usage or configuration, 3 the agent cannot be reached.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from mpsagent import __version__
from mpsagent.interfaces import cli_ask as ask
from mpsagent.interfaces import client
from mpsagent.interfaces.cli_ask import UNHEALTHY, USAGE

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--socket",
    "path",
    envvar="MPSAGENT_SOCKET",
    default=client.DEFAULT_SOCKET,
    show_default=True,
    help="The agent's socket.",
)
@click.version_option(__version__, prog_name="mpsagent-cli")
@click.pass_context
def cli(ctx: click.Context, path: str) -> None:
    """See and steer NVIDIA MPS on this node, as mpsagent runs it.

    Exit status: 0 fine, 1 unhealthy or drifted, 2 usage or configuration, 3 mpsagent cannot be reached.
    """
    ctx.obj = path


# --- reading


@cli.command()
@_json
@click.pass_obj
def status(path: str, as_json: bool) -> None:
    """Who has the GPU, who waits and why, and what needs you."""
    from mpsagent.interfaces import cli_text

    body = ask.show(path, "/v1/status", as_json, lambda body: cli_text.status(body, ask.paint(), ask.now()))
    if not body["health"]["ok"] or body["limits"]["drifted"]:
        sys.exit(UNHEALTHY)


@cli.command()
@_json
@click.pass_obj
def servers(path: str, as_json: bool) -> None:
    """MPS servers, their users and limits."""
    from mpsagent.interfaces import cli_text

    ask.show(path, "/v1/servers", as_json, lambda body: cli_text.servers(body["servers"], ask.now()))


@cli.command()
@_json
@click.pass_obj
def clients(path: str, as_json: bool) -> None:
    """Processes that use or wait for the GPU through MPS."""
    from mpsagent.interfaces import cli_text

    ask.show(path, "/v1/clients", as_json, lambda body: cli_text.clients(body["clients"], ask.width()))


@cli.command()
@_json
@click.pass_obj
def queue(path: str, as_json: bool) -> None:
    """Users who wait for the GPU, in the order in which they get it, and why each is held."""
    from mpsagent.interfaces import cli_text

    ask.show(path, "/v1/queue", as_json, lambda body: cli_text.queue(body["queue"], ask.now(), ask.width()))


@cli.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes; survives a restart of the agent.")
@click.option("--since", type=click.IntRange(min=0), metavar="CURSOR", help="Only events after this cursor.")
@click.option("-n", "--lines", type=click.IntRange(1, 1000), help="How many (20, or 1000 with --since).")
@_json
@click.pass_obj
def events(path: str, follow: bool, since: int | None, lines: int | None, as_json: bool) -> None:
    """What has happened: changes of users, faults, and everything mpsagent did, with its reason and what came of it."""
    from mpsagent.interfaces import cli_events

    limit = lines if lines is not None else 20 if since is None else 1000
    shown = cli_events.Events(as_json)
    if follow:
        cli_events.follow(path, since, limit, shown)
        return
    body, _ = ask.asked(path, "GET", f"/v1/events?limit={limit}" + ("" if since is None else f"&cursor={since}"))
    for event in body["events"]:
        shown.show(event)
    shown.settle()


# --- the policy


@cli.group()
def policy() -> None:
    """Check, show and explain the policy."""


@policy.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option("--strict", is_flag=True, help="Warnings count as mistakes.")
@click.option("--devices", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="The GPUs to compare with, as JSON, instead of this machine's.")  # fmt: skip
@_json
def check(files: tuple[Path, ...], strict: bool, devices: Path | None, as_json: bool) -> None:
    """Every mistake in policy files, with its place and a hint, and what is surely not meant. Needs no agent.

    Without FILES: /etc/mpsagent/policy.toml and /etc/mpsagent/policy.d/*.toml. Judges as a reload does.
    """
    from mpsagent.interfaces import cli_offline

    sys.exit(cli_offline.check(files, as_json, strict, devices))


@policy.command("show")
@_json
@click.pass_obj
def policy_show(path: str, as_json: bool) -> None:
    """The policy that is in force."""
    from mpsagent.interfaces import cli_text

    body = ask.show(path, "/v1/policy", as_json, cli_text.tree)
    if body.get("errors"):
        sys.exit(USAGE)


@policy.command()
@click.argument("user")
@_json
@click.pass_obj
def explain(path: str, user: str, as_json: bool) -> None:
    """What applies to USER (name or uid), where each value comes from, and what would happen now."""
    from urllib.parse import quote

    from mpsagent.interfaces import cli_text

    ask.show(path, f"/v1/policy/explain?user={quote(user, safe='')}", as_json, cli_text.explained)


@cli.command()
@click.option("--control", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A control.log.")
@click.option("--server", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The server.log of it.")
@click.option("--policy", "files", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Say also what the agent would have done under this policy.")  # fmt: skip
@click.option("--zone", metavar="ZONE", help="Time zone of the logs, like Europe/Berlin (this machine's).")
@click.option("--gpu", default="143155M,132", show_default=True, metavar="MEMORY,MULTIPROCESSORS",
              help="The GPU that --policy assumes.")  # fmt: skip
@_json
def replay(
    control: Path | None, server: Path | None, files: tuple[Path, ...], zone: str | None, gpu: str, as_json: bool
) -> None:
    """The story of a pair of logs: who was served when, who waited, what ended how. Needs no agent."""
    from mpsagent.interfaces import cli_offline

    if control is None and server is None:
        raise click.UsageError("give --control FILE, --server FILE or both")
    sys.exit(cli_offline.replay(control, server, files, zone, gpu, as_json))


# --- acting


@cli.group("client")
def one_client() -> None:
    """Act on one client."""


@one_client.command()
@click.argument("pid", type=click.IntRange(min=1))
@click.option("--now", is_flag=True, help="Without the hook and the grace before it.")
@click.option("--dry-run", is_flag=True, help="Say what would be done.")
@click.option("--no-wait", is_flag=True, help="Do not wait to say what became of it.")
@_json
@click.pass_obj
def terminate(path: str, pid: int, now: bool, dry_run: bool, no_wait: bool, as_json: bool) -> None:
    """End one client without hurting its neighbours: first by MPS, then by signals. Waits for its end and says it.

    For root, the admin group, and users on their own clients.
    """
    wait = not (dry_run or no_wait or as_json)
    cursor = ask.asked(path, "GET", "/v1/status")[0]["history"]["newest"] if wait else 0
    body = {"now": now, "dry_run": dry_run}
    if not wait:
        ask.act(path, f"/v1/clients/{pid}/terminate", body, as_json)
        return
    from mpsagent.interfaces import cli_events

    ask.asked(path, "POST", f"/v1/clients/{pid}/terminate", body)
    sys.exit(cli_events.until_ended(path, cursor, pid))


@cli.command()
@click.option("--timeout", metavar="SPAN", help='End what still runs after this long ("10m"); else wait for it.')
@_json
@click.pass_obj
def drain(path: str, timeout: str | None, as_json: bool) -> None:
    """Let nothing new in, for maintenance. Who comes waits at the gate; `resume` lets them in at once."""
    ask.act(path, "/v1/drain", {"timeout": timeout}, as_json)


@cli.command()
@_json
@click.pass_obj
def resume(path: str, as_json: bool) -> None:
    """End a drain."""
    ask.act(path, "/v1/resume", None, as_json)


@cli.command()
@click.option("--yes", is_flag=True, help="Do not ask, although clients lose their work.")
@click.option("--dry-run", is_flag=True, help="Only say whose work would be lost.")
@_json
@click.pass_obj
def restart(path: str, yes: bool, dry_run: bool, as_json: bool) -> None:
    """Start the MPS control daemon again; also leaves the failed state.

    Clients that are at work lose it, so it asks first. `drain` waits for them instead.
    """
    from mpsagent.interfaces import cli_text

    if dry_run or not yes:
        found = ask.asked(path, "GET", "/v1/clients")[0]["clients"]
        working = [one for one in found if one["state"] != "waiting"]
        users = sorted({cli_text.user(one) for one in working})
        what = f"{cli_text.many(len(working), 'client')} of {', '.join(users)}" if working else "no client"
        if dry_run:
            click.echo(json.dumps({"clients": working}) if as_json else f"{what} would lose work")
            return
        if working and not sys.stdin.isatty():
            click.echo(f"mpsagent-cli: {what} would lose work; say --yes, or use drain first", err=True)
            sys.exit(USAGE)
        if working and not click.confirm(f"{what} will lose work. Restart MPS?"):
            sys.exit(USAGE)
    ask.act(path, "/v1/restart", None, as_json)


@cli.command()
@_json
@click.pass_obj
def reload(path: str, as_json: bool) -> None:
    """Read the policy again; a bad one leaves the old one in force."""
    ask.act(path, "/v1/reload", None, as_json)


# --- for scripts


@cli.command()
@click.option("--format", "form", type=click.Choice(["shell", "docker", "slurm", "json"]), default="shell")
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
@click.pass_obj
def env(path: str, form: str, as_json: bool) -> None:
    """The environment that a CUDA process needs to find MPS.

    shell: eval "$(mpsagent-cli env)"; docker: options for docker run; slurm: lines for a TaskProlog.
    """
    from shlex import quote

    body, _ = ask.asked(path, "GET", "/v1/status")
    directory = body.get("pipe_directory")
    if not directory:
        click.echo("mpsagent-cli: the agent has no pipe directory yet; see mpsagent-cli status", err=True)
        sys.exit(UNHEALTHY)
    if form == "json" or as_json:
        click.echo(json.dumps({"CUDA_MPS_PIPE_DIRECTORY": directory}))
    elif form == "docker":  # MPS shares memory between client and server, hence the host's ipc
        setting = quote(f"CUDA_MPS_PIPE_DIRECTORY={directory}")
        click.echo(f"--ipc=host --env {setting} --volume {quote(f'{directory}:{directory}')}")
    elif form == "slurm":  # slurmd reads the line as it is, without a shell
        click.echo(f"export CUDA_MPS_PIPE_DIRECTORY={directory}")
    else:
        click.echo(f"export CUDA_MPS_PIPE_DIRECTORY={quote(directory)}")


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Completion for a shell: eval "$(mpsagent-cli completion bash)"."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "mpsagent-cli", "_MPSAGENT_CLI_COMPLETE").source())


def main() -> None:
    cli(prog_name="mpsagent-cli")


if __name__ == "__main__":
    main()
