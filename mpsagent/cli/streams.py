"""Standard streams as shells and full disks leave them: closed ones lead nowhere, one that takes no more is said."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mpsagent.cli.ask import UNHEALTHY, USAGE

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def usable() -> Iterator[None]:
    """While it lasts there are all three. Else the next file that is opened would be one of them, a connection to the
    agent for instance."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(UNHEALTHY)
    except KeyboardInterrupt:
        sys.exit(UNHEALTHY)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        with suppress(OSError):
            print(f"mpsagent-cli: the output cannot be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python writes what it still has when it ends
        sys.exit(USAGE)
