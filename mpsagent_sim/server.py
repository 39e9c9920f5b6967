"""A server process: contexts of clients, faults, termination. Forked by the control daemon, run as the user.

The daemon hands over one end of a pair of sockets for each connection of a client; at the other end the client shakes
hands as in recording 08, G1. The server waits for that and does nothing else; a client that goes away in the middle
blocks it indefinitely (X1, X15, and measured on an H100: docs/measured/2026-11-21-H100-580.159.04, answers 1 and 5).
"""

# pathlib and contextlib cost more than everything else in the start of a front-end or client
# ruff: noqa: PTH116

from __future__ import annotations

import _socket
import os
import select
import time
from collections.abc import Callable
from typing import NoReturn

from mpsagent_sim import gpu, rendezvous, texts, wire
from mpsagent_sim.delays import Delays, start_error
from mpsagent_sim.process_title import become
from mpsagent_sim.registry import Busy, Entry, is_open, processes
from mpsagent_sim.server_clients import MAX_CLIENTS, Client, Link

BUSY_EVERY = 0.1
"""Seconds between two notes of how long kernels have run."""


class Server:
    def __init__(self, devices: list[gpu.Device], delays: Delays, log: wire.Log, uid: int, control: wire.Lines) -> None:
        self.uid = uid
        self.control = control
        self.devices = devices
        self.delays = delays
        self.log = log
        self.entry = Entry("server")
        self.busy = [Busy(device.ordinal) for device in devices]
        self.noting = False
        self.percentage = 100.0
        self.limits: dict[int, int] = {}
        self.clients: dict[int, Client] = {}
        self.client_count = 0
        self.busy_until = 0.0
        self.hung = False
        self.links: dict[int, Link] = {}
        self.closing: list[Link] = []  # channels lost but not noticed yet: still active worker threads
        self.faulted: set[int] = set()
        self.destroyed: set[int] = set()
        self.alarms: list[tuple[float, Callable[[], None]]] = []
        self.untold: list[tuple[float, Callable[[], None]]] = []
        """When which clients hear their limits."""
        self.noise = (-1333654781, 0)  # the content of the request's memory before the first request

    # start

    def start(self, after_a_kill: bool) -> None:
        if error := start_error():
            self.fail(error)
        used = any(processes(device.ordinal) for device in self.devices)
        kind = "used" if used else "after a kill" if after_a_kill else self.delays.usual_start()
        time.sleep(self.delays.initialise(kind, len(self.devices)))
        for at in range(len(self.devices)):
            self.log.write(texts.CREATING_CONTEXT.format(device=at, name=gpu.NAME))
            time.sleep(self.delays.context(kind))
        for device in self.devices:
            self.entry.write(device.ordinal, gpu.SERVER_USAGE)
        self.log.write(texts.SHARED_MEMORY.format(uid=self.uid, pid=os.getpid()), texts.SERVER_VERSION, texts.DRIVER)
        rendezvous.send(self.control.connection, rendezvous.SERVER)
        while True:
            word, *rest = self._order().split()
            if word == "PERCENTAGE":
                self.percentage = float(rest[0])
                self.log.write(texts.PERCENTAGE.format(percentage=self.percentage))
            elif word == "LIMIT":
                self._set_limit(int(rest[0]), int(rest[1]))
                low = int(rest[1]) * 1048576 & 0xFFFFFFFF
                self.noise = (low - (1 << 32) if low >= 1 << 31 else low, len(self.limits))
            else:
                self.log.write(texts.PRIORITY.format(priority=rest[0]), texts.STARTED)
                return

    def fail(self, error: str) -> NoReturn:
        time.sleep(self.delays.failed_start())
        self.log.tag = "Other"
        self.log.write(*[line.format(error=error) for line in texts.START_FAILED])
        rendezvous.send(self.control.connection, rendezvous.FAILED)
        os._exit(1)

    def _order(self) -> str:
        line = self.control.wait()
        if line is None:
            self.leave()
        return line

    def leave(self) -> NoReturn:
        self.note_work(write=True)
        self.entry.remove()
        os._exit(0)

    # loop

    def run(self) -> NoReturn:
        while True:
            # while a context is destroyed nothing else is done
            while not self.hung and self._free() and (line := self.control.pop()) is not None:
                self.order(line.split())
            poll = select.poll()
            poll.register(self.control.connection.fileno(), select.POLLIN)
            for fd in self.links:
                poll.register(fd, select.POLLIN)
            timeout = None
            self._tell_limits()
            times = [at for at, _ in (*self.alarms, *self.untold)] + ([] if self._free() else [self.busy_until])
            if times:
                timeout = max(0.0, (min(times) - time.monotonic()) * 1000 + 0.5)
            ready = {fd for fd, _ in poll.poll(timeout)}
            if self.control.connection.fileno() in ready:
                self.control.read()
                if self.hung:
                    self.control.buffer = b""
                if self.control.ended:
                    self.leave()
            found = [self.links[fd] for fd in ready if fd in self.links]
            for link in sorted(found, key=lambda link: -link.number):
                self.hear(link)
            now = time.monotonic()
            for alarm in [alarm for alarm in self.alarms if alarm[0] <= now]:
                self.alarms.remove(alarm)
                alarm[1]()

    def _free(self) -> bool:
        return time.monotonic() >= self.busy_until

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self.alarms.append((time.monotonic() + seconds, action))

    # orders of the daemon

    def order(self, words: list[str]) -> None:
        reply = ""
        if words[0] == "ATTACH":
            self.attach()
            return
        if words[0] == "SHUTDOWN":
            self.shutdown()
            return
        elif words[0] == "TERMINATE":
            self.terminate(int(words[1]))
            return
        elif words[0] == "STATUS":
            reply = "FAULT" if self.faulted else "ACTIVE"
        elif words[0] == "CLIENTS":
            reply = ";".join(str(pid) for pid, client in self.clients.items() if client.contexts)
        elif words[0] == "DEVICE_CLIENTS":
            reply = self._device_clients()
        elif words[0] == "PS":
            reply = self._ps()
        elif words[0] in ("GET_PERCENTAGE", "SET_PERCENTAGE"):
            if len(words) > 1:
                self.percentage = float(words[1])
            reply = str(self.percentage)
        elif words[0] == "SET_LIMIT":
            self._set_limit(int(words[1]), int(words[2]))
            self.noise = (0, self.noise[1])
        elif words[0] == "GET_LIMIT":
            reply = str(self.limits.get(int(words[1]), 0))
        elif words[0] == "PRIORITY":
            self.log.write(texts.CLIENT_PRIORITY.format(priority=words[1]))
        elif words[0] == "DEVICE_QUERY":
            self.log.write(texts.DEVICE_QUERY.format(count=len(self.devices)))
        wire.send(self.control.connection, reply)

    def _contexts(self) -> list[Link]:
        """All contexts (not channels), by client in order of arrival."""
        return [link for client in self.clients.values() for link in client.contexts.values()]

    def _set_limit(self, device: int, mebibytes: int) -> None:
        self.limits[device] = mebibytes
        self.log.write(texts.MEMORY_LIMIT.format(device=device, limit=mebibytes * 1048576))

    def _device_clients(self) -> str:
        rows = []
        for at in range(len(self.devices)):
            rows.append(f"[{at}] 00:{at:02x}.0, {gpu.NAME}")
            rows += [f"{link.client.pid}.{link.number}" for link in self._contexts() if link.device == at]
        return ";".join(rows)

    def _ps(self) -> str:
        self.noise = (4, 1)
        try:
            namespace = str(os.stat("/proc/self/ns/pid").st_ino)
        except OSError:
            namespace = "0"
        return ";".join(
            f"{pid:<10}{client.number:<10}{os.getpid():<15}"
            f"{self.devices[next(iter(client.contexts.values())).device].uuid[:22]:<26}{namespace:<15}|{client.name}"
            for pid, client in self.clients.items()
            if client.contexts
        )

    def shutdown(self) -> None:
        self.log.write(texts.NOTIFIED)
        count = len(self.links) + len(self.closing)
        if count:
            self.log.write(texts.UNABLE_TO_SHUTDOWN.format(count=count))
            wire.send(self.control.connection, f"BUSY {count}")
            return
        self.log.write(texts.FINISHING, texts.EXITING)
        wire.send(self.control.connection, "OK")
        time.sleep(self.delays.idle_exit())
        self.leave()

    def terminate(self, pid: int) -> None:
        """Answered when the client has let go of its work, or has died; until then the daemon waits."""
        client = self.clients.get(pid)
        if client is None or not client.contexts:
            self.log.write(texts.NO_CONTEXT.format(pid=pid), texts.NOT_TERMINATED)
            wire.send(self.control.connection, "201")
            return
        for link in client.contexts.values():
            self.log.write(texts.REQUESTING_EXIT.format(pid=pid, context=link.number))
            link.terminating = True
            if not link.sticky:
                if link.kernel:
                    self.tell_neighbours(link, "HOLD")
                wire.send(link.lines.connection, "TERMINATE")

    def terminated(self, link: Link) -> None:
        if link.kernel:
            others = sum(one.kernel and one.device == link.device for one in self._contexts() if one is not link)
            link.leaves_at = time.monotonic() + self.delays.leaving(others)
        link.terminating = link.kernel = False
        self.log.write(texts.TERMINATED)
        self.tell_neighbours(link, "GO")
        if not any(one.terminating for one in link.client.contexts.values()):
            wire.send(self.control.connection, "0")

    def tell_neighbours(self, link: Link, word: str) -> None:
        """Stop and resume the work of all other clients on a device while a kernel is interrupted (03 Q6, 06 V6)."""
        for one in self._contexts():
            if one.device == link.device and one is not link:
                wire.send(one.lines.connection, word)

    # clients

    def attach(self) -> None:
        connection = _socket.socket(fileno=self.control.fds.pop(0))
        self.log.write(texts.REQUEST.format(pid=self.noise[0], context=self.noise[1]))
        found = self.handshake(connection)
        if found is None:
            self.log.write(texts.NO_CREDENTIALS)
            self.hung = True
            return
        pid, number, at = found
        self.noise = (pid, number)
        if self.faulted:
            self.log.write(
                texts.TEARDOWN.format(pid=pid, context=number), texts.NOT_ACCEPTED.format(pid=pid, context=number)
            )
            rendezvous.send_status(connection, rendezvous.NOT_READY)
            connection.close()
            return
        for device in sorted(self.destroyed):
            self.log.write(texts.CREATING_CONTEXT.format(device=device, name=gpu.NAME))
            time.sleep(self.delays.recreate())
        self.destroyed.clear()
        rendezvous.send_status(connection, 0)
        client = self.clients.get(pid)
        if number == 0:
            client = Client(pid, "3f", self.percentage, dict(self.limits))
            self.clients[pid] = client
        if (client is None and number != 1) or at >= len(self.devices):
            self.refuse(connection, "MPS_RPC_FAILURE")
            return
        if client is None:
            client = self.clients[pid] = Client(pid, "3f", None, {})
        self.log.write(texts.CONNECTED.format(pid=pid, context=number), texts.WORKER.format(pid=pid, context=number))
        if number and sum(link.device == at for link in self._contexts()) >= MAX_CLIENTS:
            # the process keeps running, as recorded (docs/measured/2026-11-23-2xH200-580.159.04/contexts-full.txt)
            self.log.write(
                texts.ASSOCIATED.format(name=gpu.NAME, uuid=self.devices[at].uuid),
                texts.MAX_CLIENTS.format(count=MAX_CLIENTS),
                texts.DISCONNECTED.format(pid=pid),
            )
            self.refuse(connection, "MPS_MAX_CLIENTS_REACHED")
            return
        link = Link(wire.Lines(connection), client, number, at)
        self.links[connection.fileno()] = link
        if number == 0:
            client.channel = link
            wire.send(connection, f"OK {self.delays.speed} " + ",".join(str(one.ordinal) for one in self.devices))
            sizes = ",".join(str(self.limits.get(one, 0)) for one in range(len(self.devices)))
            told = f"LIMITS {self.percentage} {sizes}"
            self.untold.append((time.monotonic() + self.delays.limits_told(), lambda: tell(connection, told)))
            return
        if client.number == 0:
            self.client_count += 1
            client.number = self.client_count
        client.contexts[number] = link
        self.log.write(texts.ASSOCIATED.format(name=gpu.NAME, uuid=self.devices[at].uuid))
        time.sleep(self.delays.association())
        if rendezvous.hung_up(connection):  # measured: the server exits, and the work of all its clients is lost
            self.log.write(
                texts.LOST.format(pid=pid, context=number),
                texts.EXITING_CLIENT.format(pid=pid, context=number, count=len(self._contexts()) - 1),
            )
            os._exit(1)
        self.log.write(texts.STATUS.format(pid=pid, context=number))
        wait = self.delays.client_context(at, time.monotonic())
        given = "- -" if client.percentage is None else f"{client.percentage} {client.limits.get(at, 0)}"
        wire.send(connection, f"OK {given} {wait:.3f}")

    def handshake(self, connection: _socket.socket) -> tuple[int, int, int] | None:
        """The client's pid from its credentials, which context it is (0: the channel), on which device; as long as it
        takes. None when no client is left at the other end."""
        spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        for _ in range(rendezvous.EXTRA_DESCRIPTORS):
            rendezvous.send(connection, rendezvous.DESCRIPTOR, spare)
        os.close(spare)
        rendezvous.send(connection, rendezvous.READY)
        pid: int | None = None
        words: list[int] = []
        for size in (len(rendezvous.CREDENTIALS), 4, 4):
            self._wait_for(connection)
            message = rendezvous.receive(connection, size)
            message.close()
            if not message.data:
                return None
            if pid is None:
                if message.credentials is None:
                    return None
                pid = message.credentials[0]
            else:
                words.append(int.from_bytes(message.data, "little"))
        assert pid is not None
        return pid, words[0], 0 if words[1] == rendezvous.NO_DEVICE else words[1]

    def _wait_for(self, connection: _socket.socket) -> None:
        poll = select.poll()
        poll.register(connection.fileno(), select.POLLIN)
        poll.register(self.control.connection.fileno(), 0)
        while not (ready := {fd for fd, _ in poll.poll(self._tell_limits())}):
            pass
        if connection.fileno() not in ready:
            self.leave()  # the daemon has gone

    def _tell_limits(self) -> float | None:
        """Send the limits to each client, by a thread of its own even while the server waits for another client. Such a
        thread notices its client's end (H8). Return the milliseconds until the next call."""
        now = time.monotonic()
        for one in [one for one in self.untold if one[0] <= now]:
            self.untold.remove(one)
            one[1]()
        return min(((at - now) * 1000 + 0.5 for at, _ in self.untold), default=None)

    def refuse(self, connection: _socket.socket, why: str) -> None:
        wire.send(connection, f"FAIL {why}")
        connection.close()

    def hear(self, link: Link) -> None:
        link.lines.read()
        if self.hung:
            link.lines.buffer = b""
        while (line := link.lines.pop()) is not None:
            if line.startswith("NAME "):
                link.client.name = line[5:]
            elif line in ("KERNEL", "IDLE"):
                link.kernel = line == "KERNEL"
                self.note_work()
            elif line == "TERMINATED" and link.terminating:
                time.sleep(self.delays.terminate())
                self.terminated(link)
            elif line == "FAULT":
                self.later(self.delays.fault_notice(), lambda: self.fault(link.device, link.client.pid))
            elif line.startswith("LOG "):
                log = wire.Log(self.log.fd, "Client")
                log.pid = link.client.pid
                log.write(line[4:])
        if link.lines.ended:
            del self.links[link.lines.connection.fileno()]
            link.lines.connection.close()
            if self.hung:  # the client's own thread hears that it has gone, and no more comes of it (H1)
                self.log.write(texts.LOST.format(pid=link.client.pid, context=link.number))
            elif link.number:
                self.lose_context(link)
            else:
                self.closing.append(link)
                # a killed process's contexts are closed in the same moment, and noticed first
                last = time.monotonic() if link.client.contexts else link.client.last_close
                wait = last + self.delays.channel_close() - time.monotonic()
                self.later(max(0.0, wait), lambda: self.lose_channel(link))

    def note_work(self, *, write: bool = False) -> None:
        """Write the values of NVML's counters, now or a moment later, because there may be many short kernels."""
        now, working = time.monotonic(), {link.device for link in self._contexts() if link.kernel}
        fresh = [busy for at, busy in enumerate(self.busy) if busy.note(now, at in working)]
        for busy in fresh if write else ():
            busy.write()
        if write or (fresh and not self.noting):
            self.noting = not write
            if not write:
                self.later(BUSY_EVERY, lambda: self.note_work(write=True))

    def lose_context(self, link: Link) -> None:
        client = link.client
        client.last_close = time.monotonic()
        client.contexts.pop(link.number, None)
        if client.channel is None and not client.contexts:
            del self.clients[client.pid]
        self.note_work()
        self.log.write(texts.LOST.format(pid=client.pid, context=link.number))
        kernel = link.kernel
        if link.terminating:
            self.terminated(link)
        self.left_early(link)
        count = sum(one.device == link.device for one in self._contexts())  # on this device (real M1)
        self.log.write(texts.EXITING_CLIENT.format(pid=client.pid, context=link.number, count=count))
        # also if it was asked to exit but could not answer: a stopped client takes its neighbours along (06 V6)
        if kernel and not link.sticky:
            self.later(self.delays.fault_notice(), lambda: self.fault(link.device, client.pid))
        if link.sticky and not any(one.sticky for one in self._contexts()):
            for device in sorted(self.faulted):
                self.log.write(texts.DESTROY_CONTEXT.format(device=device, name=gpu.NAME))
            self.destroyed |= self.faulted
            self.faulted.clear()
            self.busy_until = time.monotonic() + self.delays.destroy()

    def left_early(self, link: Link) -> None:
        """A client whose work is still on the GPU has gone. Nothing happens as long as its memory is kept."""
        if link.sticky or time.monotonic() >= link.leaves_at:
            return
        if is_open(link.client.pid):
            self.later(0.02, lambda: self.left_early(link))
        else:
            self.later(self.delays.late_fault(), lambda: self.fault(link.device, link.client.pid))

    def lose_channel(self, link: Link) -> None:
        self.log.write(texts.LOST.format(pid=link.client.pid, context=0))
        if self._free():
            self.disconnect(link)
        else:  # after the order that came meanwhile: it still counts as a worker thread (Q4, Q6 of the real runs)
            self.later(self.busy_until - time.monotonic() + 0.002, lambda: self.disconnect(link))

    def disconnect(self, link: Link) -> None:
        self.closing.remove(link)
        self.log.write(texts.DISCONNECTED.format(pid=link.client.pid))
        if self.clients.get(link.client.pid) is link.client:
            del self.clients[link.client.pid]

    def fault(self, device: int, culprit: int) -> None:
        """A fatal error on `device`: every client there gets it, no new one is accepted until the last has gone."""
        hit = [one for one in self.links.values() if one.number and one.device == device]
        if not hit:
            return
        hit[1:] = hit[:0:-1]  # the first to connect, then the last, the last but one, ... (02 R4, R4 of the real runs)
        pids = [one.client.pid for one in hit]
        blamed = [pids[0], culprit] if culprit in pids else [pids[0]]
        self.log.write(
            texts.FATAL.format(pid=blamed[self.delays.pick(len(blamed))], context=1),
            texts.HANDLING,
            *[texts.TORN_DEVICE.format(pid=one.client.pid, context=one.number, device=device) for one in hit],
        )
        for one in hit:
            pid = one.client.pid
            self.log.write(texts.TORN_PROCESS.format(pid=pid), texts.TORN_CLIENT.format(pid=pid, context=one.number))
        self.log.write(texts.RESET_DEVICES, str(device), texts.STICKY, *[str(pid) for pid in pids])
        self.faulted.add(device)
        for one in hit:
            one.sticky = True
            wire.send(one.lines.connection, "STICKY")


def tell(connection: _socket.socket, text: str) -> None:
    """Send a line, unless the connection is closed."""
    wire.send(connection, text)


def main(pipe: str, server_log: int, devices: list[gpu.Device], delays: Delays, uid: int, after_a_kill: bool) -> int:
    """Run the server, in the forked child. All descriptors except the server log are closed."""
    become(uid, 0)  # with group 0 and no others (recording 08, G1)
    try:
        control = wire.Lines(rendezvous.connect(f"{pipe}/control"))
    except OSError:
        return 1  # as the user it may not enter the pipe directory: it ends without a word (X19 of the real runs)
    log = wire.Log(server_log, "Other")
    log.write(*[line.format(pipe=pipe) for line in texts.SERVER_BEGIN])
    if not rendezvous.greeted(control.connection):
        return 1
    rendezvous.send_credentials(control.connection, rendezvous.CREDENTIALS)
    server = Server(devices, delays, wire.Log(server_log, "Server"), uid, control)
    server.start(after_a_kill)
    return server.run()
