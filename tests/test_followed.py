"""What a campaign says of a process that it follows is what the kernel says."""

from __future__ import annotations

import os
import signal
import subprocess

from campaigns.followed import Followed
from tests.waiting import until


def test_that_it_stops_goes_on_and_ends_is_written_down() -> None:
    with subprocess.Popen(["sleep", "600"]) as sleeping:
        followed = Followed(lambda: {"sleep": sleeping.pid})
        try:
            for number, seen in ((signal.SIGSTOP, "T"), (signal.SIGCONT, "runs or sleeps"), (signal.SIGKILL, "gone")):
                os.kill(sleeping.pid, number)
                until(lambda seen=seen: followed.lines and followed.lines[-1][1] == f"sleep ({sleeping.pid}): {seen}")  # type: ignore[misc]
            assert set(followed.gone) == {"sleep"}  # not waited for: a zombie has gone, too
            assert not followed.stuck
        finally:
            followed.end()
            sleeping.kill()
