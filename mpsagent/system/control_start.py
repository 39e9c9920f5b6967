"""Starting the control daemon for its unit: back when the daemon alone is left.

A program of its own that the unit runs: `mpsagent-control-start PROGRAM OPTION ...`. NVIDIA's daemon forks twice, and
its first process does not wait for the one in the middle. systemd takes what the first one leaves behind for the main
process: on a busy node that can be the one in the middle, which then ends, and the unit quits the daemon that has just
started (seen with two cores and a load of five).
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    words = sys.argv[1:]
    if not words:
        sys.stderr.write("usage: mpsagent-control-start PROGRAM [OPTION ...]\n")
        return 2
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        pid = os.posix_spawnp(words[0], words, os.environ)
    except OSError as error:
        sys.stderr.write(f"{words[0]}: {error.strerror}\n")
        return 127
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    # The daemon has a session of its own: whom this process still has in its group is in the middle.
    with suppress(ChildProcessError):
        while True:
            os.waitpid(0, 0)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
