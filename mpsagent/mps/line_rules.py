"""Lines of control.log and server.log as patterns, each with the event that it is. Pure.

A pattern matches a whole message, without its head, and begins with its first word as it is. Texts of drivers before
580 that were watched (recordings 09 and 10) make events; those that only stand in their programs change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mpsagent.mps import events as ev

SHOWN = 200
"""Characters of a line that an event keeps."""

Make = Callable[[float, int, "re.Match[str]"], ev.LogEvent]
Rules = dict[str, list[tuple[Callable[[str], "re.Match[str] | None"], Make]]]

_NUMBER = r"(\d{1,10})"
_CLIENT = r"Client \{PID: (-?\d{1,10}), Context ID: (\d{1,10})\}"


def _rules(table: list[tuple[str, Make]]) -> Rules:
    """Rules by the first word of the message: one dictionary look-up instead of a try of every pattern."""
    by_word: Rules = {}
    for pattern, make in table:
        word = pattern.split(" ", 1)[0].replace("\\", "")
        by_word.setdefault(word, []).append((re.compile(pattern, re.ASCII).fullmatch, make))
    return by_word


def _control_line(at: float, pid: int, match: re.Match[str]) -> ev.LogEvent:
    return ev.ControlLine(at, match[0][:SHOWN])


CONTROL = _rules(
    [
        (
            rf"NEW CLIENT {_NUMBER} from user {_NUMBER}: Server already exists",
            lambda at, pid, m: ev.ClientAdmitted(at, int(m[1]), int(m[2])),
        ),
        (
            rf"NEW CLIENT {_NUMBER} from user {_NUMBER}: Server is not ready, push client to pending list",
            lambda at, pid, m: ev.ClientQueued(at, int(m[1]), int(m[2])),
        ),
        (rf"NEW SERVER {_NUMBER}: Ready", lambda at, pid, m: ev.ServerReady(at, int(m[1]))),
        (
            rf"Server {_NUMBER} has {_NUMBER} active worker threads\. Server will not shutdown\.",
            lambda at, pid, m: ev.ShutdownRefused(at, int(m[1]), int(m[2])),
        ),
        (
            rf"Server {_NUMBER} exited with status (-?\d{{1,10}})",
            lambda at, pid, m: ev.ServerExited(at, int(m[1]), int(m[2])),
        ),
        (
            rf"Try shutting down server {_NUMBER}, backoff is (enabled|disabled)",
            lambda at, pid, m: ev.ShutdownTried(at, int(m[1]), m[2] == "enabled"),
        ),
        (
            rf"Control will try shutting down server {_NUMBER} again in at most {_NUMBER}ms",
            lambda at, pid, m: ev.ShutdownLater(at, int(m[1]), int(m[2]) / 1000),
        ),
        (
            rf"Starting new server {_NUMBER} for user {_NUMBER}",
            lambda at, pid, m: ev.ServerStarting(at, int(m[1]), int(m[2])),
        ),
        (rf"Force shutting down server {_NUMBER}", lambda at, pid, m: ev.ShutdownForced(at, int(m[1]))),
        (
            r"Starting control daemon using socket (.{1,4096})",
            lambda at, pid, m: ev.ControlStarted(at, pid, m[1]),
        ),
        (
            r"To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY=.*",
            lambda at, pid, m: ev.ConnectionLine(at, m[0][:SHOWN]),
        ),
        (rf"CUDA MPS Control binary version: {_NUMBER}", lambda at, pid, m: ev.ControlVersion(at, pid, int(m[1]))),
        (rf"quit command issued with timeout of {_NUMBER}", lambda at, pid, m: ev.QuitIssued(at, int(m[1]))),
        (r"Exit with status (-?\d{1,10})", lambda at, pid, m: ev.ControlExited(at, pid, int(m[1]))),
        (r"Removed Shm file at (.{0,4096})", lambda at, pid, m: ev.SharedMemoryRemoved(at, m[1][:SHOWN])),
        # 550 and later: said by the child that was to become the server, so the head has the server's pid.
        (
            rf"Failed to start server using uid {_NUMBER}\. (.{{0,4096}})",
            lambda at, pid, m: ev.ServerFailed(at, pid, m[2][:SHOWN]),
        ),
        (r"Start", _control_line),  # 460, in a log of control and server merged
        (r"Server encountered a fatal exception\. Shutting down", _control_line),
        (r"NEW SERVER \d{1,10}: Ignoring (old connection request|connection from user)", _control_line),
        (r"NEW DEBUGGEE \d{1,10} from user \d{1,10}", _control_line),
        (r"Unknown type of connection", _control_line),
        (r"Unable to accept priviliged connection from other user", _control_line),
        (r"Warning: Failed writing log files to directory \[.{0,4096}\]\. No logs will be available\.", _control_line),
        (r"Failed to create control pid file .{1,4096}", _control_line),
        (r"CUDA MPS log recorder error", _control_line),
        (r"Internal error(?: when allocating \d{1,20} bytes)?", _control_line),
        (r"Using log directory: .{1,4096}", _control_line),
    ]
)


def _server_line(at: float, pid: int, match: re.Match[str]) -> ev.LogEvent:
    return ev.ServerLine(at, pid, match[0][:SHOWN])


def _unnamed(at: float, pid: int, match: re.Match[str]) -> ev.LogEvent:
    return ev.ClientUnnamed(at, pid)


SERVER = _rules(
    [
        (rf"{_CLIENT} connected", lambda at, pid, m: ev.ContextConnected(at, pid, int(m[1]), int(m[2]))),
        (
            rf"{_CLIENT} exiting\. (?:Worker is in reset\. )?Number of active client contexts is \d{{1,10}}\.",
            lambda at, pid, m: ev.ContextExiting(at, pid, int(m[1]), int(m[2])),
        ),
        (rf"Client process {_NUMBER} disconnected", lambda at, pid, m: ev.ClientDisconnected(at, pid, int(m[1]))),
        (
            rf"Client termination request failed: There is no active client context found for process {_NUMBER}\.",
            _server_line,
        ),
        (r"Client termination failed with invalid device context\.", _server_line),
        (r"Client termination succeeded\.", lambda at, pid, m: ev.TerminationDone(at, pid)),
        (rf"{_CLIENT} on device \d{{1,10}} to be torn down", _server_line),
        (rf"{_CLIENT} on the error-trigging process \d{{1,10}} to be torn down", _server_line),
        (r"Client \{PID: \d{1,10}, Context: \d{1,10}\} encountered a fatal GPU error\.", _server_line),
        (r"Client Priority set to -?\d{1,10}", _server_line),
        (r"Creating worker thread for client \{PID: -?\d{1,10}, Context ID: \d{1,10}\}", _server_line),
        (r"Creating server context on device \d{1,10} \(.{0,200}\)", _server_line),
        (r"Created anonymous shared memory region .{1,200}", _server_line),
        (r"Connecting to control daemon on socket: .{1,4096}", _server_line),
        (
            rf"Destroy server context on device {_NUMBER}(?: \(.{{0,200}}\))?",
            lambda at, pid, m: ev.ContextDestroyed(at, pid, int(m[1])),
        ),
        (
            r"Device .{1,200} \(uuid ([A-Za-z0-9/-]{1,80})\) is associated",
            lambda at, pid, m: ev.DeviceAssociated(at, pid, m[1]),
        ),
        (
            rf"Device pinned memory limit for device {_NUMBER} set to 0x([0-9a-f]{{1,16}}) bytes",
            lambda at, pid, m: ev.MemorySet(at, pid, int(m[1]), int(m[2], 16)),
        ),
        (
            r"Active Threads Percentage set to (\d{1,3}(?:\.\d{1,6})?)",
            lambda at, pid, m: ev.ThreadsSet(at, pid, float(m[1])),
        ),
        (r"Received new client request for \{PID: -?\d{1,20}, Context ID: -?\d{1,20}\}", _server_line),
        (r"Received device query command\. There are \d{1,10} devices", _server_line),
        (
            r"Server failed to recevie command with status -?\d{1,10}, "
            r"assuming client \{PID: -?\d{1,10}, Context ID: \d{1,10}\} exit",
            _server_line,
        ),
        (
            r"Server teardown in progress\. Refusing to accept new client \{PID: -?\d{1,10}, Context ID: -?\d{1,10}\}",
            _server_line,
        ),
        (
            r"Failed to accept client \{PID: (-?\d{1,10}), Context ID: -?\d{1,10}\} with status (\d{1,10})",
            lambda at, pid, m: ev.ClientRefused(at, pid, int(m[1]), f"status {m[2]}"),
        ),
        (
            rf"Failed to accept new client\. Maximum number of clients \({_NUMBER}\) reached\.",
            lambda at, pid, m: ev.ClientsFull(at, pid, int(m[1])),
        ),
        (rf"Status of client \{{PID: {_NUMBER}, Context ID: \d{{1,10}}\}} is [A-Z_]{{1,30}}", _server_line),
        (
            rf"MPS server requesting client \{{PID: {_NUMBER}, Context ID: \d{{1,10}}\}} to exit",
            lambda at, pid, m: ev.TerminationAsked(at, pid, int(m[1])),
        ),
        (r"Server was unable to shutdown due to \d{1,10} active clients", _server_line),
        (r"Server Priority set to -?\d{1,10}", _server_line),
        (r"All clients belonging to error trigging process \d{1,10} will be torn down", _server_line),
        (r"CUDA MPS Server for Linux/Unix\. Binary version: \d{1,10}", _server_line),
        (r"Display Driver version: (\d{1,5})[\d.]{0,24}", lambda at, pid, m: ev.DriverNamed(at, pid, int(m[1]))),
        (r"Using log directory: .{1,4096}", _server_line),
        (r"Startup", lambda at, pid, m: ev.ServerStartup(at, pid)),
        (r"Exiting", lambda at, pid, m: ev.ServerStopping(at, pid)),
        (r"Waiting for current clients to finish", lambda at, pid, m: ev.ServerStopping(at, pid)),
        (r"Server is handling a fatal GPU error\.", lambda at, pid, m: ev.FaultStarted(at, pid)),
        (r"User did not send valid credentials", lambda at, pid, m: ev.ServerStuck(at, pid)),
        (r"Server has been notified to shutdown", _server_line),
        (r"Server has started", lambda at, pid, m: ev.ServerStarted(at, pid)),
        (r"Initializing server process", _server_line),
        (r"Driver initialization failed with: .{0,4096}", _server_line),
        # 470 says `MPS server failed to start : R`, the first drivers gave no reason.
        (r"Failed to start : (.{0,4096})", lambda at, pid, m: ev.ServerFailed(at, pid, m[1][:SHOWN])),
        (
            r"MPS server failed to start(?: : (.{0,4096}))?",
            lambda at, pid, m: ev.ServerFailed(at, pid, (m[1] or "")[:SHOWN]),
        ),
        (r"MPS is only supported on .{1,200}", _server_line),
        # Drivers before 550: the same lines without the client's pid, which therefore say nothing about a process.
        (r"Start", lambda at, pid, m: ev.ServerStartup(at, pid)),
        (r"MPS Server is started", lambda at, pid, m: ev.ServerStarted(at, pid)),
        (r"MPS Server connecting to control daemon on socket: .{1,4096}", _server_line),
        (r"MPS Server: worker created", _unnamed),
        (
            r"activeThreadsPercentage set to (\d{1,3}(?:\.\d{1,6})?)",
            lambda at, pid, m: ev.ThreadsSet(at, pid, float(m[1])),
        ),
        (r"Received new client request", _unnamed),
        (r"Receive command failed, assuming client exit", _unnamed),
        (r"Worker created", _unnamed),
        (r"Creating worker thread", _unnamed),
        (r"Created named shared memory region .{1,200}", _server_line),
        (r"Volta MPS Server: Received new client request", _unnamed),
        (r"Volta MPS: Creating worker thread", _unnamed),
        (r"Volta MPS: Creating server context on device \d{1,10}", _server_line),
        (
            r"Volta MPS: Client disconnected\. (?:Worker is in reset\. )?"
            r"Number of active client contexts is \d{1,10}\.?",
            _unnamed,
        ),
        (r"Volta MPS: Client process disconnected", _unnamed),
        (r"Volta MPS: Device .{1,200} \(uuid [A-Za-z0-9/-]{1,80}\) is associated", _server_line),
        (rf"New client {_NUMBER} connected", lambda at, pid, m: ev.ContextConnected(at, pid, int(m[1]), 0)),
        (rf"Client {_NUMBER} disconnected", lambda at, pid, m: ev.ClientDisconnected(at, pid, int(m[1]))),
        # Not watched: what else stands in libcuda of 470, 535 and 550.
        (r"Client disconnected\. (?:Worker is in reset\. )?Number of active client contexts is \d{1,10}\.", _unnamed),
        (r"Client process disconnected", _unnamed),
        (r"MPS Server: Received new client request", _unnamed),
        *(
            (pattern, _server_line)
            for pattern in (
                r"Client \{-?\d{1,10}, -?\d{1,10}\} exit",
                r"Client process \d{1,10} encountered a fatal GPU error\.",
                r"Client termination failed with .{1,200}\.",
                r"Client termination command is only supported on Volta or higher GPUs\.",
                r"Clients snapshot command is only supported on Volta or higher GPUs\.",
                r"Client Priority Override is only supported on Volta or higher GPUs\.",
                r"Command handle failed",
                r"Device \(uuid .{1,80}\) is invisible to this MPS server\.",
                r"Device \(uuid .{1,80}\) is not supported by this MPS server",
                r"Device pinned memory limit [gs]et command is only supported on Volta or higher GPUs",
                r"Failed to accept new client\. Reached maximum number of device connections\.",
                r"Failed to allocate shared memory region in /dev/shm\.",
                r"Failed to connect to control daemon on socket: .{1,4096}",
                r"Failed to create worker",
                r"Failed to create/open SHM segment\.",
                r"Failed to send credentials to control daemon: .{1,200}",
                r"Failed to send credentials to server",
                r"Failed to terminate client \{-?\d{1,10}, -?\d{1,10}\}\.",
                r"Forcefully terminating client \d{1,10}",
                r"Internal error when allocating \d{1,20} bytes",
                r"MPS Server failed to create/open SHM segment\.",
                r"MPS Server forcefully terminating client \d{1,10}",
                r"MPS Server: Failed to create worker",
                r"MPS server is tearing down, client creation denied",
                r"Pre-Volta device \(uuid .{1,80}\) is filtered out by this Volta MPS server\.",
                r"Reply command failed",
                r"Server enters tearing down state",
                r"Server was unable to shutdown due to \d{1,10} active workers threads",
                r"Server will wait \d{1,10}ms before connecting to the control daemon",
                r"Status of client \{-?\d{1,10}, -?\d{1,10}\} is (?:ACTIVE|INACTIVE)",
                r"Teardown in progress, client creation denied",
                r"There is no active context bound to \d{1,10}",
                r"Volta MPS: Destroy server context on device \d{1,10}",
                r"Volta MPS: Device \(uuid .{1,80}\) is not supported by this MPS server",
                r"Volta MPS: Failed to accept new client\. Reached maximum number of device connections\.",
                r"Warning: File descriptor limit may be set too low, consider increasing it.{0,40}",
            )
        ),
        (
            rf"Volta MPS: Failed to accept new client\. Maximum number of clients \({_NUMBER}\) reached\.",
            lambda at, pid, m: ev.ClientsFull(at, pid, int(m[1])),
        ),
    ]
)
