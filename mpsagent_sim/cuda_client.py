"""A CUDA client: `cuda-client MODE [ARG...]`, with the modes and output of the probe used for the recordings.

    query                   what can be seen from here
    alloc MIB [SECONDS]     allocate, then stay
    sleep SECONDS           a little work every 50 ms; SIGUSR1 ends it early, and well
    spin SECONDS            one long kernel
    train SECONDS           kernels without a pause; after an error it takes its time to leave
    oob SECONDS             after that time an illegal access
    mind SECONDS [1]        a kernel of 5 ms every 50 ms, a line every 0.25 s; with 1 also after its first error
    duty PART SECONDS       a kernel for that part of each 0.1 s, and at the end how long kernels ran
    fault                   at SIGUSR1 an illegal access
    work N                  N kernels of 10 ms
    init SECONDS            cuInit only
    launch RANKS SECONDS    cuInit only, then RANKS processes in mode sleep, as torchrun and multiprocessing parents do;
                            it waits for them; SIGUSR1: it makes a context of its own
    two SECONDS             two contexts
    contexts N SECONDS      contexts until there are N or an error comes; SIGUSR1: one ends, another is made
    leave SECONDS           fork; it ends, and the other one stays with all that was open
    limit [STEP]            allocate in steps of so many MiB (64) until there is no more, and say how much there was
`--ignore-term` anywhere ignores SIGTERM; `--debugged` says what a program under cuda-gdb says.
DEV is the device ordinal. With SAY_MPS it also says `mps yes` or `mps no`.
Exit status as the probe's.
"""

# pathlib and contextlib cost more than everything else in the start of a front-end or client
# ruff: noqa: SIM105

import _signal  # type: ignore[import-not-found]  # `signal` costs more than the rest of the start
import _socket
import os
import select
import sys
import time

from mpsagent_sim import gpu, limits, registry, rendezvous, wire

SUCCESS = "CUDA_SUCCESS"
_EXCEPTION = 3.0
"""Seconds from an error to the end of a program that does not exit at once."""
_ERRORS = {
    805: "MPS_CONNECTION_FAILED", 806: "MPS_RPC_FAILURE", rendezvous.NOT_READY: "MPS_SERVER_NOT_READY",
    808: "MPS_MAX_CLIENTS_REACHED",
}  # fmt: skip


def _error(status: int) -> str:
    return f"CUDA_ERROR_{_ERRORS.get(status, 'UNKNOWN')}"


class Cuda:
    """The process's state in the driver: one device, one context, under MPS or (channel is None) without."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.error: str | None = None
        self.held = False  # the device stands still: a neighbour is being terminated
        self.channel: _socket.socket | None = None
        self.context: _socket.socket | None = None
        self.more: list[_socket.socket] = []
        self.speed = float(os.environ.get("MPSSIM_SPEED") or 1)
        self.machine = gpu.machine(int(os.environ.get("MPSSIM_GPUS") or 1))
        self.devices = self.machine
        self.instance = self.devices
        self.device = self.devices[0]
        self.entry = registry.Entry("bypass")
        self.percentage = 100.0
        self.sms = gpu.MULTIPROCESSORS
        self.limit: int | None = None
        self.debugged = False
        self.asked = ""  # CUDA_MPS_PINNED_DEVICE_MEM_LIMIT as cuInit found it (11 E4)
        self.allocated = 0
        self.enough = False

    def say(self, text: str) -> None:
        line = f"[{time.monotonic() - self.began:8.3f} pid {os.getpid()} uid {os.getuid()}] {text}\n"
        try:
            os.write(1, line.encode())
        except OSError:
            pass

    def _delay(self, milliseconds: float) -> None:
        time.sleep(milliseconds / 1000 / self.speed)

    # attaching

    def initialise(self) -> str:
        """cuInit: find the daemon and wait for a server. If none greets, run outside MPS without a message (G7)."""
        registry.open_device()
        self.asked = os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "")
        try:
            probe = rendezvous.connect(f"{wire.directories()[0]}/control")
        except OSError:
            return self._see(self.devices)
        greeted = rendezvous.greeted(probe)
        probe.close()
        if not greeted:
            return self._see(self.devices)
        if self.debugged:  # it takes the end of its connection for no MPS (cuda-gdb, an H100)
            control = rendezvous.connect(f"{wire.directories()[0]}/control")
            if rendezvous.introduce(control, rendezvous.DEBUGGER):
                rendezvous.receive(control).close()
            control.close()
            return self._see(self.devices)
        # only the probe decides about inside or outside: whatever fails from here on is an error
        answer, self.channel = self._meet(0, rendezvous.NO_DEVICE)
        rest = answer.split()[1:]
        if self.channel is None:
            return _error(int(rest[0]))
        self.entry.kind = "mps"
        self.speed = float(rest[0])
        return self._see([gpu.Device(int(ordinal)) for ordinal in rest[1].split(",")])

    def _meet(self, context: int, device: int) -> tuple[str, _socket.socket | None]:
        """Carry out a rendezvous for a context; return the server's answer, and the connection unless refused."""
        failed = "FAIL 805"
        try:
            control = rendezvous.connect(f"{wire.directories()[0]}/control")
        except OSError:
            return failed, None
        connection = rendezvous.answer(control) if rendezvous.introduce(control, rendezvous.CLIENT) else None
        if connection is None:
            control.close()
            return failed, None
        status = rendezvous.meet(connection, context, device)
        if status is None:
            control.close()
            connection.close()
            return failed, None
        if status == 0:
            rendezvous.send(connection, f"NAME {self._name()}".encode())
        rendezvous.send_status(control, status)
        control.close()
        answer = f"FAIL {status}" if status else wire.text(rendezvous.receive(connection, wire.MESSAGE).data)
        if answer.startswith("OK"):
            return answer, connection
        connection.close()
        return answer or failed, None

    def _name(self) -> str:
        """Return the COMMAND that MPS shows, in hexadecimal digits: argv[0], or the script's name for Python."""
        with open("/proc/self/cmdline", "rb") as cmdline:
            name = cmdline.read(65536).split(b"\0")[0]
        script = os.fsencode(sys.argv[0])
        try:
            with open(script, "rb") as first:
                interpreter = first.readline(4096)[2:].split()[:1]
        except OSError:
            interpreter = []
        if interpreter == [name]:
            name = script
        return name[:16384].hex() or "3f"

    def _see(self, devices: list[gpu.Device]) -> str:
        self.instance = devices
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
        self.devices = gpu.visible(devices, wanted)
        if self.devices:
            return SUCCESS
        if self.channel is not None and wanted is not None:
            from mpsagent_sim import texts

            first = wanted.split(",")[0].strip()
            known = [device.uuid for device in self.machine if len(first) > 4 and device.uuid.startswith(first)]
            if first.isdigit():
                said = [text.format(ordinal=first, count=len(devices)) for text in texts.BAD_VISIBLE_DEVICES]
            else:
                said = [text.format(uuid=uuid) for uuid in known[:1] for text in texts.INVISIBLE_DEVICE]
            for text in said:
                rendezvous.send(self.channel, f"LOG {text}".encode())
        return "CUDA_ERROR_NO_DEVICE"

    def create_context(self, device: gpu.Device) -> str:
        """cuDevicePrimaryCtxRetain."""
        self.device = device
        self._delay(11)
        if self.channel is None:
            used = registry.processes(device.ordinal)
            if registry.exclusive(device.ordinal) and used:
                return "CUDA_ERROR_DEVICE_UNAVAILABLE"
        else:
            at = [one.ordinal for one in self.instance].index(device.ordinal)
            answer, self.context = self._meet(1, at)
            rest = answer.split()[1:]
            if self.context is None:
                return _error(int(rest[0]))
            percentage, limit = self._heard(at) if rest[0] == "-" else (float(rest[0]), int(rest[1]))
            self._take_limits(percentage, limit, at)
            time.sleep(float(rest[2]))
        self._delay(66)
        self._register()
        return SUCCESS

    def _heard(self, at: int) -> tuple[float, int]:
        """Return the limits that the server of its channel had sent before it was killed. Without them the client has
        no memory limit and 8 multiprocessors, whatever the next server has (server-lost-at-start.txt)."""
        assert self.channel is not None
        while (message := rendezvous.arrived(self.channel, wire.MESSAGE)) is not None and message.data:
            word, *rest = wire.text(message.data).split()
            if word == "LIMITS":
                percentage, sizes = rest
                return float(percentage), int(sizes.split(",")[at])
        return 0.0, 0

    def another_context(self) -> str:
        """cuCtxCreate in addition to the primary context."""
        if self.channel is not None:
            at = [one.ordinal for one in self.instance].index(self.device.ordinal)
            answer, context = self._meet(2 + len(self.more), at)
            if context is None:
                return _error(int(answer.split()[1]))
            self.more.append(context)
        self._delay(66)
        return SUCCESS

    def everywhere(self) -> str:
        """A little work in each context."""
        lost = any(rendezvous.hung_up(one) for one in self.more)
        return "CUDA_ERROR_MPS_RPC_FAILURE" if lost else self.kernel(0.005)

    def _take_limits(self, percentage: float, limit: int, at: int) -> None:
        """Apply the server's limits and the variables in the client's environment."""
        own = limits.percentage(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")) or 100.0
        partitioning = os.environ.get("CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING") == "1"
        # the server's limit holds only beside one of its own then (docs/measured.md, "A client's own environment")
        self.sms = gpu.multiprocessors(own if partitioning and own == 100.0 else min(own, percentage))
        asked = limits.client_limits(self.asked, [one.uuid for one in self.instance])
        given = [] if asked is None else [one for one in (limit, asked.get(at)) if one]
        self.limit = min(given) if given else None

    def _register(self) -> None:
        if self.channel is None:
            self.entry.write(self.device.ordinal, 582 - 64 + self.allocated)
        else:
            self.entry.write(self.device.ordinal, gpu.usage(self.sms, self.allocated))

    def free(self) -> int:
        """MiB that may still be allocated."""
        others = [one for one in registry.processes(self.device.ordinal) if one[0] != os.getpid()]
        taken = sum(one[3] for one in others)
        if self.channel is None:
            return max(0, gpu.TOTAL - gpu.BYPASS_OVERHEAD - taken - self.allocated)
        servers = sum(1 for one in others if one[1] == "server")
        return gpu.free(self.sms, self.limit, self.allocated, taken - gpu.SERVER_USAGE * min(servers, 1))

    def allocate(self, mebibytes: float) -> str:
        if self.error:
            return self.error
        if mebibytes > self.free():
            return "CUDA_ERROR_OUT_OF_MEMORY"
        self.allocated += int(mebibytes)
        self._register()
        return SUCCESS

    # working

    def wait(self, seconds: float, until_error: bool = False) -> str:
        """Let time pass while the context lives on; the first error stays."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 or (self.held and self.context is not None):
            if until_error and self.error:
                break
            if self.context is None:
                time.sleep(left)
                continue
            if left <= 0:
                self._hear(self.context)
                continue
            poll = select.poll()
            poll.register(self.context.fileno(), select.POLLIN)
            if poll.poll(left * 1000 + 0.5):
                self._hear(self.context)
        return self.error or SUCCESS

    def _hear(self, context: _socket.socket) -> None:
        line = wire.text(rendezvous.receive(context, wire.MESSAGE).data)
        if line == "STICKY" and self.error is None:
            self.error = "CUDA_ERROR_ILLEGAL_ADDRESS"
        elif line in ("HOLD", "GO"):
            self.held = line == "HOLD"
        elif line == "TERMINATE" and self.error is None:
            self.error = "CUDA_ERROR_MPS_CLIENT_TERMINATED"
            self.tell("TERMINATED")
        elif not line:
            self.error = self.error or "CUDA_ERROR_MPS_RPC_FAILURE"
            context.close()
            self.context = None

    def tell(self, text: str) -> None:
        if self.context is not None:
            rendezvous.send(self.context, text.encode())

    def kernel(self, seconds: float) -> str:
        """Run a kernel, from launch to synchronisation."""
        if self.error:
            return self.error
        self.tell("KERNEL")
        result = self.wait(seconds, until_error=True)
        if result == SUCCESS:
            self.tell("IDLE")
        return result

    def illegal_access(self) -> str:
        if self.channel is None:
            self._delay(190)
            self.error = "CUDA_ERROR_ILLEGAL_ADDRESS"
            return self.error
        self.tell("FAULT")
        return self.wait(60, until_error=True)

    def finish(self, *_: object) -> None:
        self.enough = True

    def leave(self, status: int) -> int:
        for context in (*self.more, self.context):
            if context is not None:
                context.close()
        if self.channel is not None:
            self._delay(15)
            self.channel.close()
            self._delay(11)  # the process outlives its channel: the server has seen its end when others do
        self.entry.remove()
        return status


def main() -> int:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    words = [word for word in sys.argv[1:] if word not in ("--ignore-term", "--debugged")]
    if "--ignore-term" in sys.argv:
        _signal.signal(_signal.SIGTERM, _signal.SIG_IGN)
    mode = words[0] if words else "query"
    numbers = [float(word) for word in words[1:]] + [0.0, 0.0]
    cuda = Cuda()
    cuda.debugged = "--debugged" in sys.argv
    if mode in ("sleep", "mind", "fault"):
        _signal.signal(_signal.SIGUSR1, cuda.finish)
    result = cuda.initialise()
    cuda.say(f"cuInit {result}")
    if result != SUCCESS:
        return cuda.leave(10)
    if mode == "init":
        cuda.wait(numbers[0])
        return cuda.leave(0)
    if mode == "launch":
        return cuda.leave(_launch(cuda, int(numbers[0]), words[2]))
    ordinal = int(os.environ.get("DEV") or 0)
    if ordinal >= len(cuda.devices):
        cuda.say("cuDeviceGet CUDA_ERROR_INVALID_DEVICE")
        return cuda.leave(11)
    result = cuda.create_context(cuda.devices[ordinal])
    cuda.say(f"ctx {result}")
    if result != SUCCESS:
        return cuda.leave(12)
    cuda.say(f"devices {len(cuda.devices)} using {cuda.device.uuid[:12]}")
    cuda.say(f"sms {cuda.sms} meminfo {SUCCESS} free {cuda.free()} MiB total {gpu.TOTAL} MiB")
    if os.environ.get("SAY_MPS"):  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED
        cuda.say("mps no" if cuda.channel is None else "mps yes")
    run = _MODES.get(mode)
    return cuda.leave(99 if run is None else run(cuda, *numbers[:2]))


def _launch(cuda: Cuda, ranks: int, seconds: str) -> int:
    def own_context(*_: object) -> None:
        cuda.say(f"own ctx {cuda.create_context(cuda.devices[0])}")

    _signal.signal(_signal.SIGUSR1, own_context)
    program = sys.argv[0]
    started = [os.posix_spawn(program, [program, "sleep", seconds], os.environ) for _ in range(ranks)]
    cuda.say(f"ranks {' '.join(map(str, started))}")
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
    return max(map(abs, statuses), default=0)


def _query(cuda: Cuda, _: float, __: float) -> int:
    return 0


def _alloc(cuda: Cuda, mebibytes: float, seconds: float) -> int:
    result = cuda.allocate(mebibytes)
    cuda.say(f"cuMemAlloc {mebibytes:.0f} MiB: {result}")
    cuda.wait(int(seconds))
    return 0 if result == SUCCESS else 13


def _sleep(cuda: Cuda, seconds: float, _: float) -> int:
    cuda.allocate(64)
    end = time.monotonic() + seconds
    count, last = 0, SUCCESS
    while time.monotonic() < end and not cuda.enough:
        result = cuda.error or SUCCESS
        if result != last:
            cuda.say(f"work now {result}")
            last = result
        count += 1
        cuda.wait(0.05)
    cuda.say(f"done {count} iterations, last {last}")
    return 0 if last == SUCCESS else 14


def _spin(cuda: Cuda, seconds: float, _: float) -> int:
    cuda.say("launch cudaSuccess")
    began = time.monotonic()
    result = cuda.kernel(seconds)
    cuda.say(f"sync {result} after {time.monotonic() - began:.3f} s")
    return 0 if result == SUCCESS else 16


def _train(cuda: Cuda, seconds: float, _: float) -> int:
    cuda.say("launch cudaSuccess")
    end, last = time.monotonic() + seconds, SUCCESS
    while time.monotonic() < end and last == SUCCESS and not cuda.enough:
        last = cuda.kernel(0.5)
    cuda.say(f"work now {last}")
    if last != SUCCESS:
        time.sleep(_EXCEPTION)
    return 0 if last == SUCCESS else 16


def _oob(cuda: Cuda, seconds: float, _: float) -> int:
    cuda.wait(seconds)
    cuda.say("oob launch cudaSuccess")
    result = cuda.error or cuda.illegal_access()
    cuda.say(f"oob sync {result}")
    return 0 if result == SUCCESS else 17


def _mind(cuda: Cuda, seconds: float, goes_on: float) -> int:
    end = time.monotonic() + seconds
    count, last, said = 0, SUCCESS, 0.0
    while time.monotonic() < end and not cuda.enough:
        result = cuda.kernel(0.005)
        count += 1
        if result != last:
            cuda.say(f"work now {result} at {time.monotonic():.4f}")
            last = result
        if result != SUCCESS and not goes_on:
            break
        if result == SUCCESS and time.monotonic() - said > 0.25:
            said = time.monotonic()
            cuda.say(f"step {count} at {said:.4f}")
        cuda.wait(0.05)
    cuda.say(f"done {count} iterations, last {last}")
    return 0 if last == SUCCESS else 14


def _duty(cuda: Cuda, part: float, seconds: float) -> int:
    begun, busy, last = time.monotonic(), 0.0, SUCCESS
    while last == SUCCESS and (now := time.monotonic()) < begun + seconds:
        if part:
            last = cuda.kernel(part / 10)
            busy += time.monotonic() - now
        cuda.wait(0.1 - (time.monotonic() - begun) % 0.1)
    cuda.say(f"busy {busy:.3f} of {time.monotonic() - begun:.3f} s, last {last}")
    return 0 if last == SUCCESS else 14


def _fault(cuda: Cuda, _: float, __: float) -> int:
    cuda.say(f"armed {SUCCESS}")
    while not cuda.enough and not cuda.error:
        cuda.wait(0.005)
    cuda.say(f"oob launch {cuda.error or 'cudaSuccess'} at {time.monotonic():.4f}")
    result = cuda.error or cuda.illegal_access()
    cuda.say(f"oob sync {result} at {time.monotonic():.4f}")
    return 0 if result == SUCCESS else 17


def _two(cuda: Cuda, seconds: float, _: float) -> int:
    result = cuda.another_context()
    cuda.say(f"second ctx {result}")
    cuda.wait(seconds)
    return 0 if result == SUCCESS else 12


def _contexts(cuda: Cuda, number: float, seconds: float) -> int:
    count, result = 1, SUCCESS
    while count < number and result == SUCCESS:
        result = cuda.another_context()
        count += result == SUCCESS

    def one_for_another(*_: object) -> None:
        before = cuda.everywhere()
        cuda.more.pop().close()
        cuda.say(f"works everywhere {before}, another ctx {cuda.another_context()}, works {cuda.everywhere()}")

    _signal.signal(_signal.SIGUSR1, one_for_another)
    cuda.say(f"made {count} contexts, last {result}")
    cuda.wait(seconds)
    return 0 if result == SUCCESS else 12


def _leave(cuda: Cuda, seconds: float, _: float) -> int:
    if os.fork():
        os._exit(0)
    os.setsid()  # else the number stays taken
    time.sleep(seconds)
    os._exit(0)


def _work(cuda: Cuda, kernels: float, _: float) -> int:
    count, last = 0, SUCCESS
    while count < kernels and last == SUCCESS:
        last = cuda.kernel(0.01)
        count += 1
    if last != SUCCESS:
        cuda.say(f"work now {last}")
    cuda.say(f"done {count} iterations, last {last}")
    return 0 if last == SUCCESS else 14


def _limit(cuda: Cuda, step: float, _: float) -> int:
    while (result := cuda.allocate(step or 64)) == SUCCESS:
        pass
    cuda.say(f"allocated {cuda.allocated} MiB, then {result}")
    return 0 if result == "CUDA_ERROR_OUT_OF_MEMORY" else 13


_MODES = {
    "query": _query, "alloc": _alloc, "sleep": _sleep, "spin": _spin, "oob": _oob, "work": _work, "two": _two,
    "train": _train, "limit": _limit, "mind": _mind, "duty": _duty, "fault": _fault, "contexts": _contexts,
    "leave": _leave,
}  # fmt: skip
