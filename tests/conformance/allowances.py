"""What may differ from real MPS, each with its scenarios, its lines and its reason. Pure.

An allowance takes nothing out of what is compared: it names, after the comparison, differing lines that are chance in
real MPS itself, or that the simulator cannot or need not do. Everything else that differs makes the comparison fail.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Allowance:
    """`lines` is a pattern of differing lines without their sign; `against` is "real" or "recording"."""

    name: str
    scenarios: tuple[str, ...]
    against: str
    lines: str
    reason: str


ALLOWED = (
    Allowance(
        "turned away",
        ("R10", "Q4", "X25", "X27"),
        "",
        r"ctl (as B )?(get_server_(list|status S\d*)|set_default_\S+ 10 / .*|quit -t 1) -> rc=[01](?: \(took [^)]*\))?"
        r"(?: \| err: Cannot send command to MPS control daemon process)?|"
        r"  err: Cannot send command to MPS control daemon process",
        "a front-end that is turned away beside an open one ends with status 1 and a message if it is still sending, "
        "with 0 and nothing if it has sent: real MPS eight times the one, six times the other",
    ),
    Allowance(
        "hears of the dead server",
        ("X22", "X23"),
        "real",
        r"Control D1: Unable to read new connection type information",
        "whether the daemon hears first of the killed server or of the front-end is chance: NVIDIA's driver takes 1 to "
        "80 ms to let a starting server die",
    ),
    Allowance(
        "killed at once",
        ("X24", "X26"),
        "real",
        r"Control D1: (Accepting connection\.\.\.|User did not send valid credentials|"
        r"Unable to read new connection type information)|"
        r"Other S\d+: (Startup|Connecting to control daemon on socket: PIPE/control|Initializing server process)",
        "the server is killed within a millisecond or two of its start: how far it has come is chance",
    ),
    Allowance(
        "its own connection",
        ("X28",),
        "real",
        r"Server S5: User did not send valid credentials",
        "the descriptor that the daemon closed is the new server's by now, and handed to it as its client's; the "
        "simulator's hands over the dead client's, which the server says (as in X15)",
    ),
    Allowance(
        "killed behind it",
        ("X15",),
        "real",
        r"Control D1: (Unable to accept connection|User did not send valid credentials)",
        "the client that holds the daemon up and the one behind it are killed in the same millisecond: whether the "
        "daemon takes up the second before or after it is dead is chance, on a busy machine",
    ),
    Allowance(
        "who leaves first",
        ("R4", "X3", "X22"),
        "real",
        r"Server S\d+: Client \{PID: c\d+, Context ID: 1\} exiting\. Number of active client contexts is \d\.",
        "clients that end within a few milliseconds go in any order, and the line counts who is left; two real runs of "
        "R4 differ in it",
    ),
    Allowance(
        "repeated shutdowns",
        ("R3", "V2"),
        "",
        r"Control (D1|D): (Accepting connection\.\.\.|NEW UI|UI closed|Cmd:(shutdown_server|get_server_list).*|S\d|"
        r"Server S\d? ?not found|Try shutting down server S1, backoff is (dis|en)abled|Server S1 is busy|"
        r"Control will try shutting down server S1 again in at most \d+ms)",
        "the script repeats shutdown_server and get_server_list every 50 ms until the server has gone: how often, and "
        "whether the first comes before the server has noticed the end of its client, is chance (real MPS: 2 to 5 "
        "times; a killed client takes 40 ms to die in NVIDIA's driver, none in the simulator)",
    ),
    Allowance(
        "front-end starts slower",
        ("R2",),
        "real",
        r"Server S\d: Device pinned memory limit for device 0 set to 0x40000000 bytes",
        "a command that is sent at Ready races with the new client's first context; the simulator's front-end needs "
        "20 ms to start, NVIDIA's 2 ms, so its limit comes later in server.log",
    ),
    Allowance(
        "set while the server starts",
        ("Q1",),
        "",
        r"c sms (26|46) meminfo CUDA_SUCCESS free (most|[23] GiB) total 143155 MiB|"
        r"Server S: Active Threads Percentage set to 35\.0|"
        r"Server S: Device pinned memory limit for device 0 set to 0x80000000 bytes",
        "the defaults are changed between a server's start and its Ready: which of the four clients still gets them is "
        "what the scenario shows to be chance",
    ),
    Allowance(
        "at the last moment",
        ("X13",),
        "real",
        r"ctl terminate_client S1 c10 -> (no answer|rc=0 \(took 3 to 10 s\))|  0|"
        r"c6 sync CUDA_ERROR_MPS_CLIENT_TERMINATED",
        "the script's patience with c10 ends in the very millisecond in which the answer comes, and c6 is killed in "
        "the one in which it prints",
    ),
    Allowance(
        "a late quit",
        ("Q6", "V6"),
        "real",
        r"Control D1: (Server S1 is busy|Control will try shutting down server S1 again in at most 200ms|"
        r"Try shutting down server S1, backoff is enabled)|"
        r"Server S1: Server (has been notified to shutdown|was unable to shutdown due to active clients)",
        "the script's quit comes within the 60 ms in which the server destroys its context after a fault, and finds "
        "one worker; on a busy machine the simulator's front-end, 20 ms and more to start, comes later",
    ),
    Allowance(
        "shorter lives",
        ("X20", "X21"),
        "real",
        r"Control D: \(back-off of S goes on, enabled, doubling\)",
        "a second wait of the back-off comes only if clients keep the server busy for 200 ms; with a CUDA library to "
        "load they do, the simulator's do not always",
    ),
    Allowance(
        "two threads write",
        ("H8",),
        "real",
        r"Server S1: Client \{PID: c1, Context ID: 0\} connected",
        "a server's own thread and the new one of its client write a line each in the same millisecond: both orders in "
        "one run of H8",
    ),
    Allowance(
        "the neighbour that lived",
        ("Q6",),
        "recording",
        r"Control D: ACTIVE|c done, last CUDA_SUCCESS|ctl get_server_status S -> rc=0 \| ACTIVE",
        "in recording 03 a neighbour outlived the SIGKILL of a stopped client with a kernel in flight; in every later "
        "real run (Q6, V6, X13 four times) it was harmed, and the simulator follows those",
    ),
)


def named(name: str, against: str, differences: Sequence[str]) -> tuple[list[str], list[str]]:
    """The differences that no allowance of this scenario covers, and the names of the allowances that were needed."""
    left: list[str] = []
    used: list[str] = []
    for line in differences:
        sign, text = line[:1], line[2:]
        found = next(
            (
                each.name
                for each in ALLOWED
                if sign in ("-", "+")
                and name in each.scenarios
                and against.startswith(each.against)
                and re.fullmatch(each.lines, text)
            ),
            None,
        )
        if found is None:
            left.append(line)
        elif found not in used:
            used.append(found)
    return left, used
