"""An asyncio event loop in virtual time, as the body of a process: what the real gate and the real agent run on."""

from __future__ import annotations

import asyncio
import heapq
from asyncio import events
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.world import doors, streams
from tests.world.kernel import Body, File, Kernel, Killed, Process


class Loop(asyncio.AbstractEventLoop, Body):
    def __init__(self, process: Process) -> None:
        self.process = process
        self.kernel: Kernel = process.kernel
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._number = 0
        self._watched: dict[File, dict[tuple[str, int], asyncio.Handle]] = {}
        """By file: who reads or writes it, and by which descriptor."""
        self._by_fd: dict[tuple[str, int], File] = {}
        self._hot: dict[File, None] = {}
        """Files that may have something for us."""
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._handler: Callable[[Any, dict[str, Any]], object] | None = None
        self.turns = 0
        """In which it made no system call."""
        process.body = self

    # --- what the kernel calls

    def run(self) -> None:
        """One turn: what is there, what is due, what was ready before."""
        kernel, process = self.kernel, self.process
        calls = process.calls
        before = events._get_running_loop()
        events._set_running_loop(self)
        try:
            if self._hot:
                for file in list(self._hot):
                    if found := self._due(file):
                        self._ready.extend(found)
                    else:
                        del self._hot[file]
            while self._timers and self._timers[0][0] <= kernel.now:
                handle = heapq.heappop(self._timers)[2]
                if not handle._cancelled:
                    self._ready.append(handle)
            ready = self._ready
            for _ in range(len(ready)):
                handle = ready.popleft()
                if handle._cancelled:
                    continue
                try:
                    handle._context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
                except Killed:
                    raise
                except Exception as error:
                    what = {"message": "a callback failed", "exception": error, "handle": handle}
                    self.call_exception_handler(what)
                if not process.alive:
                    return
        finally:
            events._set_running_loop(before)
        self.turns += process.calls == calls
        if self._ready:
            process.wake()
            return
        for file in self._hot:
            if self._due(file):
                process.wake()
                return
        self._sleep()

    def _sleep(self) -> None:
        while self._timers and self._timers[0][2]._cancelled:
            heapq.heappop(self._timers)
        if self._timers:
            self.process.wake(self._timers[0][0])

    def _due(self, file: File) -> list[asyncio.Handle]:
        return [handle for (how, _), handle in self._watched.get(file, {}).items()
                if (file.readable() if how == "read" else file.writable())]  # fmt: skip

    def look(self, file: File) -> None:
        self._hot[file] = None
        self.process.wake()

    def clear(self) -> None:
        for file in self._watched:
            file.watchers.pop(self.process, None)
        self._watched.clear()
        self._by_fd.clear()
        self._hot.clear()
        self._ready.clear()
        self._timers.clear()
        for task in list(self._tasks):  # what they would do at their end is not done
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with suppress(BaseException):
                task.get_coro().close()  # type: ignore[union-attr]
        self._tasks.clear()

    # --- what the programs call

    def time(self) -> float:
        return self.kernel.now

    def call_soon(self, callback: Any, *arguments: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, arguments, self, context)
        self._ready.append(handle)
        if not self.process.running:
            self.process.wake()
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Any, *arguments: Any, context: Any = None) -> asyncio.TimerHandle:
        return self.call_at(self.kernel.now + delay, callback, *arguments, context=context)

    def call_at(self, when: float, callback: Any, *arguments: Any, context: Any = None) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, arguments, self, context)
        self._number += 1
        heapq.heappush(self._timers, (when, self._number, handle))
        if not self.process.running:
            self.process.wake(when)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None: ...

    def _add(self, how: str, fd: Any, callback: Any, arguments: Any) -> None:
        fd = fd if isinstance(fd, int) else fd.fileno()
        file = self.process.file(fd)
        self._remove(how, fd)
        self._by_fd[how, fd] = file
        self._watched.setdefault(file, {})[how, fd] = asyncio.Handle(callback, arguments, self, None)
        file.watchers[self.process] = 1
        self.look(file)

    def _remove(self, how: str, fd: Any) -> bool:
        fd = fd if isinstance(fd, int) else fd.fileno()
        file = self._by_fd.pop((how, fd), None)
        if file is None:
            return False
        handles = self._watched[file]
        handles.pop((how, fd)).cancel()
        if not handles:
            del self._watched[file]
            file.watchers.pop(self.process, None)
        return True

    def add_reader(self, fd: int, callback: Any, *arguments: Any) -> None:
        self._add("read", fd, callback, arguments)

    def remove_reader(self, fd: int) -> bool:
        return self._remove("read", fd)

    def add_writer(self, fd: int, callback: Any, *arguments: Any) -> None:
        self._add("write", fd, callback, arguments)

    def remove_writer(self, fd: int) -> bool:
        return self._remove("write", fd)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks[task] = None
        task.add_done_callback(lambda one: self._tasks.pop(one, None))
        return task

    def run_in_executor(self, _executor: Any, function: Any, *arguments: Any) -> Any:
        return self.create_task(doors.in_thread(function, *arguments, deadline=60.0))

    async def sock_recv(self, sock: Any, size: int) -> bytes:
        while True:
            try:
                return bytes(sock.recv(size))
            except BlockingIOError:
                pass
            there = self.create_future()
            self.add_reader(sock, lambda there=there: there.done() or there.set_result(None))
            try:
                await there
            finally:
                self.remove_reader(sock)

    async def sock_connect(self, sock: Any, address: str) -> None:
        sock.connect(address)

    async def create_connection(self, make: Any, *, sock: Any) -> Any:
        protocol = make()
        transport = streams.Transport(self, sock, protocol)
        await asyncio.sleep(0)
        return transport, protocol

    def set_exception_handler(self, handler: Any) -> None:
        self._handler = handler

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.process.alive:
            return
        if self._handler is None:
            raise RuntimeError(str(context))
        self._handler(self, context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False
