"""``mpsagent-cli``: what people type. Asks the agent over its socket; ``policy check`` needs no agent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from mpsagent import __version__
from mpsagent.cli import ask, client, completions, options, pages
from mpsagent.cli.ask import UNHEALTHY, USAGE
from mpsagent.cli.late import Late, beside
from mpsagent.cli.renamed import Verbs

_instance = click.option("--instance", metavar="NAME", shell_complete=completions.instances,
                         help="Use only this instance of MPS, if there are several.")  # fmt: skip
_LATE = {name: f"mpsagent.cli.{name}" for name in ("lease", "metrics", "report", "run")}


def _beginning(*value: Any) -> Any:
    from mpsagent.cli import event_lines

    return event_lines.beginning(*value)


@click.group(cls=Verbs, commands=Late(_LATE | beside()), context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--socket", "path", envvar="MPSAGENT_SOCKET", default=client.DEFAULT_SOCKET, show_default=True,
              metavar="FILE", help="Connect to this socket of the agent.")  # fmt: skip
@click.version_option(__version__, prog_name="mpsagent-cli")
@click.pass_context
def cli(ctx: click.Context, path: str) -> None:
    """Show and control NVIDIA MPS on this node.

    Exit status: 0 fine, 1 unhealthy or failed, 2 wrong usage or a mistake in the policy, 3 mpsagent cannot be reached,
    4 draining (probe), 5 no permission, 6 not found, 7 refused as things are.
    Each verb except run and completion has --json; an error is JSON then, too.
    """
    ctx.obj = path


# --- reading


for _page in (pages.status, pages.probe, pages.servers, pages.clients, pages.queue):
    cli.command()(options.json(click.pass_obj(_page)))


@cli.command()
@click.option("--strict", is_flag=True, help="Count warnings as problems.")
@options.json
@click.pass_obj
def doctor(path: str, strict: bool, as_json: bool) -> None:
    """Find problems of this machine, and show how to fix them.

    Run it as root to see everything.
    Exit status: 0 no problem, 1 a problem, 3 mpsagent does not answer (the machine is checked in any case).
    """
    from mpsagent.cli import doctor as cli_doctor

    sys.exit(cli_doctor.doctor(path, as_json, strict))


@cli.command()
@click.option("--every", type=options.Number(0.2, 3600), default=2.0, show_default=True, metavar="SECONDS",
              help="Refresh after this many seconds.")  # fmt: skip
@options.json
@click.pass_obj
def top(path: str, every: float, as_json: bool) -> None:
    """Show clients and waiting users live, and terminate clients.

    Keys: arrows choose, s sorts, r reverses, / filters, u shows users, k ends the selected client after a question, q
    leaves. Into a pipe it writes one page.
    """
    pages.top(path, as_json, every)


@cli.command()
@click.argument("user", required=False, shell_complete=completions.users)
@click.option("-f", "--follow", is_flag=True, help="Continue with new events, even after a restart of the agent.")
@click.option(
    "--pid", type=options.Whole(min=1), shell_complete=completions.pids, help="Show only events of this process."
)
@click.option(
    "--kind", shell_complete=completions.kinds, help="Show only kinds that begin with this text: client.ended, server."
)
@click.option("--since", "beginning", callback=_beginning, metavar="TIME",
              help='Start at this time ("2d": two days ago, 2026-11-22, "2026-11-22 08:00") or cursor.')  # fmt: skip
@click.option("--until", callback=options.moment, metavar="TIME", help="End at this time.")
@click.option("-n", "--lines", type=options.Whole(1, 1000), help="Show at most this many (20; with a filter 1000).")
@options.json
@click.pass_obj
def events(
    path: str, user: str | None, follow: bool, pid: int | None, kind: str | None,
    beginning: tuple[int | None, float | None], until: float | None, lines: int | None, as_json: bool,
) -> None:  # fmt: skip
    """Show events and the actions of mpsagent.

    Turns, faults and terminations, and each action with its reason and result. USER is a name or a uid. The newest
    events are shown, oldest first. [history] in the policy sets how long events are kept.
    """
    from mpsagent.cli import event_lines

    only = {"user": user, "pid": pid, "kind": kind, "until": ask.iso(until)}
    if follow and any(one is not None for one in only.values()):
        raise click.UsageError("-f goes on with all that comes: without USER, --pid, --kind and --until")
    event_lines.events(path, *beginning, only, lines, event_lines.Events(as_json), followed=follow)


# --- the policy


@cli.group(commands=Late(beside("policy")))
def policy() -> None:
    """Check, show and explain the policy."""


@policy.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option("--strict", is_flag=True, help="Count warnings as mistakes.")
@click.option("--devices", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Compare with the GPUs in this JSON file instead of this machine's GPUs.")  # fmt: skip
@options.json
def check(files: tuple[Path, ...], strict: bool, devices: Path | None, as_json: bool) -> None:
    """Report every mistake in policy files, with its line and a hint.

    Of a file that is not TOML, the first mistake is reported.
    Warnings are about values that are probably not intended. No agent is needed.
    Without FILES: /etc/mpsagent/policy.toml and /etc/mpsagent/policy.d/*.toml. A reload checks the same.
    """
    from mpsagent.cli import policy_check

    sys.exit(policy_check.check(files, as_json, strict, devices))


@policy.command("show")
@options.json
@click.pass_obj
def policy_show(path: str, as_json: bool) -> None:
    """Show the policy in force."""
    from mpsagent.cli import policy_text

    body = ask.show(path, "/v1/policy", as_json, lambda body: policy_text.shown(body, ask.now(), ask.width()))
    if body.get("errors"):
        sys.exit(USAGE)


@policy.command("diff")
@options.json
@click.pass_obj
def policy_diff(path: str, as_json: bool) -> None:
    """Show what a reload would change, and for which users.

    For root and the admin group.

    Exit status: 0 nothing, 1 something, 2 the files have mistakes.
    """
    from mpsagent.cli import policy_text

    body, raw = ask.ordered(path, "diff")
    click.echo(raw.decode() if as_json else "\n".join(policy_text.changes(body, ask.width())))
    if not body["same"]:
        sys.exit(UNHEALTHY)


@policy.command()
@click.argument("user", shell_complete=completions.users)
@click.option("--cgroup", metavar="PATH", help="Also show the limits of the user's processes in this cgroup.")
@options.json
@click.pass_obj
def explain(path: str, user: str, cgroup: str | None, as_json: bool) -> None:
    """Show the limits of USER, and the line that sets each.

    Also the user's clients, position in the queue and turn.
    """
    from mpsagent.cli import policy_text

    target = ask.target("/v1/policy/explain", {"user": user, "cgroup": cgroup})
    ask.show(path, target, as_json, lambda body: policy_text.explained(body, ask.now(), ask.width()))


# --- acting


@cli.command()
@click.argument("pid", type=options.Whole(min=1), required=False, shell_complete=completions.pids)
@click.option("--job", metavar="NAME", shell_complete=completions.jobs,
              help="Terminate all clients of the job with this lease.")  # fmt: skip
@click.option("--cgroup", metavar="PATTERN", help="Terminate all clients in a cgroup, written as in the policy.")
@click.option("--mine", is_flag=True, help="Terminate all your clients.")
@click.option("--now", is_flag=True, help="Skip the hook and the grace period.")
@click.option("--dry-run", is_flag=True, help="Only show the steps.")
@click.option("--no-wait", is_flag=True, help="Do not wait for the end.")
@click.option("--timeout", metavar="SPAN", callback=options.span, help='Wait at most this long ("20s"; 2m).')
@options.json
@click.pass_obj
def terminate(path: str, pid: int | None, job: str | None, cgroup: str | None, mine: bool, now: bool, dry_run: bool,
              no_wait: bool, timeout: float | None, as_json: bool) -> None:  # fmt: skip
    """Terminate clients without harm to other clients.

    One client, or all clients of a job, a cgroup or a user, each first by MPS, then by signals. Waits for the end.
    Use it before you stop a container or a job: a signal in the middle of a kernel is a fault for all clients of the
    server.
    For root, the admin group, and users on their own clients.
    """
    those = {"pid": pid, "job": job, "cgroup": cgroup, "mine": mine or None}
    named = {key: value for key, value in those.items() if value is not None}
    if len(named) != 1:
        raise click.UsageError("name one of PID, --job, --cgroup and --mine")
    cursor = None if dry_run or no_wait or as_json else ask.newest(path)
    order, body = "terminate" if pid is not None else "terminate-each", {**named, "now": now, "dry_run": dry_run}
    if cursor is None:
        ask.act(path, order, body, as_json)
        return
    from mpsagent.cli import event_lines

    answer, _ = ask.ordered(path, order, body)
    pids = [pid] if pid is not None else [one["pid"] for one in answer["ending"]]
    sys.exit(event_lines.until_ended(path, cursor, pids, timeout))


@cli.command()
@click.option("--timeout", metavar="SPAN", callback=options.span,
              help='Terminate clients that still work after this time ("10m"). Default: wait for them.')  # fmt: skip
@_instance
@options.json
@click.pass_obj
def drain(path: str, timeout: float | None, instance: str | None, as_json: bool) -> None:
    """Admit no new programs, for maintenance. They wait until `resume`."""
    ask.act(path, "drain", {"timeout": timeout, "instance": instance}, as_json)


@cli.command()
@_instance
@options.json
@click.pass_obj
def resume(path: str, instance: str | None, as_json: bool) -> None:
    """End a drain."""
    ask.act(path, "resume", {"instance": instance}, as_json)


@cli.group()
def turn() -> None:
    """Act on the present turn."""


@turn.command()
@click.argument("user", type=options.UserArgument(), shell_complete=completions.users)
@click.argument("by", metavar="SPAN", callback=options.span)
@options.json
@click.pass_obj
def extend(path: str, user: int, by: float, as_json: bool) -> None:
    """Give the user whose turn it is more time: `turn extend alice 1h`.

    The policy does not change. For root and the admin group. The event names the administrator.
    """
    ask.act(path, "extend-turn", {"uid": user, "by": by}, as_json)


@cli.command("restart-mps")
@click.option("--timeout", metavar="SPAN", callback=options.span,
              help='Time for clients to exit by themselves ("10m"). Default: sigkill_delay.')  # fmt: skip
@click.option("--yes", is_flag=True, help="Do not ask, although clients lose their work.")
@click.option("--dry-run", is_flag=True, help="Only show whose work would be lost.")
@click.option("--no-wait", is_flag=True, help="Do not wait for the end.")
@_instance
@options.json
@click.pass_obj
def restart(
    path: str, timeout: float | None, yes: bool, dry_run: bool, no_wait: bool, instance: str | None, as_json: bool
) -> None:
    """Restart the MPS control daemon, which ends CUDA work.

    Waits for the start. Clients that still work after the timeout lose their work, so it asks first. `drain` waits for
    them instead.
    """
    from mpsagent.cli import restart as cli_restart

    body = {**({} if timeout is None else {"timeout": timeout}), "instance": instance}
    if dry_run or not yes:  # who may not is not asked first
        ask.ordered(path, "restart-mps", {**body, "dry_run": True})
    if (dry_run or not yes) and not cli_restart.may_lose(path, instance, dry_run=dry_run, as_json=as_json):
        return
    if no_wait or as_json:
        ask.act(path, "restart-mps", body, as_json)
        return
    from mpsagent.cli import event_lines

    before, _ = ask.asked(path, "/v1/status")
    answer, _ = ask.ordered(path, "restart-mps", body)
    sys.exit(event_lines.until_restarted(path, before, answer.get("instances", []), timeout or 0.0))


@cli.command()
@options.json
@click.pass_obj
def reload(path: str, as_json: bool) -> None:
    """Read the policy again. On a mistake the old one stays."""
    ask.act(path, "reload", None, as_json)
    if not as_json:
        from mpsagent.cli import policy_check, wording

        for one in policy_check.surely_not_meant():
            ask.say(f"warning: {wording.safe(str(one), 400)}")


# --- for scripts


@cli.command()
@click.option("--format", "form", type=click.Choice(["shell", "cdi", "docker", "slurm", "json"]), default="shell",
              show_default=True, help="Print the environment for this program.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as --format json does.")
@click.option("--give-way", is_flag=True, help="Also set MPS's lower priority: kernels of others run first.")
@click.option("--partitioning", is_flag=True, help="Also set partitioning by context, within your thread limit.")
@_instance
@click.pass_obj
def env(path: str, form: str, as_json: bool, give_way: bool, partitioning: bool, instance: str | None) -> None:
    """Print the environment that a CUDA process needs to find MPS.

    shell: eval "$(mpsagent-cli env)"; cdi: a file for /etc/cdi, then `podman run --device mpsagent/mps=all`; docker:
    options for docker run without CDI; slurm: lines for a TaskProlog.
    """
    from mpsagent.cli import environment

    environment.env(path, "json" if as_json else form, give_way, partitioning, instance)


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion for a shell.

    eval "$(mpsagent-cli completion bash)"
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "mpsagent-cli", "_MPSAGENT_CLI_COMPLETE").source())
