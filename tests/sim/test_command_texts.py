"""Answers, exit statuses and log lines, compared literally with recordings 01 (S0, S2) and 02 (R1, R7)."""

from __future__ import annotations

import ast
import re

from mpsagent.sim import gpu
from tests import recordings
from tests.sim.conftest import A, Mps, messages, normal

_COMMAND = re.compile(r"^\[ *[\d.]+\] ctl> ('.*'|\".*\") rc=(\d+) [\d.]+ms out=(.*) err=('.*')$", re.MULTILINE)


def section(recording: str, name: str) -> str:
    text = recordings.path(recording).read_text()
    return re.split(r"^\[ *[\d.]+\] =+ ", text.split(f"=== {name} ", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def said(text: str) -> list[tuple[str, int, str, str]]:
    """(command, exit status, output, errors) of every `ctl>` line."""
    return [
        (ast.literal_eval(command), int(status), ast.literal_eval(output), ast.literal_eval(errors))
        for command, status, output, errors in _COMMAND.findall(text)
    ]


def test_every_command_without_a_server(mps: Mps) -> None:
    """Each answer of 01 S2, and that each leaves the same lines in control.log."""
    mps.start()
    recorded = section("01", "S2")
    expected = said(recorded)
    assert len(expected) > 40
    uuid = gpu.machine(1)[0].uuid
    for command, status, output, errors in expected:
        assert mps.run(command) == (status, re.sub(r"GPU-[-0-9a-f]{36}", uuid, output), errors), command
    there = messages(recordings.sections("01")["S2"].control.decode())
    here = messages(mps.log("control.log"))[3:]
    assert here == [re.sub(r"GPU-[-0-9a-f]{36}", uuid, line) for line in there]


def test_help_and_version(mps: Mps) -> None:
    """They are printed without a daemon, word for word."""
    recorded = recordings.path("01").read_text()
    for option in ("-h", "--help", "-v", "--version"):
        text = recorded.split(f"['{option}'] rc 0 OUT ", 1)[1].split(" ERR \n", 1)[0]
        done = mps.program(option)
        assert (done.returncode, done.stdout, done.stderr) == (0, text, "")


def test_no_daemon(mps: Mps) -> None:
    assert said(section("01", "S0")) == [("get_server_list", *mps.run("get_server_list"))]


def test_one_users_work_with_limits(mps: Mps) -> None:
    """02 R1 from start to quit: both logs agree line by line, uninitialised memory included."""
    control = mps.start()
    mps.ctl("set_default_active_thread_percentage 30")
    mps.ctl("set_default_device_pinned_mem_limit 0 2G")
    assert mps.client(A, "alloc", "1500").end() == 0
    assert mps.client(A, "alloc", "2500").end() == 13
    mps.saw("server.log", rf"Client process {mps.clients[1].pid} disconnected")
    server = mps.server()
    for command in ("set_default_active_thread_percentage 100", f"set_active_thread_percentage {server} 40"):
        mps.ctl(command)
    mps.ctl(f"set_device_pinned_mem_limit {server} 0 1G")
    assert mps.client(A, "alloc", "900").end() == 13
    assert mps.client(A, "alloc", "100").end() == 0
    mps.saw("server.log", rf"Client process {mps.clients[3].pid} disconnected")
    assert mps.ctl(f"get_device_pinned_mem_limit {server} 0") == "1G\n"
    for value, shown in (("1X", "1M\n"), ("1.5G", "1M\n"), ("0G", "")):
        mps.ctl(f"set_device_pinned_mem_limit {server} 0 {value}")
        assert mps.ctl(f"get_device_pinned_mem_limit {server} 0") == shown
    assert mps.ctl("quit -t 1") == ""
    assert [client.sms() for client in mps.clients] == [38, 38, 52, 52]
    assert [client.free() for client in mps.clients] == [1881, 1881, 806, 806]
    names = ["control", "server", "c1", "c2", "c3", "c4", "A"]
    here = dict(zip([control, server, *[client.pid for client in mps.clients], A], names, strict=True))
    there = dict(zip([464, 472, 470, 481, 494, 499, 1001], names, strict=True))
    recorded = recordings.sections("02")["R1"]
    assert normal(mps.log("control.log"), here) == normal(recorded.control.decode(), there)
    assert normal(mps.log("server.log"), here) == normal(recorded.server.decode(), there)


def test_other_users_may_ask_but_not_change(mps: Mps) -> None:
    """02 R7: refused in words, with exit status 0."""
    mps.start()
    refused = (
        f"Insufficient privileges for UID {A}. Control deamon settings can only be modified by the user who started it "
        "or by the root user.\n"
    )
    assert mps.run("get_default_active_thread_percentage", A) == (0, "100.0\n", "")
    assert mps.run("set_default_active_thread_percentage 10", A) == (0, refused, "")
    assert mps.run("set_default_device_pinned_mem_limit 0 1G", A) == (0, refused, "")
    assert mps.run("quit", A) == (0, "Not enough privilege to execute quit command\n", "")
    assert mps.ctl("get_default_active_thread_percentage") == "100.0\n"


def test_lists_of_clients(mps: Mps) -> None:
    """ps, get_client_list and get_device_client_list with a client at work (01 S4, 03 Q11)."""
    mps.start()
    client = mps.busy(A, "sleep", "60")
    server = mps.server()
    header, row, end = mps.ctl("ps").split("\n")
    assert header == "PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        "
    assert row.startswith(f"{client.pid:<10}{1:<10}{server:<15}{gpu.machine(1)[0].uuid[:22]:<26}")
    assert end == ""
    assert mps.ctl("ps -p 1") == "Server 1 not found\nServer 1 not found\n\n"
    assert mps.ctl(f"get_client_list {server}") == f"{client.pid}\n"
    assert mps.ctl("get_device_client_list") == f"[0] 00:00.0, NVIDIA H200\n{client.pid}.1\n"
    assert mps.ctl(f"get_device_client_list {server + 1}") == f"Server {server + 1} not found\n"
    assert mps.ctl(f"device_query {server}").count("\n") == 7
    assert "] \nServer " in mps.log("control.log"), "the prefix stands on some lines of an answer only"


def test_a_front_end_beside_an_open_one_is_turned_away(mps: Mps) -> None:
    """One session at a time: while `quit` is under way every other front-end is accepted and closed (02 R10)."""
    mps.start()
    mps.busy(A, "sleep", "60")
    quitting = mps.front_end("quit")
    mps.saw("control.log", "again in at most 200ms")
    # whether it notices is chance (X27 of the real runs)
    seen = {mps.run("get_server_list") for _ in range(8)}
    assert seen <= {(1, "", "Cannot send command to MPS control daemon process\n"), (0, "", "")}
    late = mps.client(A, "query")
    assert late.end() == 10
    assert "cuInit CUDA_ERROR_MPS_CONNECTION_FAILED" in late.text()
    mps.clients[0].process.kill()
    assert quitting.wait(60) == 0
    assert messages(mps.log("control.log"))[-1] == "Exit with status 0"
