"""``mpsagent-cli``: the program. A page that is asked for with no other option than ``--json`` takes half the time."""

from __future__ import annotations

import os
import sys

from mpsagent.cli import client, pages, streams


def main() -> None:
    """A verb that shows a page needs none of click, whose import is half of its time."""
    verb, options = sys.argv[1:2], sys.argv[2:]
    with streams.usable():
        page = pages.PAGES.get(verb[0]) if verb and options in ([], ["--json"]) else None
        if page is not None and "_MPSAGENT_CLI_COMPLETE" not in os.environ:
            page(os.environ.get("MPSAGENT_SOCKET") or client.DEFAULT_SOCKET, bool(options))
        else:
            from mpsagent.cli.verbs import cli

            cli(prog_name="mpsagent-cli")


if __name__ == "__main__":
    main()
