"""NVML, asked through a helper process: after a driver error it can hang for ever, even beyond SIGKILL.

One helper at a time. It starts with a question, is killed when it misses a deadline, and the next question has another
one; while a killed one hangs in the kernel there is none. It ends when nothing has been asked for a while, because a
process that holds the GPU open is in the way of who wants to reset it or to change the driver.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import mpsagent
from mpsagent.mps.gpus import ComputeProcess, Gpu, Part, Xid
from mpsagent.mps.work import Work
from mpsagent.system.directories import NOWHERE
from mpsagent.system.spawn import Child

DEADLINE = 10.0
FIRST_DEADLINE = 30.0
"""Seconds for an answer, and for the first one: without persistence mode the driver starts a GPU first."""
IDLE = 90.0
"""Seconds without a question after which the helper is let go."""
KILL_WAIT = 1.0
"""Seconds in which a killed helper should have ended."""
LONGEST = 1 << 20
"""Bytes of one answer at most: some thousand processes."""
MOST_XIDS = 16
"""Events that are remembered of each GPU."""
_Read = TypeVar("_Read")


class Nvml:
    """``environment()`` is what the helper starts with, ``clock()`` dates events. All questions go one by one."""

    def __init__(self, environment: Callable[[], Mapping[str, str]], clock: Callable[[], float]) -> None:
        self._environment = environment
        self._clock = clock
        self._one = asyncio.Lock()
        self._helper: _Process | None = None
        self._dying: _Process | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._closed = False
        self.xids: dict[str, tuple[Xid, ...]] = {}
        """The last events of each GPU that has had any while a helper was there."""
        self.xids_seen: dict[str, int] = {}
        """How many there were, by UUID."""
        self._work: dict[str, Work] = {}

    @property
    def pid(self) -> int | None:
        """The helper's, while there is one."""
        return None if self._helper is None else self._helper.pid

    @property
    def asking(self) -> bool:
        """A question is under way."""
        return self._one.locked()

    async def gpus(self, *, deadline: float | None = None) -> tuple[Gpu, ...] | str:
        """Every GPU of the machine, or what is wrong."""
        return await self._rows({"ask": "gpus"}, deadline, _gpu)

    async def processes(self) -> tuple[ComputeProcess, ...] | str:
        """Every process that computes on any GPU of the machine, or what is wrong."""
        return await self._rows({"ask": "processes"}, None, lambda row: ComputeProcess(**row))

    async def work(self) -> Mapping[str, Work] | str:
        """What each GPU has done since this was asked first, or what is wrong. What it does while no helper is there is
        not counted, but for its energy."""
        found = await self._rows({"ask": "work"}, None, lambda row: (row["device"], self._more(row)))
        if isinstance(found, str):
            return found
        self._work |= dict(found)
        return dict(self._work)

    async def _rows(
        self, question: dict[str, str], deadline: float | None, read: Callable[[dict[str, Any]], _Read]
    ) -> tuple[_Read, ...] | str:
        answer = await self._ask(question, deadline)
        if isinstance(answer, str):
            return answer
        try:
            return tuple(map(read, answer))
        except (TypeError, KeyError, ValueError) as error:
            return f"NVML's helper answered something that is not understood: {error!r}"

    async def _ask(self, question: dict[str, str], deadline: float | None) -> list[Any] | str:
        async with self._one:
            self._rest(None)
            try:
                for _ in range(2):
                    if (answer := await self._ask_once(question, deadline)) is not None:
                        return answer
                return "NVML could not be asked: its helper ended twice without an answer"
            finally:
                self._rest(None if self._closed else IDLE)

    async def _ask_once(self, question: dict[str, str], deadline: float | None) -> list[Any] | str | None:
        """None: the helper ended without an answer (it was killed), and another one may do better."""
        if self._closed:
            return "the agent is being stopped"
        if self._dying is not None and not await self._dying.end(KILL_WAIT):
            return f"NVML hangs: its helper (process {self._dying.pid}) cannot even be killed; does nvidia-smi answer?"
        self._dying = None
        helper, limit = self._helper, deadline or DEADLINE
        if helper is None or helper.ended:
            try:
                helper = self._helper = _Process(self._environment(), self._event)
            except OSError as error:
                return f"NVML could not be asked: its helper cannot be started: {error.strerror}"
            limit = deadline or FIRST_DEADLINE
        try:
            async with asyncio.timeout(limit):
                line = await helper.ask(question)
        except TimeoutError:
            self._drop()
            return f"NVML did not answer within {limit:g} s, and its helper was killed; does nvidia-smi answer?"
        except asyncio.CancelledError:
            self._drop()  # its answer would be taken for the next question's
            raise
        if line is None:
            self._drop()
            return None
        if isinstance(line.get("answer"), list):
            return list(line["answer"])
        self._drop()
        return f"NVML could not be asked: {line.get('error', 'an answer that is not understood')}"

    def _more(self, row: Mapping[str, Any]) -> Work:
        """With what the helper says of the time since it was asked last."""
        old, known = self._work.get(row["device"]) or Work(0.0, 0.0, 0.0), row["utilization"] is not None
        seconds = float(row["seconds"]) if known else 0.0
        energy = old.energy if row["energy"] is None else float(row["energy"])
        return Work(old.seconds + seconds, old.busy + seconds * (row["utilization"] or 0.0), energy)

    def _event(self, line: dict[str, Any]) -> None:
        device, number = line.get("device"), line.get("xid")
        if isinstance(device, str) and isinstance(number, int):
            xid = Xid(self._clock(), device, number)
            self.xids[device] = (*self.xids.get(device, ()), xid)[-MOST_XIDS:]
            self.xids_seen[device] = self.xids_seen.get(device, 0) + 1

    def _rest(self, seconds: float | None) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._idle = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self._drop)

    def _drop(self) -> None:
        """The helper has to go, and is waited for by no one."""
        if self._helper is not None:
            self._helper.kill()
            self._dying, self._helper = self._helper, None

    def close(self) -> None:
        """For the end of the loop."""
        self._closed = True
        self._rest(None)
        self._drop()
        if self._dying is not None:
            self._dying.close()


def _gpu(row: dict[str, Any]) -> Gpu:
    parts = tuple(Part(one["uuid"], one["memory"], one["used"]) for one in row.get("parts", ()))
    return Gpu(**{**row, "parts": parts})


class _Process:
    """One helper. Raises OSError when it cannot be started. ``event`` takes lines that answer nothing."""

    def __init__(self, environment: Mapping[str, str], event: Callable[[dict[str, Any]], None]) -> None:
        own = {"CUDA_MPS_PIPE_DIRECTORY": NOWHERE, "PYTHONPATH": str(Path(mpsagent.__file__).parents[1])}
        argv = [sys.executable, "-P", "-m", "mpsagent.system.nvml_helper"]
        self._event = event
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[dict[str, Any] | None] | None = None
        self._buffer = b""
        self._socket, its = socket.socketpair()
        with its:
            null = os.open(os.devnull, os.O_WRONLY)
            try:
                self._child = Child(argv, {**environment, **own}, its.fileno(), its.fileno(), null)
            except OSError:
                self._socket.close()
                raise
            finally:
                os.close(null)
        self._socket.setblocking(False)
        self.pid = self._child.pid
        self._loop.add_reader(self._socket, self._readable)
        self._child.ended.add_done_callback(self._gone)

    @property
    def ended(self) -> bool:
        return self._child.ended.done()

    async def ask(self, question: dict[str, str]) -> dict[str, Any] | None:
        """Its answer; None when it has ended."""
        self._answer = self._loop.create_future()
        try:
            self._socket.send(json.dumps(question).encode() + b"\n")
        except OSError:
            return None
        return await self._answer

    async def end(self, seconds: float) -> bool:
        """Wait for its end; False when it has not come."""
        await asyncio.wait([self._child.ended], timeout=seconds)
        return self.ended

    def kill(self) -> None:
        """SIGKILL. It is reaped whenever the kernel lets it go."""
        self._hang_up()
        self._child.kill()

    def close(self) -> None:
        """For the end of the loop, after :meth:`kill`."""
        self._child.let_go()

    def _hang_up(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()
        self._settle(None)

    def _gone(self, _ended: asyncio.Future[int]) -> None:
        if self._socket.fileno() >= 0:
            self._readable()  # its last words
        self._hang_up()

    def _readable(self) -> None:
        try:
            data = self._socket.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._buffer += data
        if not data or len(self._buffer) > LONGEST:
            self._hang_up()
            return
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if not isinstance(said, dict):
            self._settle({"error": f"its helper said {line[:100]!r}"})
        elif "xid" in said:
            self._event(said)
        else:
            self._settle(said)

    def _settle(self, said: dict[str, Any] | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(said)
