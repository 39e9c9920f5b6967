"""People: what users run. Each client is a process whose program is a generator; to write another one is to write its
steps. What happened to it is in its :class:`Life`, which the judges read."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.world.kernel import File, Process, Socket
from tests.world.mps import CLIENT, CREDENTIALS, DESCRIPTOR, GREETING, NO_DEVICE, READY, End, is_context, word

if TYPE_CHECKING:
    from tests.world.world import World

Steps = Generator[tuple[list[File], float | None], None, Any]


@dataclass(slots=True, eq=False)
class Life:
    """Of a client: when it knocked, had its descriptor, worked, ended; what it was given and how it ended."""

    process: Process
    uid: int
    work: float
    socket: Socket | None = None
    """Its last connection to the public socket."""
    knocked: float | None = None
    """It has said its credentials: it waits from now on."""
    given: float | None = None
    """It has its first descriptor."""
    worked: float | None = None
    """Its first context is made."""
    limits: tuple[float, int] | None = None
    over: float | None = None
    left: float | None = None
    """Its process has ended."""
    error: str | None = None
    asked: bool = False
    """It was asked to end (terminate_client)."""
    done: bool = False
    """It has done its work."""
    honest: bool = True
    users: set[int] = field(default_factory=set)
    """Others as whom it has connected as well."""

    @property
    def whose(self) -> set[int]:
        return {self.uid, *self.users}

    @property
    def is_anothers(self) -> bool:
        """Its user may not signal it: it has become another user's."""
        return not self.whose & {0, self.process.real, self.process.saved}

    @property
    def waits(self) -> bool:
        return self.knocked is not None and self.given is None and self.process.alive and self.error is None

    @property
    def came(self) -> float:
        """Its connection: it may be stopped before it says who it is."""
        knocked = self.knocked or 0.0
        return knocked if self.socket is None else min(knocked, self.socket.accepted)

    @property
    def works(self) -> bool:
        return self.worked is not None and self.over is None and self.process.alive


class Client:
    """An honest CUDA program: looks for MPS, makes ``contexts`` contexts one after the other, computes, leaves."""

    def __init__(self, world: World, life: Life, contexts: int = 1) -> None:
        self.world, self.kernel, self.life = world, world.kernel, life
        self.process = life.process
        self.contexts = contexts
        self.public = world.public
        self.channel: End | None = None

    def run(self) -> Steps:
        life = self.life
        try:
            yield from self.live()
        finally:
            if life.over is None:
                life.over = self.kernel.now
        return 0

    def connect(self) -> Generator[tuple[list[File], float | None], None, End | None]:
        end = End(self.process, Socket(self.kernel))
        while True:
            try:
                self.kernel.connect(self.process, f"{self.public}/control", end.file)
            except BlockingIOError:  # a blocking socket waits for room in the backlog
                yield [], self.kernel.now + 0.001
                continue
            except OSError:
                end.close()
                return None
            end.file.credentials = True
            self.life.socket = end.file
            return end

    def live(self) -> Steps:
        life, kernel = self.life, self.kernel
        yield [], kernel.now + self.world.chance.uniform(0.0, 0.02)
        probe = yield from self.connect()
        greeting = None if probe is None else (yield from probe.hear())
        if probe is not None:
            probe.close()
        if greeting is None or len(greeting.data) != len(GREETING):
            life.error = "outside MPS"
            return
        channel = self.channel = yield from self.meet(0)
        if channel is None or life.error is not None:
            return
        answer = yield from channel.hear()
        if answer is None or not answer.data.startswith(b"OK"):
            life.error = life.error or "806"
            return
        made = []
        for number in range(1, self.contexts + 1):
            yield [], kernel.now + 0.011
            context = yield from self.meet(number)
            if context is None or life.error is not None:
                return
            answer = yield from context.hear()
            if answer is None or not is_context(answer):  # the gate may have made a channel of it
                refused = answer is not None and answer.data.startswith(b"FAIL ")
                life.error = answer.data.decode().split()[1] if refused else "806"
                return
            made.append(context)
            *limits, wait = self.granted(answer.data)
            if life.limits is None:
                life.limits = (limits[0], int(limits[1]))
                life.worked = kernel.now
                self.world.uses[self.process.pid] = ("mps", 582)
                self.process.on_end.append(lambda process: self.world.uses.pop(process.pid, None))
                self.world.judges.works(life)
            yield [], kernel.now + wait + 0.066
        yield from self.work(made)
        if life.asked:  # half of all programs exit by themselves at the error
            exits = self.world.chance.random() < 0.5
            yield [], kernel.now + (self.world.chance.uniform(0.005, 0.05) if exits else 60.0)
        life.over = kernel.now
        for one in made:
            one.close()
        yield [], kernel.now + 0.015
        channel.close()
        yield [], kernel.now + 0.011

    def granted(self, answer: bytes) -> tuple[float, float, float]:
        """Active thread percentage, MiB, and how long the context takes. Where another server made its channel: what
        that one had said before it was killed; nothing, which is 8 multiprocessors and all memory."""
        _, *limits, wait = answer.decode().split()
        if limits == ["-", "-"]:
            assert self.channel is not None
            limits = self.channel.file.heard.split() or ["0", "0"]
        return float(limits[0]), float(limits[1]), float(wait)

    def meet(self, number: int) -> Generator[tuple[list[File], float | None], None, End | None]:
        """A whole rendezvous, as for each context. None: ``life.error`` says why."""
        life = self.life
        control = yield from self.connect()
        if control is None:
            life.error = "805"
            return None
        server = yield from self.introduce(control)
        if server is None:
            life.error = "805"
            control.close()
            return None
        if life.given is None:
            life.given = self.kernel.now
            self.world.judges.given(life)
        status = yield from self.greet(server, number)
        if status is None:
            life.error = "806"
            control.close()
            server.close()
            return None
        yield from self.acknowledge(control, status)
        control.close()
        if status:
            life.error = str(status)
            server.close()
            return None
        return server

    def own(self) -> tuple[int, int, int]:
        """As whom it speaks: its real uid."""
        return self.process.pid, self.process.real, self.process.gid

    def introduce(self, control: End) -> Generator[tuple[list[File], float | None], None, End | None]:
        """Up to the descriptor that leads to its server."""
        if (yield from control.hear()) is None:
            return None
        control.say(CREDENTIALS, who=self.own())
        control.say(CLIENT)
        if self.life.knocked is None:
            self.life.knocked = self.kernel.now
            self.world.judges.knocks(self.life)
        answer = yield from control.hear()
        if answer is None or answer.data != DESCRIPTOR or len(answer.files) != 1:
            return None
        file = answer.files[0]
        assert isinstance(file, Socket)
        server = End(self.process, file)
        file.drop()
        return server

    def greet(self, server: End, number: int) -> Generator[tuple[list[File], float | None], None, int | None]:
        """The client's part of the handshake with its server: the status that it ends with; None: the server goes."""
        while True:
            message = yield from server.hear()
            if message is None:
                return None
            if message.data == READY:
                break
            for file in message.files:
                file.drop()
        server.say(CREDENTIALS, who=self.own())
        server.say(word(number))
        server.say(NO_DEVICE if number == 0 else word(0))
        status = yield from server.hear()
        return None if status is None or len(status.data) != 4 else int.from_bytes(status.data, "little")

    def acknowledge(self, control: End, status: int) -> Steps:
        control.say(word(status))
        return
        yield [], None

    def work(self, contexts: list[End]) -> Steps:
        """Kernels and pauses, until it is enough or there is an error."""
        life, kernel = self.life, self.kernel
        until = kernel.now + life.work
        while kernel.now < until:
            contexts[0].say(b"KERNEL")
            if not (yield from self.wait(contexts, min(until, kernel.now + self.world.chance.uniform(0.5, 3.0)))):
                return
            contexts[0].say(b"IDLE")
            if not (yield from self.wait(contexts, min(until, kernel.now + self.world.chance.uniform(0.5, 3.0)))):
                return
        life.done = True

    def wait(self, contexts: list[End], until: float) -> Generator[tuple[list[File], float | None], None, bool]:
        """False when there is an error."""
        life = self.life
        while self.kernel.now < until:
            yield [one.file for one in contexts], until
            for one in contexts:
                one.file.reset = False
                while one.file.messages:
                    said = one.file.next().data
                    if said == b"TERMINATE" and life.error is None:
                        one.say(b"TERMINATED")
                        life.asked, life.error = True, "terminated"
                    elif said == b"STICKY":
                        life.error = life.error or "700"
                if one.over:
                    life.error = life.error or "806"
            if life.error is not None:
                self.process.busy += 0.01
                return False
        self.process.busy += 0.5
        return True


class Liar(Client):
    """Says at once that it has met its server, and never does (recording 12, H2)."""

    def greet(self, server: End, number: int) -> Generator[tuple[list[File], float | None], None, int | None]:
        yield [], self.kernel.now + self.world.chance.uniform(0.0, 0.01)
        return 0

    def acknowledge(self, control: End, status: int) -> Steps:
        control.say(word(status))
        yield [], self.kernel.now + self.life.work
        self.life.error = "lied"


class Early(Client):
    """Says that it has met its server before it does."""

    def introduce(self, control: End) -> Generator[tuple[list[File], float | None], None, End | None]:
        server = yield from super().introduce(control)
        if server is not None:
            control.say(word(0))
            yield [], self.kernel.now + self.world.chance.uniform(0.0, 0.5)
        return server

    def acknowledge(self, control: End, status: int) -> Steps:
        return
        yield [], None


class Doubter(Client):
    """Says that its server is in FAULT, and has not asked it (recording 12, H3)."""

    def greet(self, server: End, number: int) -> Generator[tuple[list[File], float | None], None, int | None]:
        yield [], self.kernel.now
        return 807


class Silent(Client):
    """Takes its descriptor and says nothing to anybody."""

    def greet(self, server: End, number: int) -> Generator[tuple[list[File], float | None], None, int | None]:
        yield [], self.kernel.now + self.life.work
        self.life.error = "silent"
        return None


class Mute(Client):
    """Connects and never says who it is."""

    def introduce(self, control: End) -> Generator[tuple[list[File], float | None], None, End | None]:
        yield [], self.kernel.now + self.life.work
        self.life.error = "mute"
        return None


class Late(Client):
    """Meets its server 0.24 s late, each time: the gate counted hand-overs from 0.25 s on."""

    def greet(self, server: End, number: int) -> Generator[tuple[list[File], float | None], None, int | None]:
        yield [], self.kernel.now + 0.24
        return (yield from super().greet(server, number))


class Crasher(Client):
    """Is killed with its contexts open and no kernel in flight: no fault follows, which only MPS can know."""

    def work(self, contexts: list[End]) -> Steps:
        yield from self.wait(contexts, self.kernel.now + self.life.work)
        self.kernel.signal(self.process, 9)
        yield [], None


KINDS = {
    "honest": Client, "late": Late, "crasher": Crasher, "liar": Liar, "early": Early, "doubter": Doubter,
    "silent": Silent, "mute": Mute,
}  # fmt: skip
