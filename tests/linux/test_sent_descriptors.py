"""Where the kernel cannot refuse what users send, the loop takes none of it, and other threads close it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_BEFORE_6_16 = r"""
import array, asyncio, os, socket, time
from mpsagent.linux import sent_descriptors
from mpsagent.linux.channel import Channel
sent_descriptors.SO_PASSRIGHTS = 9999
sent_descriptors.watch_over()
def pair():
    user, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    ours.setblocking(False)
    return user, ours
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
user, ours = pair()
def until(what):
    limit = time.monotonic() + 30
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.01)
def refused(sock):
    try:
        sent_descriptors.look_first(sock)
    except BlockingIOError:
        raise SystemExit("there is none")
    except OSError:
        return True
def unread(sock):
    try:
        return bool(sock.recvmsg(64, 64, socket.MSG_PEEK)[1])
    except ConnectionResetError:  # said to us, in the threads' place
        return True
"""


def before_6_16(script: str) -> None:
    where = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", _BEFORE_6_16 + script], check=True, cwd=where, timeout=60)


def test_a_message_with_descriptors_is_not_taken() -> None:
    before_6_16(r"""
user.send(b"without"); user.sendmsg([b"with"], rights)
assert not refused(ours)
assert ours.recv(64) == b"without"
assert refused(ours) and refused(ours), "it stays there"
usual = len(os.listdir("/proc/self/fd"))
ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
assert refused(ours) and len(os.listdir("/proc/self/fd")) == usual, "no copy of them is left"
""")


def test_a_channel_to_a_user_ends_at_a_message_with_descriptors() -> None:
    before_6_16(r"""
async def main():
    ended, said = asyncio.Event(), []
    Channel(asyncio.get_running_loop(), ours, lambda data, *_: said.append(data), ended.set, longest=64, users=True)
    user.send(b"without"); user.sendmsg([b"with"], rights)
    await asyncio.wait_for(ended.wait(), 30)
    assert said == [b"without"], said
asyncio.run(main())
""")


def test_an_order_with_descriptors_is_not_taken() -> None:
    before_6_16(r"""
async def main():
    asyncio.get_running_loop().call_later(0.1, user.send, b"without")
    await sent_descriptors.look_when_readable(ours)
    assert ours.recv(64) == b"without"
    user.sendmsg([b"with"], rights)
    try:
        await sent_descriptors.look_when_readable(ours)
    except OSError:
        assert unread(ours)
    else:
        raise SystemExit("it was taken")
asyncio.run(main())
""")


def test_what_lies_unread_is_read_before_systemd_closes_its_copy() -> None:
    """Who closes last would stand still for it, and that could be the service manager."""
    before_6_16(r"""
copy = ours.dup()
for _ in range(3):
    user.send(b""); user.sendmsg([b"with"], rights)
ours.send(b"never read")
sent_descriptors.let_go(ours)
sent_descriptors.let_go(ours)
assert ours.fileno() < 0
assert (user.recv(64), user.recv(64)) == (b"never read", b""), "its peer hears of it at once"
until(lambda: not unread(copy))
""")


def test_it_is_read_also_behind_the_reset_of_a_user_who_went_without_reading() -> None:
    before_6_16(r"""
copy = ours.dup()
ours.send(b"never read"); user.sendmsg([b"with"], rights)
user.close()
sent_descriptors.let_go(ours)
until(lambda: not unread(copy))
""")


def test_the_threads_outlive_an_error() -> None:
    before_6_16(r"""
for _ in range(sent_descriptors.CLOSERS):
    bad, _ = pair()
    bad.close()
    sent_descriptors._closing.put(bad)
copy = ours.dup()
user.sendmsg([b"with"], rights)
until(lambda: not sent_descriptors._closing.qsize())
sent_descriptors.let_go(ours)
until(lambda: not unread(copy))
""")


def test_so_linger_does_not_hold_up_the_threads() -> None:
    before_6_16(r"""
import struct
listener = socket.socket(); listener.bind(("127.0.0.1", 0)); listener.listen(64)
for _ in range(sent_descriptors.CLOSERS):
    unsent = socket.socket(); unsent.connect(listener.getsockname())
    unsent.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    unsent.setblocking(False)
    try:
        while True: unsent.send(bytes(65536))
    except BlockingIOError: pass
    one, other = pair()
    socket.send_fds(one, [b"with"], [unsent.fileno()])
    unsent.close()
    sent_descriptors.let_go(other)
copy = ours.dup()
user.sendmsg([b"with"], rights)
sent_descriptors.let_go(ours)
until(lambda: not unread(copy))
""")
