"""`mpsagent-cli run` as click has it: for `--help`, completion and words that mean nothing. main.py reads the rest."""

from __future__ import annotations

import click

from mpsagent.cli import program
from mpsagent.cli.options import span


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--timeout", "most", metavar="SPAN", callback=span,
              help='Terminate it if it waits longer for the GPU ("10m"), with exit status 75.')  # fmt: skip
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def run(path: str, most: float | None, command: tuple[str, ...]) -> None:
    """Run a program that shows why it waits and exits safely.

    Standard error shows why it waits for the GPU, its position, the latest time, and when its turn expires.
    At SIGTERM, SIGINT and SIGHUP MPS terminates its clients before the signal is passed on.
    The exit status is the program's, for instance 130 after Ctrl-C.
    """
    program.begin(path, most, command)
