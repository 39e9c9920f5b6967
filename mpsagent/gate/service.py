"""The gate from its start to its end: what ``run`` and ``pass`` do."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from mpsagent.gate import keeper, own_signals, state
from mpsagent.gate.loop import Gate, Options, say
from mpsagent.linux import listen, sent_descriptors
from mpsagent.mps.limits import Limits
from mpsagent.wire.link import Admissions, User

SETTLED = 5.0
"""Seconds after a start from which on an error of its own makes the gate start again."""
STRICT = 10.0
"""The active thread percentage of ``pass`` when no agent has ever said what is safe."""
_Made = TypeVar("_Made")


def everybody(directory: Path, threads: float | None, daemon: Path) -> list[Admissions]:
    """Everybody passes with the fallback limits that the agent said last of an instance, or with strict ones; with a
    server for each user one user after the other. ``daemon``: the first instance's, where no agent ever was."""
    found = []
    for name in state.instances(directory) or [""]:
        last: Admissions | None = None
        try:
            last = state.load(directory, name)
        except state.StateError as error:
            say(str(error))
        last = last or Admissions(instance=name, fail_safe=Limits(STRICT))
        limits = last.fail_safe
        if threads is not None:
            limits = replace(limits, threads=threads).settable()
        parallel = _one_server_for_all(directory / f"instance-{name or daemon.parent.name}.env")
        others = User(0, "all", limits)
        found.append(
            replace(last, open=True, fail_safe=limits, set_limits=True, users={}, others=others, parallel=parallel)
        )
    return found


def _one_server_for_all(unit: Path) -> bool:
    """By what the control daemon was started with; without systemd nothing says so."""
    try:
        return "--multiuser-server" in unit.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return True


def serve(options: Options, given: list[tuple[str, int]] | None = None) -> None:
    keeper.raise_file_limit()
    checked(lambda: keeper.check_state_directory(options.state))
    descriptors = listen.descriptors() if given is None else given
    if not descriptors:
        say("mpsagent-gate: no sockets were given; start it by its socket unit, or by `mpsagent-gate keep`")
        sys.exit(2)
    if problem := own_signals.keep():
        say(f"mpsagent-gate: it could signal other processes: {problem}")
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_unexpected(time.monotonic()))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, loop.stop)
    sent_descriptors.watch_over()
    gate = checked(lambda: Gate(loop, options, descriptors))
    gc.freeze()  # a collection need not look at what the modules are made of, for longer than a hand-over takes
    loop.run_forever()
    del gate
    # Nothing is closed by hand: what is held lies in the store, and a close of ours would be the client's end.
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(0)


def _unexpected(started: float) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """What to do about an error in the gate itself: end, and be started again with everything that lies in the store.
    Not right after a start: what has caused it may lie there too."""

    def handle(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        lines = traceback.format_exception(error) if isinstance(error, BaseException) else [str(context["message"])]
        say("mpsagent-gate: an error of its own: " + "".join(lines)[-4000:])
        if time.monotonic() - started > SETTLED:
            os._exit(70)

    return handle


def checked(action: Callable[[], _Made]) -> _Made:
    """What ``action`` makes; an error of the system ends the program with one line."""
    try:
        return action()
    except OSError as error:
        say(f"mpsagent-gate: {error}")
        sys.exit(1)
