"""Front-ends at the public sockets: each command a session of its own, users by turns, changes for root only."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from mpsagent.gate.frontends import MOST_OF_A_USER, changes, forbidden
from mpsagent.gate.pacing import SESSION, Rates, answers_cost, command_cost
from mpsagent.mps.rendezvous import END, Answer, Exit, Kind, command_messages, decode_answer
from mpsagent.wire.link import FrontEnd, User
from tests.gate.rig import A, B, C, Rig, admissions, introduce, limits, raw
from tests.waiting import until

CONTAINER = ("unshare", "--pid", "--fork", "--kill-child")
"""Before a command: what is root of a container to the kernel."""
BURST = int(Rates().burst / (SESSION + 60))
"""Short commands that a user may ask at once, about."""

_AS_USER = r"""
import os, socket, struct, sys, threading
path, uid, *commands = sys.argv[1:]
os.setgroups([]); os.setgid(int(uid)); os.setuid(int(uid))
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
s.connect(path)
assert s.recv(64) == b"OUTBHELL\0"
who = struct.pack("iII", os.getpid(), os.geteuid(), os.getegid())
s.sendmsg([b"OUTBCRED\0"], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, who)])
s.send(b"\4\0\0\0")
def ask():
    for command in commands:
        data = command.encode() + b"\n\0"
        s.send(struct.pack("<Q", len(data))); s.send(data)
    s.send(bytes(8))
threading.Thread(target=ask, daemon=True).start()  # answers that nobody reads would end it
while data := s.recv(8192):
    if data[0] == 1: sys.exit(struct.unpack_from("<I", data, 4)[0])
    print(data[4:].decode())
sys.exit(99)
"""

_WAITING = r"""
import array, fcntl, os, socket, struct, sys
path, uid, number, command = sys.argv[1:]
os.setgroups([]); os.setgid(int(uid)); os.setuid(int(uid))
data = command.encode() + b"\n\0"
kept = []
for _ in range(int(number)):
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.connect(path)
    s.recv(64)
    who = struct.pack("iII", os.getpid(), os.geteuid(), os.getegid())
    s.sendmsg([b"OUTBCRED\0"], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, who)])
    for word in (b"\4\0\0\0", struct.pack("<Q", len(data)), data): s.send(word)
    kept.append(s)
for s in kept:
    unread = array.array("i", [1])
    while unread[0]: fcntl.ioctl(s.fileno(), 0x5411, unread)  # SIOCOUTQ: until the gate has read it
said = []
for s in kept:
    try: said.append(s.recv(8192, socket.MSG_DONTWAIT))
    except BlockingIOError: pass
print(said, flush=True)
sys.stdin.read()
"""


def ask(sock: socket.socket, *commands: str) -> None:
    for command in commands:
        for message in command_messages(command):
            sock.send(message)


def answers(sock: socket.socket) -> tuple[list[str], int | None]:
    """All until the end, and the exit status."""
    texts = []
    while data := sock.recv(8192):
        said = decode_answer(data)
        if isinstance(said, Exit):
            return texts, said.status
        assert isinstance(said, Answer)
        texts.append(said.text)
    return texts, None


def front_end(rig: Rig, name: str = "control_privileged") -> socket.socket:
    return introduce(raw(rig.public / name), Kind.FRONT_END)


def words_of(rig: Rig, uid: int, *commands: str, prefix: Sequence[str] = ()) -> list[str]:
    return [*prefix, sys.executable, "-I", "-S", "-c", _AS_USER, str(rig.public / "control"), str(uid), *commands]


def as_user(rig: Rig, uid: int, *commands: str, prefix: Sequence[str] = ()) -> tuple[list[str], int]:
    done = subprocess.run(words_of(rig, uid, *commands, prefix=prefix), capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.stdout.splitlines(), done.returncode


@pytest.mark.parametrize(
    "command", ["get_server_list", " ps", "ps", "get_default_device_pinned_mem_limit 0", "device_query"]
)
def test_questions_change_nothing(command: str) -> None:
    assert not changes(command)
    assert forbidden(command, 1101) is None


@pytest.mark.parametrize(
    "command",
    [
        "set_default_active_thread_percentage 5",
        " set_default_active_thread_percentage 5",
        "\tset_default_active_thread_percentage\t5",
        "start_server -uid 5",
        "shutdown_server 7 -f",
        "terminate_client 7 8",
        "quit",
        "\tquit -t 1",
    ],
)
def test_what_changes_something_is_for_root(command: str) -> None:
    assert changes(command)
    assert forbidden(command, 0) is None
    assert "rivilege" in (forbidden(command, 1101) or "")


def test_what_is_not_known_is_left_to_the_daemon_when_root_says_it() -> None:
    assert changes("reset_everything")
    assert forbidden("reset_everything", 0) is None
    assert forbidden("reset_everything", 1101) == 'Unknown command "reset_everything"'


@pytest.mark.root
def test_roots_commands_are_answered_in_order_and_changes_reported(rig: Rig) -> None:
    daemon, agent = rig.start(None, "server=77")
    sock = front_end(rig)
    ask(
        sock,
        "get_server_list",
        "set_default_active_thread_percentage 40",
        "foo",
        "get_default_active_thread_percentage",
    )
    sock.send(END)
    assert answers(sock) == (["77", "40.0", 'Unknown command "foo"', "40.0"], 0)
    assert all(one["uid"] == 0 for one in daemon.saw("command"))
    seen = agent.wait(FrontEnd)
    assert (seen.command, seen.pid, seen.uid, seen.refused) == (
        "set_default_active_thread_percentage 40",
        os.getpid(),
        0,
        False,
    )
    agent.say(admissions(User(A, "all", limits(30))))
    assert rig.client(A).served()["threads"] == "30.0"


@pytest.mark.root
def test_a_user_may_ask_and_nothing_more(rig: Rig) -> None:
    daemon, agent = rig.start(None, "server=77")
    out, status = as_user(rig, A, "get_server_list", "set_default_active_thread_percentage 99", "quit", "ps")
    assert status == 0
    assert (out[0], out[-1]) == ("77", 'Unknown command "ps"')
    assert out[1].startswith(f"Insufficient privileges for UID {A}.")
    assert [(one["text"], one["uid"]) for one in daemon.saw("command")] == [("get_server_list", A), ("ps", A)]
    assert [(one.command, one.refused) for one in [agent.wait(FrontEnd), agent.wait(FrontEnd, 2)]] == [
        ("set_default_active_thread_percentage 99", True),
        ("quit", True),
    ]


@pytest.mark.root
def test_root_in_a_container_may_ask_and_nothing_more(rig: Rig) -> None:
    """Root of another pid namespace is root for the kernel, and could stop MPS for the whole machine."""
    daemon, agent = rig.start(None, "server=77")
    words = ("get_server_list", "set_default_active_thread_percentage 99", "quit")
    out, status = as_user(rig, 0, *words, prefix=CONTAINER)
    assert status == 0
    assert out[0] == "77"
    assert [text.partition(" changes ")[0] for text in out[1:]] == [
        'mpsagent: "set_default_active_thread_percentage"', 'mpsagent: "quit"',
    ]  # fmt: skip
    assert [one["text"] for one in daemon.saw("command")] == ["get_server_list"]
    assert [agent.wait(FrontEnd, number).refused for number in (1, 2)] == [True, True]


@pytest.mark.root
def test_one_that_is_left_open_holds_up_nobody(rig: Rig) -> None:
    rig.start(admissions(User(A, "all", limits(30))))
    opened = [front_end(rig), front_end(rig, "control")]
    half = front_end(rig)
    half.send(struct.pack("<Q", 17))
    ask(opened[0], "get_default_active_thread_percentage")
    assert decode_answer(opened[0].recv(8192)) == Answer("100.0")
    rig.client(A).served()
    assert as_user(rig, B, "get_default_active_thread_percentage") == (["30.0"], 0)
    ask(opened[0], "get_default_active_thread_percentage")
    assert decode_answer(opened[0].recv(8192)) == Answer("30.0")


@pytest.mark.root
def test_texts_that_kill_the_daemon_or_forge_its_log_do_not_reach_it(rig: Rig) -> None:
    daemon = rig.start_daemon()
    rig.start_gate()
    sock = front_end(rig)
    for data in (b"ps " + b"x" * 4000 + b"\n\0", b"ps\x1b[31m\n\0", b"\xff\n\0"):
        sock.send(struct.pack("<Q", len(data)))
        sock.send(data)
        said = decode_answer(sock.recv(8192))
        assert isinstance(said, Answer)
        assert said.text.startswith("mpsagent:")
    data = b"ps\n[2026-01-01 00:00:00.000 Control     1] NEW CLIENT 1 from user 0\n\0"
    sock.send(struct.pack("<Q", len(data)))
    sock.send(data)
    assert decode_answer(sock.recv(8192)) == Answer('Unknown command "ps"')
    assert [one["text"] for one in daemon.saw("command")] == ["ps"]
    assert daemon.process.poll() is None


@pytest.mark.root
@pytest.mark.parametrize(
    "messages",
    [[b"ps\n\0"], [bytes(7)], [struct.pack("<Q", 3), b"ps\n\0"], [struct.pack("<Q", 1 << 40), b"ps\n\0"]],
)
def test_other_framings_end_the_session_as_with_the_real_daemon(rig: Rig, messages: list[bytes]) -> None:
    rig.start_daemon()
    rig.start_gate()
    sock = front_end(rig)
    for message in messages:
        sock.send(message)
    assert answers(sock) == ([], 0)


@pytest.mark.root
def test_without_a_daemon_a_front_end_is_told(rig: Rig) -> None:
    rig.start_gate()
    out, status = as_user(rig, A, "get_server_list")
    assert status == 1
    assert out[0].startswith("mpsagent: the control daemon cannot be reached")


@pytest.mark.root
def test_more_front_ends_than_a_user_may_have_are_told_so(rig: Rig) -> None:
    rig.start_daemon()
    rig.start_gate()
    kept = [front_end(rig) for _ in range(MOST_OF_A_USER)]
    for sock in kept:
        ask(sock, "get_default_active_thread_percentage")
        assert decode_answer(sock.recv(8192)) == Answer("100.0")
    one_more = front_end(rig)
    texts, status = answers(one_more)
    assert status == 1
    assert "front-ends open" in texts[0]
    assert as_user(rig, A, "get_default_active_thread_percentage") == (["100.0"], 0)
    for sock in kept:
        sock.close()

    def answered() -> bool:
        sock = front_end(rig)
        ask(sock, "get_default_active_thread_percentage")
        sock.send(END)
        return answers(sock) == (["100.0"], 0)

    until(answered)


@pytest.mark.root
def test_nobody_is_kept_out_by_the_front_ends_of_one_user_with_many_uids(rig: Rig) -> None:
    """All places taken: who has most of them gives one up. Root has a place in any case."""
    rig.start_daemon()
    rig.start_gate()
    code = (
        "import os, socket, struct, sys\n"
        "kept = []\n"
        "for uid in range(20100, 20120):\n"
        "    if os.fork() == 0:\n"
        "        os.setgroups([]); os.setgid(uid); os.setuid(uid)\n"
        "        for _ in range(16):\n"
        "            s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1]); s.recv(64)\n"
        "            who = (1, 2, struct.pack('iII', os.getpid(), uid, uid))\n"
        "            s.sendmsg([b'OUTBCRED\\0'], [who]); s.send(b'\\4\\0\\0\\0'); kept.append(s)\n"
        "        print('on', flush=True); sys.stdin.read(); os._exit(0)\n"
        "sys.stdin.read()\n"
    )
    words = [sys.executable, "-I", "-S", "-c", code, str(rig.public / "control")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as crowd:
        assert crowd.stdout is not None
        for _ in range(20):
            assert crowd.stdout.readline() == "on\n"
        assert as_user(rig, A, "get_default_active_thread_percentage") == (["100.0"], 0)
        sock = front_end(rig)
        ask(sock, "get_default_active_thread_percentage")
        sock.send(END)
        assert answers(sock) == (["100.0"], 0)
        assert crowd.stdin is not None
        crowd.stdin.close()


@pytest.mark.root
def test_users_who_ask_without_end_keep_neither_root_nor_clients_out(rig: Rig) -> None:
    rig.start(admissions(User(A, "all", limits(30))))
    flood = "import subprocess, sys\nwhile True: subprocess.run(sys.argv[1:], capture_output=True)"
    words = [sys.executable, "-I", "-S", "-c", _AS_USER, str(rig.public / "control"), str(B), *["ps"] * 50]
    floods = [subprocess.Popen([sys.executable, "-I", "-S", "-c", flood, *words]) for _ in range(3)]
    try:
        for _ in range(5):
            sock = front_end(rig)
            ask(sock, "get_default_active_thread_percentage")
            sock.send(END)
            assert answers(sock)[1] == 0
            rig.client(A).served()
    finally:
        for process in floods:
            process.kill()
            process.wait()


@pytest.mark.root
@pytest.mark.parametrize("who", ["user", "root of a container"])
def test_who_asks_without_end_is_paced_and_no_one_else(rig: Rig, who: str) -> None:
    """Root's front-end, begun later and with as many commands, is through first; another user's, and a client."""
    daemon, _ = rig.start(admissions(User(C, "all", limits(30))), "server=77")
    many = ["get_server_list"] * (2 * BURST)
    paced, prefix = (A, ()) if who == "user" else (0, CONTAINER)
    with subprocess.Popen(words_of(rig, paced, *many, prefix=prefix), stdout=subprocess.DEVNULL) as asking:
        try:
            until(lambda: len(daemon.saw("command", uid=paced, text="get_server_list")) >= BURST)
            assert as_user(rig, B, "get_server_list") == (["77"], 0)
            rig.client(C).served()
            assert as_user(rig, 0, *many) == (["77"] * len(many), 0)
            assert asking.poll() is None
        finally:
            asking.kill()


@pytest.mark.root
def test_commands_that_waited_are_answered_all_of_them_and_in_order(rig: Rig) -> None:
    rig.start_daemon()
    rig.start_gate()
    size = command_cost("get_active_thread_percentage 100") + answers_cost(["Server 100 not found"])
    numbers = range(100, 100 + int(Rates().burst / size) + 5)
    out = as_user(rig, A, *(f"get_active_thread_percentage {number}" for number in numbers))
    assert out == ([f"Server {number} not found" for number in numbers], 0)


def waiting(
    rig: Rig, number: int, command: str, uid: int = A, prefix: Sequence[str] = ()
) -> tuple[subprocess.Popen[str], str]:
    """So many front-ends, each with this command; and what they were told so far."""
    words = [sys.executable, "-I", "-S", "-c", _WAITING, str(rig.public / "control"), str(uid), str(number), command]
    process = subprocess.Popen([*prefix, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline()


@pytest.mark.root
def test_root_has_a_place_beside_root_of_containers(rig: Rig) -> None:
    """What waits there for its pace would keep the host's root out."""
    rig.start_daemon("server=77")
    rig.start_gate()
    process, _ = waiting(rig, MOST_OF_A_USER, "ps", 0, CONTAINER)
    with process:
        assert as_user(rig, 0, "get_server_list") == (["77"], 0)
        assert "front-ends open" in as_user(rig, 0, "get_server_list", prefix=CONTAINER)[0][0]
        process.kill()


@pytest.mark.root
def test_front_ends_that_are_killed_while_they_wait_keep_no_place(rig: Rig) -> None:
    rig.start_daemon()
    rig.start_gate()
    assert as_user(rig, A, *["get_device_client_list 8"] * int(Rates().burst / 32_000 + 1))[1] == 0
    for _ in range(3):
        process, told = waiting(rig, MOST_OF_A_USER, "ps")
        with process:
            process.kill()
        assert told == "[]\n"


@pytest.mark.root
def test_front_ends_that_are_killed_while_they_wait_use_nothing_up(rig: Rig) -> None:
    daemon = rig.start_daemon("server=77")
    rig.start_gate()
    assert as_user(rig, A, *["get_device_client_list 1"] * int(Rates().burst / 4_200 + 1))[1] == 0
    process, _ = waiting(rig, MOST_OF_A_USER - 1, "ps")
    with process:
        process.kill()
    assert as_user(rig, A, "get_server_list") == (["77"], 0)
    assert len(daemon.saw("command", text="ps")) < MOST_OF_A_USER - 1


@pytest.mark.root
def test_quit_ends_the_front_end_with_the_daemon(rig: Rig) -> None:
    daemon, agent = rig.start()
    sock = front_end(rig)
    ask(sock, "quit")
    assert answers(sock) == ([], 1)
    daemon.process.wait(60)
    assert agent.wait(FrontEnd).command == "quit"
    rig.start_daemon()
    agent.say(admissions(User(A, "all", limits(30))))
    rig.client(A).served()


@pytest.mark.root
def test_a_setting_does_not_come_between_the_limits_and_the_hand_over(rig: Rig) -> None:
    """Nor does a question between the descriptor and the acknowledgement: MPS would not answer it."""
    daemon, _ = rig.start(admissions(User(A, "all", limits(30))))
    stopped = rig.client(A, "stop")
    until(lambda: daemon.saw("gave", uid=A))
    sock = front_end(rig)
    ask(sock, "get_default_active_thread_percentage", "set_default_active_thread_percentage 90")
    sock.send(END)
    time.sleep(0.2)
    stopped.stopped()
    assert not daemon.saw("command", text="set_default_active_thread_percentage 90")
    os.kill(stopped.pid, signal.SIGCONT)
    assert answers(sock) == (["30.0", "90.0"], 0)
    assert stopped.served()["threads"] == "30.0"
    rig.client(A).served()
