"""The program mpsagent-gate: ``run`` under systemd, ``keep`` without it, ``pass`` without an agent."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from mpsagent.gate import keeper

# Where `mpsagent run` and the default policy have them, too.
DAEMON = "/run/mpsagent/instances/default/pipe"
PUBLIC = "/tmp/nvidia-mps"
LINK = "/run/mpsagent/gate.sock"
STATE = "/run/mpsagent"

_directory = click.Path(path_type=Path)
_public = click.option("--public", type=_directory, default=PUBLIC, show_default=True, help="Directory of the sockets.")
_daemon = click.option(
    "--daemon", type=_directory, default=DAEMON, show_default=True, help="Pipe directory of the (first) control daemon."
)
_link = click.option("--link", type=_directory, default=LINK, show_default=True, help="Socket for the agent.")
_state = click.option(
    "--state", type=_directory, default=STATE, show_default=True, help="Directory for the agent's last table."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Holds the clients of NVIDIA MPS at the public control socket and hands them over with their limits set."""


@main.command()
@_public
@_daemon
@_link
@_state
def run(public: Path, daemon: Path, link: Path, state: Path) -> None:
    """Serve clients. The listening sockets come from the service manager (control, control_privileged)."""
    del public  # the sockets are bound already
    from mpsagent.gate import service  # here: `keep` needs none of it, and stays in memory as long as the node is up
    from mpsagent.gate.loop import Options

    service.serve(Options(daemon=daemon, state=state, link=link))


@main.command("pass")
@_public
@_daemon
@_state
@click.option("--threads", type=float, default=None, help="Set the active thread percentage of all users.")
def pass_(public: Path, daemon: Path, state: Path, threads: float | None) -> None:
    """Serve all users with the fallback limits, without an agent."""
    from mpsagent.gate import service
    from mpsagent.gate.loop import Options

    options = Options(daemon=daemon, state=state, admissions=service.everybody(state, threads, daemon))
    if "LISTEN_PID" in os.environ:
        service.serve(options)
        return
    sockets = service.checked(lambda: keeper.public_sockets(public))
    service.serve(options, [(name, sock.detach()) for name, sock in sockets])


@main.command()
@_public
@_daemon
@_link
@_state
def keep(public: Path, daemon: Path, link: Path, state: Path) -> None:
    """Bind the sockets and keep a gate running without systemd.

    The connections and files that the gate holds outlive the gate.
    """
    keeper.raise_file_limit()
    arguments = ["--public", str(public), "--daemon", str(daemon), "--link", str(link), "--state", str(state)]
    try:
        keeper.check_state_directory(state)
        kept = keeper.Keeper(keeper.gate_command(arguments), public, state)
    except OSError as error:
        click.echo(f"mpsagent-gate: {error}", err=True)
        sys.exit(1)
    sys.exit(kept.run())


if __name__ == "__main__":
    main()
