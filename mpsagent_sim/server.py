"""A server process: contexts of clients, faults, termination. Forked by the control daemon, run as the user.

The daemon hands over one end of a pair of sockets for each connection of a client; at the other end the client shakes
hands as in recording 08, G1. The server waits for that and does nothing else; a client that goes away in the middle
blocks it indefinitely (X1, X15, and measured on an H100: docs/measured/2026-11-21-H100-580.159.04, answers 1 and 5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from mpsagent_sim import gpu, rendezvous, texts, wire
from mpsagent_sim.server_clients import MAX_CLIENTS, Client, Link

if TYPE_CHECKING:
    from mpsagent_sim.host import Connection, Message, ServerHost, Steps


class Exit(Exception):
    """The server exits with this status."""

    def __init__(self, status: int) -> None:
        self.status = status


class Server:
    control: Connection

    def __init__(self, host: ServerHost, devices: list[gpu.Device], uid: int) -> None:
        self.host = host
        self.uid = uid
        self.devices = devices
        self.delays = host.delays
        self.log = host.log
        self.orders: deque[Message] = deque()
        self.percentage = 100.0
        self.limits: dict[int, int] = {}
        self.clients: dict[int, Client] = {}
        self.client_count = 0
        self.busy_until = 0.0
        self.hung = False
        self.links: list[Link] = []
        self.closing: list[Link] = []  # channels lost but not noticed yet: still active worker threads
        self.faulted: set[int] = set()
        self.destroyed: set[int] = set()
        self.alarms: list[tuple[float, Callable[[], None]]] = []
        self.untold: list[tuple[float, Callable[[], None]]] = []
        """When which clients receive their limits."""
        self.noise = (-1333654781, 0)  # the content of the request's memory before the first request

    def run(self, after_a_kill: bool) -> Steps[int]:
        """Return the exit status."""
        try:
            self.control = self.host.connect()
        except OSError:
            return 1  # as the user it may not enter the pipe directory: it ends without a word (X19 of the real runs)
        self.log.write(*[line.format(pipe=self.host.pipe) for line in texts.SERVER_BEGIN])
        greeting = yield from self.control.receive()
        if len(greeting.data) != len(rendezvous.GREETING):
            return 1
        self.control.send_credentials(rendezvous.CREDENTIALS)
        self.log.tag = "Server"
        try:
            yield from self.start(after_a_kill)
            return (yield from self.serve())
        except Exit as end:
            return end.status

    # start

    def start(self, after_a_kill: bool) -> Steps[None]:
        if error := self.host.start_error():
            yield from self.fail(error)
        used = any(self.host.in_use(device.ordinal) for device in self.devices)
        kind = "used" if used else "after a kill" if after_a_kill else self.delays.usual_start()
        yield from self.sleep(self.delays.initialise(kind, len(self.devices)))
        for at in range(len(self.devices)):
            self.log.write(texts.CREATING_CONTEXT.format(device=at, name=gpu.NAME))
            yield from self.sleep(self.delays.context(kind))
        for device in self.devices:
            self.host.use(device.ordinal, gpu.SERVER_USAGE)
        self.log.write(texts.SHARED_MEMORY.format(uid=self.uid, pid=self.host.pid), texts.SERVER_VERSION, texts.DRIVER)
        self.control.send(rendezvous.SERVER)
        settings = yield from self.control.receive(wire.MESSAGE)
        if not settings.data:
            self.leave()
        percentage, priority, *limits = wire.text(settings.data).split()
        self.percentage = float(percentage)
        self.log.write(texts.PERCENTAGE.format(percentage=self.percentage))
        for limit in limits:
            ordinal, _, mebibytes = limit.partition("=")
            self._set_limit(int(ordinal), int(mebibytes))
            low = int(mebibytes) * 1048576 & 0xFFFFFFFF
            self.noise = (low - (1 << 32) if low >= 1 << 31 else low, len(self.limits))
        self.log.write(texts.PRIORITY.format(priority=priority), texts.STARTED)

    def fail(self, error: str) -> Steps[NoReturn]:
        yield from self.sleep(self.delays.failed_start())
        self.log.tag = "Other"
        self.log.write(*[line.format(error=error) for line in texts.START_FAILED])
        self.control.send(rendezvous.FAILED)
        raise Exit(1)

    def leave(self) -> NoReturn:
        self.host.leave()
        raise Exit(0)

    # loop

    def serve(self) -> Steps[int]:
        while True:
            times = [at for at, _ in (*self.alarms, *self.untold)] + ([] if self._free() else [self.busy_until])
            yield [self.control.file, *[link.connection.file for link in self.links]], min(times, default=None)
            self.read_orders()
            # while a context is destroyed nothing else is done
            while self.orders and self._free() and not self.hung:
                yield from self.order(self.orders.popleft())
            found = [link for link in self.links if link.unread or link.connection.readable()]
            for link in sorted(found, key=lambda link: -link.number):
                yield from self.hear(link)
            self._tell_limits()
            now = self.host.now
            for alarm in [alarm for alarm in self.alarms if alarm[0] <= now]:
                self.alarms.remove(alarm)
                alarm[1]()

    def read_orders(self) -> None:
        """Read the orders that came in the last wait, or exit with the daemon. A hung server keeps them."""
        if not self.control.readable():
            return
        while (message := self.control.next()) is not None:
            self.orders.append(message)
        if self.control.over:
            self.leave()

    def _free(self) -> bool:
        return self.host.now >= self.busy_until

    def sleep(self, seconds: float) -> Steps[None]:
        yield [], self.host.now + seconds

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self.alarms.append((self.host.now + seconds, action))

    # orders of the daemon

    def order(self, message: Message) -> Steps[None]:
        words = wire.text(message.data).split()
        reply = ""
        if words[0] == "ATTACH":
            yield from self.attach(self.host.connection(message))
            return
        if words[0] == "SHUTDOWN":
            yield from self.shutdown()
            return
        if words[0] == "TERMINATE":
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
        self.answer(reply)

    def answer(self, text: str) -> None:
        self.control.send(f"{text}\n".encode())

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
        namespace = self.host.namespace()
        return ";".join(
            f"{pid:<10}{client.number:<10}{self.host.pid:<15}"
            f"{self.devices[next(iter(client.contexts.values())).device].uuid[:22]:<26}{namespace:<15}|{client.name}"
            for pid, client in self.clients.items()
            if client.contexts
        )

    def shutdown(self) -> Steps[None]:
        self.log.write(texts.NOTIFIED)
        count = len(self.links) + len(self.closing)
        if count:
            self.log.write(texts.UNABLE_TO_SHUTDOWN.format(count=count))
            self.answer(f"BUSY {count}")
            return
        self.log.write(texts.FINISHING, texts.EXITING)
        self.answer("OK")
        yield from self.sleep(self.delays.idle_exit())
        self.leave()

    def terminate(self, pid: int) -> None:
        """Answered when the client has let go of its work, or has died; until then the daemon waits."""
        client = self.clients.get(pid)
        if client is None or not client.contexts:
            self.log.write(texts.NO_CONTEXT.format(pid=pid), texts.NOT_TERMINATED)
            self.answer("201")
            return
        for link in client.contexts.values():
            self.log.write(texts.REQUESTING_EXIT.format(pid=pid, context=link.number))
            link.terminating = True
            if not link.sticky:
                if link.kernel:
                    self.tell_neighbours(link, "HOLD")
                link.connection.send(b"TERMINATE")

    def terminated(self, link: Link) -> None:
        if link.kernel:
            others = sum(one.kernel and one.device == link.device for one in self._contexts() if one is not link)
            link.leaves_at = self.host.now + self.delays.leaving(others)
        link.terminating = link.kernel = False
        self.log.write(texts.TERMINATED)
        self.tell_neighbours(link, "GO")
        if not any(one.terminating for one in link.client.contexts.values()):
            self.answer("0")

    def tell_neighbours(self, link: Link, word: str) -> None:
        """Stop and resume the work of all other clients on a device while a kernel is interrupted (03 Q6, 06 V6)."""
        for one in self._contexts():
            if one.device == link.device and one is not link:
                one.connection.send(word.encode())

    # clients

    def attach(self, connection: Connection) -> Steps[None]:
        self.log.write(texts.REQUEST.format(pid=self.noise[0], context=self.noise[1]))
        found = yield from self.handshake(connection)
        if found is None:
            self.log.write(texts.NO_CREDENTIALS)
            connection.close()
            self.hung = True
            return
        pid, number, at = found
        self.noise = (pid, number)
        if self.faulted:
            self.log.write(
                texts.TEARDOWN.format(pid=pid, context=number), texts.NOT_ACCEPTED.format(pid=pid, context=number)
            )
            connection.send(rendezvous.word(rendezvous.NOT_READY))
            connection.close()
            return
        for device in sorted(self.destroyed):
            self.log.write(texts.CREATING_CONTEXT.format(device=device, name=gpu.NAME))
            yield from self.sleep(self.delays.recreate())
        self.destroyed.clear()
        connection.send(rendezvous.word(0))
        client = self.clients.get(pid)
        if number == 0:
            client = self.clients[pid] = Client(pid, self.host.name(pid), self.percentage, dict(self.limits))
        if (client is None and number != 1) or at >= len(self.devices):
            self.refuse(connection, 806)
            return
        if client is None:
            client = self.clients[pid] = Client(pid, self.host.name(pid), None, {})
        self.log.write(texts.CONNECTED.format(pid=pid, context=number), texts.WORKER.format(pid=pid, context=number))
        if number and sum(link.device == at for link in self._contexts()) >= MAX_CLIENTS:
            # the process keeps running, as recorded (docs/measured/2026-11-23-2xH200-580.159.04/contexts-full.txt)
            self.log.write(
                texts.ASSOCIATED.format(name=gpu.NAME, uuid=self.devices[at].uuid),
                texts.MAX_CLIENTS.format(count=MAX_CLIENTS),
                texts.DISCONNECTED.format(pid=pid),
            )
            self.refuse(connection, 808)
            return
        link = Link(connection, client, number, at)
        if number == 0:
            client.channel = link
            self.register(link)
            ordinals = ",".join(str(one.ordinal) for one in self.devices)
            connection.send(f"OK {self.delays.speed} {ordinals}".encode())
            self.untold.append((self.host.now + self.delays.limits_told(), lambda: self.tell_limits(link)))
            return
        if client.number == 0:
            self.client_count += 1
            client.number = self.client_count
        client.contexts[number] = link
        self.register(link)
        self.log.write(texts.ASSOCIATED.format(name=gpu.NAME, uuid=self.devices[at].uuid))
        yield from self.sleep(self.delays.association())
        if connection.hung_up():  # measured: the server exits, and the work of all its clients is lost
            self.log.write(
                texts.LOST.format(pid=pid, context=number),
                texts.EXITING_CLIENT.format(pid=pid, context=number, count=len(self._contexts()) - 1),
            )
            raise Exit(1)
        self.active(link)

    def register(self, link: Link) -> None:
        """Count a client's channel or context as a worker thread from now on."""
        self.links.append(link)

    def active(self, link: Link) -> None:
        """Send a client, whose context is ready, its limits."""
        client = link.client
        self.log.write(texts.STATUS.format(pid=client.pid, context=link.number))
        wait = self.delays.client_context(link.device, self.host.now)
        given = "- -" if client.percentage is None else f"{client.percentage} {client.limits.get(link.device, 0)}"
        link.connection.send(f"OK {given} {wait:.3f}".encode())

    def handshake(self, connection: Connection) -> Steps[tuple[int, int, int] | None]:
        """The client's pid from its credentials, which context it is (0: the channel), on which device; as long as it
        takes. None when no client is left at the other end."""
        spare = self.host.spare()
        for _ in range(rendezvous.EXTRA_DESCRIPTORS):
            connection.send(rendezvous.DESCRIPTOR, spare)
        spare.close()
        connection.send(rendezvous.READY)
        packets: list[Message] = []
        while len(packets) < 3:
            if (message := connection.next()) is not None:
                message.close()
                packets.append(message)
            elif connection.over:
                return None
            else:
                yield from self._wait_for(connection)
        credentials, number, device = packets
        if credentials.credentials is None:
            return None
        at = int.from_bytes(device.data[:4], "little")
        at = 0 if at == rendezvous.NO_DEVICE else at
        return credentials.credentials[0], int.from_bytes(number.data[:4], "little"), at

    def _wait_for(self, connection: Connection) -> Steps[None]:
        """Wait for a client in its handshake. Other clients have threads of their own, which notice their end and send
        their limits even then (H8); an order has to wait."""
        links = [link for link in self.links if not link.lost]
        yield (
            [connection.file, self.control.file, *[link.connection.file for link in links]],
            min((at for at, _ in self.untold), default=None),
        )
        found = [link for link in links if link.connection.readable()]
        self.read_orders()
        for link in sorted(found, key=lambda link: -link.number):
            link.read()
            if link.connection.over:
                self.lost(link)
        self._tell_limits()

    def _tell_limits(self) -> None:
        """Send the limits to the clients whose time has come."""
        now = self.host.now
        for one in [one for one in self.untold if one[0] <= now]:
            self.untold.remove(one)
            one[1]()

    def tell_limits(self, link: Link) -> None:
        """Send its limits to a client."""
        client = link.client
        sizes = ",".join(str(client.limits.get(at, 0)) for at in range(len(self.devices)))
        link.connection.send(f"LIMITS {client.percentage} {sizes}".encode())

    def refuse(self, connection: Connection, error: int) -> None:
        connection.send(b"FAIL %d" % error)
        connection.close()

    def hear(self, link: Link) -> Steps[None]:
        """Read what a client has sent, and notice its end."""
        link.read()
        while link.unread and not self.hung:
            line = wire.text(link.unread.popleft())
            if line in ("KERNEL", "IDLE"):
                link.kernel = line == "KERNEL"
                self.note_work()
            elif line.startswith("NAME "):
                link.client.name = line[5:]
            elif line == "TERMINATED" and link.terminating:
                yield from self.sleep(self.delays.terminate())
                self.terminated(link)
                link.read()
            elif line == "FAULT":
                self.later(self.delays.fault_notice(), lambda: self.fault(link.device, link.client.pid))
            elif line.startswith("LOG "):
                self.log.of("Client", link.client.pid).write(line[4:])
        link.unread.clear()
        if link.connection.over:
            self.links.remove(link)
            link.connection.close()
            if self.hung:  # the client's own thread hears that it has gone, and no more comes of it (H1)
                self.lost(link)
            elif link.number:
                self.lose_context(link)
            else:
                self.closing.append(link)
                # a killed process's contexts are closed in the same moment, and noticed first
                last = self.host.now if link.client.contexts else link.client.last_close
                wait = last + self.delays.channel_close() - self.host.now
                self.later(max(0.0, wait), lambda: self.lose_channel(link))

    def lost(self, link: Link) -> None:
        """The thread of a client has noticed its end."""
        if not link.lost:
            link.lost = True
            self.log.write(texts.LOST.format(pid=link.client.pid, context=link.number))

    def note_work(self) -> None:
        """Note which devices work."""
        self.host.note_work({link.device for link in self._contexts() if link.kernel}, self.later)

    def lose_context(self, link: Link) -> None:
        client = link.client
        client.last_close = self.host.now
        client.contexts.pop(link.number, None)
        if client.channel is None and not client.contexts and self.clients.get(client.pid) is client:
            del self.clients[client.pid]
        self.note_work()
        self.lost(link)
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
            self.busy_until = self.host.now + self.delays.destroy()

    def left_early(self, link: Link) -> None:
        """A client whose work is still on the GPU has gone. Nothing happens as long as its memory is kept."""
        if link.sticky or self.host.now >= link.leaves_at:
            return
        if self.host.holds(link.client.pid):
            self.later(0.02, lambda: self.left_early(link))
        else:
            self.later(self.delays.late_fault(), lambda: self.fault(link.device, link.client.pid))

    def lose_channel(self, link: Link) -> None:
        self.lost(link)
        if self._free():
            self.disconnect(link)
        else:  # after the order that came meanwhile: it still counts as a worker thread (Q4, Q6 of the real runs)
            self.later(self.busy_until - self.host.now + 0.002, lambda: self.disconnect(link))

    def disconnect(self, link: Link) -> None:
        self.closing.remove(link)
        self.log.write(texts.DISCONNECTED.format(pid=link.client.pid))
        if self.clients.get(link.client.pid) is link.client:
            del self.clients[link.client.pid]

    def fault(self, device: int, culprit: int) -> None:
        """A fatal error on `device`: every client there gets it, no new one is accepted until the last has gone."""
        hit = [one for one in self.links if one.number and one.device == device]
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
            one.connection.send(b"STICKY")
