"""`mpsagent-cli run` as click has it: for `--help`, completion and words that mean nothing. main.py reads the rest."""

from __future__ import annotations

import click

from mpsagent.cli import program
from mpsagent.cli.options import span


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--wait-at-most", "most", metavar="SPAN", callback=span,
              help='End it if it waits for the GPU longer ("10m"); the exit status is 75 then.')  # fmt: skip
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_obj
def run(path: str, most: float | None, command: tuple[str, ...]) -> None:
    """Start a program that says why it waits, and ends well.

    On standard error: why it waits for the GPU, its place, until when at the latest, and when its turn is to end.
    At SIGTERM, SIGINT and SIGHUP its clients are ended through MPS before the signal is passed on.
    The exit status is the program's: 130 after Ctrl-C, where the program does not end in another way.
    """
    program.begin(path, most, command)
