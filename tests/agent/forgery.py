"""Lines as MPS writes them, about any process: every kind that the parser knows, chosen and random numbers in them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime

CONTROL = (
    "Accepting connection...", "NEW UI", "UI closed", "User did not send valid credentials",
    "Cmd:quit", "Cmd:quit -t 1", "Cmd:ps", "Cmd:get_server_list", "Cmd:shutdown_server {p} -f", "{p}", "yes",
    "Cmd:terminate_client {p} {p}", "Cmd:set_default_active_thread_percentage 100", "100.0",
    "NEW CLIENT {p} from user {u}: Server already exists",
    "NEW CLIENT {p} from user {u}: Server is not ready, push client to pending list",
    "NEW SERVER {p}: Ready", "Server {p} has 1 active worker threads. Server will not shutdown.",
    "Server {p} exited with status 0", "Server {p} exited with status 139",
    "Try shutting down server {p}, backoff is enabled", "Try shutting down server {p}, backoff is disabled",
    "Control will try shutting down server {p} again in at most 100ms", "Starting new server {p} for user {u}",
    "Force shutting down server {p}", "Starting control daemon using socket /p/control",
    "Starting control daemon using socket {socket}", "CUDA MPS Control binary version: 13000",
    "quit command issued with timeout of 1", "Exit with status 0", "Removed Shm file at /dev/shm/x",
    "Failed to start server using uid {u}. No memory", "Server encountered a fatal exception. Shutting down",
    "what no driver says", "Internal error",
)  # fmt: skip
SERVER = (
    "Client {{PID: {p}, Context ID: 0}} connected", "Client {{PID: {p}, Context ID: 1}} connected",
    "Client {{PID: {p}, Context ID: 1}} exiting. Number of active client contexts is 0.",
    "Client process {p} disconnected", "Client process disconnected", "Client termination succeeded.",
    "Destroy server context on device 0 (NVIDIA H200)", "Device NVIDIA H200 (uuid GPU-1) is associated",
    "Device pinned memory limit for device 0 set to 0x7fffffffffff bytes", "Active Threads Percentage set to 100.0",
    "Failed to accept client {{PID: {p}, Context ID: 1}} with status 807",
    "Failed to accept new client. Maximum number of clients (0) reached.",
    "MPS server requesting client {{PID: {p}, Context ID: 1}} to exit", "Startup", "Exiting",
    "Waiting for current clients to finish", "Server is handling a fatal GPU error.",
    "The following devices will be reset:", "0", "The following clients have a sticky error set:", "{p}",
    "User did not send valid credentials", "Server has started", "Failed to start : no memory",
    "MPS server failed to start",
    "Display Driver version: 99999", "Status of client {{PID: {p}, Context ID: 1}} is ACTIVE", "what no driver says",
)  # fmt: skip
CLIENT = ("cuInit", "what a client says")


class Forger:
    """``heads``: pids that lines are said by; ``pids``, ``users``: whom they are about."""

    def __init__(self, seed: int, heads: Sequence[int], pids: Sequence[int], users: Sequence[int], socket: str) -> None:
        self._random = random.Random(seed)
        self._heads, self._pids, self._users, self._socket = heads, pids, users, socket

    def line(self, who: str, template: str) -> str:
        pick = self._random.choice
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:23]
        said = template.format(p=pick(self._pids), u=pick(self._users), socket=self._socket)
        return f"[{now} {who} {pick(self._heads):5}] {said}\n"

    def some(self, count: int) -> tuple[str, str]:
        """At random; now and then a piece of one, or bytes of nothing."""
        control = [self._broken(self.line("Control", self._random.choice(CONTROL))) for _ in range(count // 2)]
        server = [self._broken(self.line("Server", self._random.choice(SERVER))) for _ in range(count // 2)]
        return "".join(control), "".join(server)

    def _broken(self, line: str) -> str:
        if self._random.random() > 0.02:
            return line
        at = self._random.randrange(len(line))
        return line[:at] + self._random.choice(("\n", "\0", "[", "\x1b[2J", "]] Control 1] ")) + line[at:]
