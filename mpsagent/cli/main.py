"""``mpsagent-cli``: the program. A page that is asked for with no other option than ``--json`` takes half the time, and
so does `run`, which each program pays for."""

from __future__ import annotations

import os
import sys

from mpsagent.cli import client, streams


def main() -> None:
    """Verbs that need none of click, whose import is half of their time."""
    verb, options = (sys.argv[1:2] or [""])[0], sys.argv[2:]
    path = os.environ.get("MPSAGENT_SOCKET") or client.DEFAULT_SOCKET
    with streams.usable():
        if "_MPSAGENT_CLI_COMPLETE" not in os.environ:
            if verb == "run":
                from mpsagent.cli import program

                if (simple := program.simple(options)) is not None:
                    program.begin(path, *simple)
            elif options in ([], ["--json"]):
                from mpsagent.cli import pages

                if (page := pages.PAGES.get(verb)) is not None:
                    page(path, bool(options))
                    return
        _clicked()


def _clicked() -> None:
    import click

    from mpsagent.cli import ask
    from mpsagent.cli.verbs import cli

    try:
        cli(prog_name="mpsagent-cli", standalone_mode="--json" not in sys.argv)
    except click.ClickException as error:
        ask.failed({"detail": error.format_message()})
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(ask.UNHEALTHY)


if __name__ == "__main__":
    main()
