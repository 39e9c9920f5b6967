"""A stand-in for the control daemon: the messages of recording 08 on real sockets, in a process of its own.

    python stand_in.py DIRECTORY [OPTION]...

It keeps limits (defaults and one server's), takes one front-end at a time as the real one does, prints memory in whole
G, and hands out descriptors. Over its descriptor a client shakes hands (recording 08, G1) and reads the limits that
were in force when it was given: `met`, with the pid that the client has there. One that goes away before is `stuck`: a
real server would wait for it for ever. Until it has shaken hands the server answers no question, and neither does the
daemon that asks it (docs/measured/2026-11-23-2xH200-580.159.04). After an acknowledgement it waits for the end of that
connection: whether the real one does is not known, because clients hang up at once. Each line on stdout is an event.
Options: greeting=HEX, start=FILE (a server starts until that is there), server=PID (one runs already), lose=N (the
server ends when it has met a client, N times), forget=1 (halves memory limits when asked), close=STAGE (it closes each
connection in the place of its greeting, or each client's in the place of its answer).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import sys
import time

HELLO, CREDENTIALS, DESCRIPTOR = b"OUTBHELL\0", b"OUTBCRED\0", b"OUTBCUFD\0"


class Peer:
    def __init__(self, sock, privileged):
        self.sock, self.privileged = sock, privileged
        self.who = self.kind = self.length = None
        self.given = None


class Given:
    """The server's end of what a client was given."""

    def __init__(self, sock, uid, limits):
        self.sock, self.uid, self.limits = sock, uid, limits
        self.said = []
        self.pid = None


class Daemon:
    def __init__(self, directory, options):
        self.options = options
        self.greeting = bytes.fromhex(options.get("greeting", "")) or HELLO
        self.threads, self.memory = {"": "100.0"}, {"": {}}
        self.servers = [int(options["server"])] if "server" in options else []
        for server in self.servers:
            self.threads[str(server)], self.memory[str(server)] = "100.0", {}
        self.lost = int(options.get("lose", 0))
        self.front_end = None
        self.peers = {}
        self.given = {}
        self.listeners = {}
        for name, mode in (("control", 0o666), ("control_privileged", 0o755)):
            path = os.path.join(directory, name)
            if os.path.lexists(path):
                os.unlink(path)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            sock.bind(path)
            os.chmod(path, mode)
            sock.listen(512)
            self.listeners[sock.fileno()] = (sock, name != "control")
        self.say("ready")

    def say(self, event, **more):
        print(json.dumps({"event": event, **more}), flush=True)

    def run(self):
        while True:
            ready, _, _ = select.select([*self.listeners, *self.peers, *self.given], [], [], 5)
            for number in ready:
                if number in self.listeners:
                    listener, privileged = self.listeners[number]
                    sock, _ = listener.accept()
                    if self.options.get("close") == "greeting":
                        sock.close()
                        continue
                    sock.setblocking(True)
                    peer = Peer(sock, privileged)
                    self.peers[sock.fileno()] = peer
                    self.send(peer, self.greeting)
                elif number in self.peers:
                    self.read(self.peers[number])
                elif number in self.given:
                    self.shake_hands(self.given[number])

    def shake_hands(self, given):
        data, ancillary = b"", []
        with contextlib.suppress(OSError):
            data, ancillary, _, _ = given.sock.recvmsg(64, 64)
        if not data:
            if len(given.said) < 3:
                self.say("stuck", uid=given.uid, said=len(given.said))
            else:
                self.say("gone", pid=given.pid, uid=given.uid)
            del self.given[given.sock.fileno()]
            given.sock.close()
            return
        given.said.append(data)
        if len(given.said) == 1:
            given.pid = next(struct.unpack("iII", c[:12])[0] for _, k, c in ancillary if k == socket.SCM_CREDENTIALS)
        if len(given.said) == 3:
            well = given.said[0] == CREDENTIALS and [len(word) for word in given.said[1:]] == [4, 4]
            self.say("met", pid=given.pid, uid=given.uid, well=well)
            with contextlib.suppress(OSError):
                given.sock.send(bytes(4))
                given.sock.send(json.dumps(given.limits).encode())
            if self.lost:
                self.lost -= 1
                self.servers = []
                del self.given[given.sock.fileno()]
                given.sock.close()

    def ask_server(self):
        while unmet := [given for given in self.given.values() if len(given.said) < 3]:
            for sock in select.select([given.sock for given in unmet], [], [])[0]:
                self.shake_hands(self.given[sock.fileno()])

    def send(self, peer, data, descriptor=None):
        rights = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))]
        with contextlib.suppress(OSError):
            peer.sock.sendmsg([data], rights)

    def close(self, peer):
        self.peers.pop(peer.sock.fileno(), None)
        peer.sock.close()
        if self.front_end is peer:
            self.front_end = None

    def read(self, peer):
        try:
            data, ancillary, _, _ = peer.sock.recvmsg(8192, 64)
        except OSError:
            data, ancillary = b"", []
        if not data:
            if peer.kind == 2:
                self.say("hung up", pid=peer.who[0], given=peer.given is not None, uid=peer.who[1])
            self.close(peer)
            return
        who = next((struct.unpack("iII", c[:12]) for _, k, c in ancillary if k == socket.SCM_CREDENTIALS), None)
        if peer.who is None:
            if data != CREDENTIALS:
                self.say("garbage", data=data.hex())
                self.close(peer)
                return
            peer.who = who
        elif peer.kind is None:
            peer.kind = struct.unpack("<I", data)[0]
            if peer.kind == 2:
                self.client(peer)
            elif self.front_end is not None or (peer.privileged and peer.who[1] != 0):
                self.close(peer)
            else:
                self.front_end = peer
        elif peer.kind == 2:
            self.say("acknowledged", uid=peer.who[1], data=data.hex(), by=list(who or ()))
            with contextlib.suppress(OSError):
                while peer.sock.recv(64):
                    pass
            self.close(peer)
        elif peer.length is None:
            (peer.length,) = struct.unpack("<Q", data)
            if peer.length == 0:
                self.send(peer, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
                self.close(peer)
        else:
            peer.length = None
            self.command(peer, data.rstrip(b"\0").decode().strip())

    def client(self, peer):
        if self.options.get("close") == "answer":
            self.close(peer)
            return
        if not self.servers:
            self.say("starting", pid=peer.who[0])
            while "start" in self.options and not os.path.exists(self.options["start"]):
                time.sleep(0.005)
            self.servers = [4000 + len(self.threads)]
            self.threads[str(self.servers[0])] = self.threads[""]
            self.memory[str(self.servers[0])] = dict(self.memory[""])
        server = str(self.servers[0])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        limits = {"threads": self.threads[server], "memory": self.memory[server]}
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        for _ in range(4):
            ours.sendmsg([DESCRIPTOR], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", 0))])
        ours.send(b"\0")
        self.send(peer, DESCRIPTOR, theirs.fileno())
        theirs.close()
        peer.given = ours
        self.given[ours.fileno()] = Given(ours, peer.who[1], json.loads(json.dumps(limits)))
        self.say("gave", pid=peer.who[0], uid=peer.who[1], gid=peer.who[2], **limits)

    def command(self, peer, text):
        self.say("command", text=text, uid=peer.who[1])
        word, *rest = text.split() or [""]
        answers = []
        if word.removeprefix("s").removeprefix("g").startswith(("et_active", "et_device_pinned")):
            self.ask_server()
        if word == "get_server_list":
            answers = [str(server) for server in self.servers]
        elif word == "quit":
            self.send(peer, bytes([1, 0, 0, 0, 1, 0, 0, 0]))
            os._exit(0)
        elif word.startswith("set_") and peer.who[1] != 0:
            answers = [f"Insufficient privileges for UID {peer.who[1]}."]
        elif word in ("set_default_active_thread_percentage", "get_default_active_thread_percentage"):
            if rest:
                self.threads[""] = f"{float(rest[0]):.1f}"
            answers = [self.threads[""]]
        elif word in ("set_active_thread_percentage", "get_active_thread_percentage"):
            if rest[0] not in self.threads:
                answers = [f"Server {rest[0]} not found"]
            else:
                if len(rest) > 1:
                    self.threads[rest[0]] = f"{float(rest[1]):.1f}"
                answers = [self.threads[rest[0]]]
        elif word.endswith("default_device_pinned_mem_limit"):
            answers = self.limit("", rest, word)
        elif word.endswith("device_pinned_mem_limit"):
            answers = self.limit(rest[0], rest[1:], word)
        elif word == "get_device_client_list":
            answers = ["x" * 4000] * int(rest[0]) if rest else []
        elif word == "sleep":
            time.sleep(float(rest[0]))
            answers = ["slept"]
        else:
            answers = [f'Unknown command "{word}"']
        for answer in answers:
            self.send(peer, bytes(4) + answer.encode())

    def limit(self, server, rest, word):
        if server not in self.memory:
            return [f"Server {server} not found"]
        if word.startswith("set_"):
            size = int(rest[1][:-1]) * (1024 if rest[1][-1] == "G" else 1)
            self.memory[server][rest[0]] = size
            return []
        size = self.memory[server].get(rest[0], 0)
        if self.options.get("forget"):
            size = size // 2
        return [f"{size // 1024}G" if size >= 1024 else f"{size}M"] if size else []


if __name__ == "__main__":
    Daemon(sys.argv[1], dict(word.split("=", 1) for word in sys.argv[2:])).run()
