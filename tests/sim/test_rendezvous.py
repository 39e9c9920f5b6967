"""The messages at the control socket (recording 08, G1 to G7): clients, relays, and who is turned away."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sim import relay
from tests.sim.conftest import PATIENCE, A, Client, Mps, messages

CLIENT = b"\2\0\0\0"


def own() -> relay.Credentials:
    return os.getpid(), os.getuid(), os.getgid()


def test_the_daemons_part_byte_for_byte(mps: Mps) -> None:
    """G1: greeting, credentials and kind, then OUTBCUFD with one descriptor; the daemon shows its own credentials."""
    daemon = mps.start()
    with relay.connect(mps.pipe / "control") as probe:
        assert relay.packet(probe) == (b"OUTBHELL\0", (daemon, 0, 0), [])
    mps.saw("control.log", "User did not send valid credentials")
    with relay.introduced(mps.pipe / "control", CLIENT) as client:
        answer, who, descriptors = relay.packet(client)
        assert (answer, who, len(descriptors)) == (b"OUTBCUFD\0", (daemon, 0, 0), 1)
        with socket.socket(fileno=descriptors[0]) as server:
            assert server.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_SEQPACKET
            serving = mps.server_process()
            for _ in range(4):
                said, who, more = relay.packet(server)
                assert (said, who, len(more)) == (b"OUTBCUFD\0", (serving, 0, 0), 1)
                os.close(more[0])
            assert relay.packet(server) == (b"\0", (serving, 0, 0), [])
            relay.say(server, b"OUTBCRED\0", own())
            relay.say(server, bytes(4))
            relay.say(server, b"\xff\0\0\0")
            assert relay.packet(server) == (bytes(4), (serving, 0, 0), [])
            relay.say(client, bytes(4))
            assert relay.packet(client)[0] == b""
    assert f"NEW CLIENT {os.getpid()} from user 0: Server is not ready" in mps.log("control.log")


def test_the_clients_part_byte_for_byte(mps: Mps) -> None:
    """G2: a probe that leaves after the greeting, then a whole rendezvous for the channel and one for each context."""
    mps.start()
    gate = relay.Relay(mps.pipe / "control")
    gate.open.set()
    with relay.listening(mps.directory / "public" / "control", gate.serve):
        client = mps.client(A, "two", "0", CUDA_MPS_PIPE_DIRECTORY=str(mps.directory / "public"))
        assert client.end() == 0
    each = [(client.pid, said) for said in (b"OUTBCRED\0", CLIENT, b"OUTBCUFD\0", bytes(4))]
    gate.seen.remove((0, b""))  # each connection is another thread's, and the probe's may come to it late
    assert gate.seen == [*each, *each, *each]
    assert [who[1:] for who in gate.held] == [(A, A)] * 3
    assert f"NEW CLIENT {client.pid} from user {A}: Server already exists" in messages(mps.log("control.log"))


def test_credentials_that_root_passes_on_count(mps: Mps) -> None:
    """G5: control.log and lists name the client, and its user's server is started, although root connected."""
    mps.start()
    gate = relay.Relay(mps.pipe / "control")
    with relay.listening(mps.directory / "public" / "control", gate.serve):
        client = mps.client(A, "sleep", "600", CUDA_MPS_PIPE_DIRECTORY=str(mps.directory / "public"))
        while not gate.held:
            time.sleep(0.01)
        assert client.text() == "", "held without an answer it waits"
        gate.open.set()
        client.saw("meminfo")
    server = mps.server()
    assert Path(f"/proc/{server}").stat().st_uid == A
    assert mps.ctl(f"get_client_list {server}") == f"{client.pid}\n"
    assert f"NEW CLIENT {client.pid} from user {A}: Server is not ready" in mps.log("control.log")


@pytest.mark.parametrize("speed", [1.0, pytest.param(0.05, marks=pytest.mark.long)], ids=["told", "not told"])
def test_who_loses_the_server_before_it_was_told_its_limits_has_none_at_the_next(mps: Mps, speed: float) -> None:
    """server-lost-at-start.txt of docs/measured: 8 multiprocessors and all memory for the 4 of 14 clients that came to
    their server in its last 8 ms."""
    mps.start(MPSSIM_SPEED=str(speed))
    mps.ctl("set_default_active_thread_percentage 20\nset_default_device_pinned_mem_limit 0 2G")
    killed: list[int] = []

    class Losing(relay.Relay):
        def acknowledged(self, _: socket.socket) -> None:
            if not killed:
                killed.append(mps.server_process())
                time.sleep(0.1 if speed == 1.0 else 0.04)
                os.kill(killed[0], signal.SIGKILL)

    gate = Losing(mps.pipe / "control", lambda *_: killed and mps.saw("control.log", f"Server {killed[0]} exited"))
    gate.open.set()
    with relay.listening(mps.directory / "public" / "control", gate.serve):
        client = mps.client(A, "query", CUDA_MPS_PIPE_DIRECTORY=str(mps.directory / "public"))
        assert client.end() == 0
    assert (client.sms(), client.free() > 100_000) == ((26, False) if speed == 1.0 else (8, True))
    assert f"Client {{PID: {client.pid}, Context ID: 1}} connected" in mps.log("server.log")


def test_a_client_is_told_its_limits_while_the_server_waits_for_another_one(mps: Mps) -> None:
    """By its own thread: such threads go on while a server is stuck (H8 of tests/world/handovers-h200.txt). The daemon
    learns of its server's end when the other one, for whose acknowledgement it waits, has left."""
    mps.start(MPSSIM_SPEED="0.2")  # told after 40 ms: the other one has come by then
    mps.ctl("set_default_active_thread_percentage 20\nset_default_device_pinned_mem_limit 0 2G")
    killed: list[int] = []

    class Losing(relay.Relay):
        def acknowledged(self, daemon: socket.socket) -> None:
            if killed:
                return
            killed.append(mps.server_process())
            relay.say(daemon, bytes(4), own())  # else the daemon greets the other one after this one
            with relay.introduced(self.daemon, CLIENT, (os.getpid(), A, A)) as silent:
                (descriptor,) = relay.packet(silent)[2]
                time.sleep(0.5)
                os.kill(killed[0], signal.SIGKILL)
            os.close(descriptor)

    gate = Losing(mps.pipe / "control", lambda *_: killed and mps.saw("control.log", f"Server {killed[0]} exited"))
    gate.open.set()
    with relay.listening(mps.directory / "public" / "control", gate.serve):
        client = mps.client(A, "query", CUDA_MPS_PIPE_DIRECTORY=str(mps.directory / "public"))
        assert client.end() == 0
    assert (client.sms(), client.free() > 100_000) == (26, False)


def turned_away(manner: str, probes: list[int]) -> Callable[[socket.socket], None]:
    def serve(client: socket.socket) -> None:
        probes.append(0)
        if manner == "nobody greets":
            return
        if manner == "only the probe is greeted" and len(probes) > 1:
            return
        relay.say(client, b"OUTBHELL\0")
        if relay.packet(client)[0] != b"OUTBCRED\0" or manner == "closed after the credentials":
            return
        assert relay.packet(client)[0] == CLIENT
        if manner == "another answer":
            relay.say(client, b"OUTBNOPE\0")
        elif manner == "no descriptor":
            relay.say(client, b"OUTBCUFD\0")
        relay.packet(client)

    return serve


@pytest.mark.parametrize(
    "manner",
    ["only the probe is greeted", "closed after the credentials", "another answer", "no descriptor"],
)
def test_whoever_is_turned_away_after_the_probe_gets_an_error(mps: Mps, manner: str) -> None:
    """G7, and libcuda of 470 to 550: only the probe decides about inside or outside."""
    with relay.listening(mps.pipe / "control", turned_away(manner, [])):
        client = mps.client(A, "query")
        assert client.end() == 10
    assert "cuInit CUDA_ERROR_MPS_CONNECTION_FAILED" in client.text()


def test_closed_before_the_greeting_a_client_runs_outside(mps: Mps) -> None:
    """G7."""
    with relay.listening(mps.pipe / "control", turned_away("nobody greets", [])):
        client = mps.client(A, "query")
        assert client.end() == 0
    assert client.free() == 142629


def test_a_descriptor_that_is_closed_without_a_word_hangs_the_server(mps: Mps) -> None:
    """What X1 looks like from the server: it waits for a client's credentials, finds the end, and answers nobody again.
    A relay that has the descriptor and cannot pass it on does the same."""
    mps.start()
    assert mps.client(A, "query").end() == 0
    server = mps.server()
    mps.saw("server.log", "disconnected")
    process = mps.client(A, "sleep", "600", CUDA_MPS_PIPE_DIRECTORY="/nonexistent")
    with relay.introduced(mps.pipe / "control", CLIENT, (process.pid, A, A)) as client:
        for descriptor in relay.packet(client)[2]:
            os.close(descriptor)
    mps.saw("server.log", rf"Server +{server}\] User did not send valid credentials")
    late = mps.client(A, "query")
    mps.saw("control.log", f"NEW CLIENT {late.pid} from user {A}: Server already exists")
    os.kill(server, signal.SIGKILL)
    assert late.end() == 10


@pytest.mark.parametrize("said", [0, 1, 2])
def test_whoever_goes_away_in_the_middle_of_the_handshake_leaves_the_server_stuck(mps: Mps, said: int) -> None:
    """X1, X15 and answer 5 of the H100: the server is not heard of again, the daemon waits for it at the next question.
    Where in the handshake the client was has not been told apart on real MPS."""
    mps.start(MPSSIM_SPEED="10")
    with relay.introduced(mps.pipe / "control", CLIENT) as client:
        (descriptor,) = relay.packet(client)[2]
        with socket.socket(fileno=descriptor) as server:
            for word in (b"OUTBCRED\0", bytes(4))[:said]:
                relay.say(server, word, own())
    mps.saw("server.log", "User did not send valid credentials")
    unanswered(mps, f"get_server_status {mps.server_process()}")


def unanswered(mps: Mps, command: str) -> int:
    """Kill a front-end whose command the daemon has read and does not answer. Return the size of the log before.
    Until "UI closed" stands after that the daemon turns every other front-end away."""
    before = len(mps.log("control.log"))
    process = mps.front_end(command)
    mps.saw("control.log", f"Cmd:{command}", after=before)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.kill()
    process.wait()
    return before


def test_whoever_finishes_the_handshake_for_a_client_frees_the_server(mps: Mps) -> None:
    """A relay has a duplicate of the descriptor: the server sees a client with the relay's pid, which leaves."""
    mps.start(MPSSIM_SPEED="10")
    with relay.introduced(mps.pipe / "control", CLIENT) as client:
        (descriptor,) = relay.packet(client)[2]
        with socket.socket(fileno=descriptor) as server:
            for word in (b"OUTBCRED\0", bytes(4), b"\xff\0\0\0"):
                relay.say(server, word, own())
            while relay.packet(server)[0] != bytes(4):
                pass
    mps.saw("server.log", f"Client process {os.getpid()} disconnected")
    assert mps.client(0, "query").end() == 0


def test_an_acknowledgement_without_a_meeting_blocks_the_server_until_the_rest_is_said(mps: Mps) -> None:
    """By a client that lives (docs/measured/2026-11-23-2xH200-580.159.04): the daemon knows its servers and defaults,
    and hangs on each question to a server. "connected" comes with the meeting, no sooner."""
    mps.start()
    neighbour = mps.client(A, "sleep", "600")
    mps.saw("server.log", f"PID: {neighbour.pid}, Context ID: 1}} is ACTIVE")
    server = mps.server_process()
    met = f"Client {{PID: {os.getpid()}, Context ID: 0}} connected"
    with relay.introduced(mps.pipe / "control", CLIENT, (os.getpid(), A, A)) as client:
        (descriptor,) = relay.packet(client)[2]
        relay.say(client, bytes(4))
        with socket.socket(fileno=descriptor) as copy:
            assert mps.ctl("get_server_list\nget_default_active_thread_percentage") == f"{server}\n100.0\n"
            before = unanswered(mps, f"get_active_thread_percentage {server}")
            assert met not in mps.log("server.log")
            for word in (b"OUTBCRED\0", bytes(4), b"\xff\0\0\0"):
                relay.say(copy, word, own())
            while relay.packet(copy)[0] != bytes(4):
                pass
            mps.saw("control.log", "UI closed", after=before)
            assert mps.ctl(f"get_active_thread_percentage {server}") == "100.0\n"
            assert met in mps.log("server.log")
    assert neighbour.process.poll() is None


def test_who_says_nothing_or_half_holds_up_everybody(mps: Mps) -> None:
    """X29, and drivers 470 to 550: silent, credentials without a kind, a length without a text."""
    mps.start()
    control = mps.pipe / "control_privileged"
    silent = relay.connect(control)
    half = relay.connect(control)
    relay.packet(silent)
    held(mps)
    silent.close()
    relay.packet(half)
    relay.say(half, b"OUTBCRED\0", own())
    held(mps)
    half.close()
    mps.saw("control.log", "Unable to read new connection type information")
    session = relay.introduced(control, b"\4\0\0\0")
    mps.saw("control.log", "NEW UI")
    assert mps.client(A, "query").end() == 0, "an open front-end holds up no client"
    relay.say(session, (17).to_bytes(8, "little"))
    held(mps)
    session.close()
    mps.saw("control.log", "UI closed")
    assert mps.ctl("get_default_active_thread_percentage") == "100.0\n"


def held(mps: Mps) -> None:
    """Soon nobody is greeted any more."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with relay.connect(mps.pipe / "control") as next_one:
            next_one.settimeout(0.3)
            try:
                relay.packet(next_one)
            except TimeoutError:
                return
    pytest.fail("the daemon greets on and on")


def test_other_kinds_of_peers(mps: Mps) -> None:
    """Drivers 470 to 550: a strange server and a debugger are closed, an unknown kind is kept for ever."""
    mps.start()
    for kind, line in ((1, f"NEW SERVER {os.getpid()}: Ignoring old"), (3, f"NEW DEBUGGEE {os.getpid()} from user 0")):
        with relay.introduced(mps.pipe / "control", bytes([kind, 0, 0, 0])) as peer:
            assert relay.packet(peer)[0] == b""
        assert line in mps.log("control.log")
    with relay.introduced(mps.pipe / "control", bytes([5, 0, 0, 0])) as peer:
        mps.saw("control.log", "Unknown type of connection")
        peer.settimeout(0.2)
        with pytest.raises(TimeoutError):
            relay.packet(peer)


def refused(client: Client) -> str:
    assert client.end() == 10
    return client.text()


def test_a_client_acknowledges_with_its_status(mps: Mps) -> None:
    """Measured on an H100: 27 03 00 00 (807) for a server in FAULT, 0 where all is well."""
    mps.start()
    survivor = mps.busy(A, "sleep", "600")
    assert mps.client(A, "oob", "0").end() == 17
    survivor.saw("work now")
    gate = relay.Relay(mps.pipe / "control")
    gate.open.set()
    with relay.listening(mps.directory / "public" / "control", gate.serve):
        client = mps.client(A, "query", CUDA_MPS_PIPE_DIRECTORY=str(mps.directory / "public"))
        assert "MPS_SERVER_NOT_READY" in refused(client)
    said = (client.pid, (807).to_bytes(4, "little"))
    end = time.monotonic() + PATIENCE
    while said not in gate.seen:  # the relay's thread reads it after the client has gone
        assert time.monotonic() < end, gate.seen
        time.sleep(0.01)


def test_a_context_at_a_socket_that_has_gone(mps: Mps) -> None:
    """Measured on an H100: the relay ends after the first rendezvous, and the context fails."""
    mps.start(MPSSIM_SPEED="0.1")
    gate = relay.Relay(mps.pipe / "control")
    gate.open.set()
    mps.ctl(f"start_server -uid {A}")
    with relay.listening(mps.directory / "public" / "control", gate.serve):
        client = mps.client(A, "query", CUDA_MPS_PIPE_DIRECTORY=str(mps.directory / "public"))
        while len(gate.seen) < 5:
            time.sleep(0.01)
        (mps.directory / "public" / "control").unlink()
        assert client.end() == 12
    assert "ctx CUDA_ERROR_MPS_CONNECTION_FAILED" in client.text()
