#!/usr/bin/env python3
"""A CUDA client in pure Python: ctypes on libcuda.so.1, kernels as PTX text, no compiler and no third-party package.

    cuda_client.py query                say what the device and MPS give this process
    cuda_client.py alloc MIB [SECONDS]  allocate, say how that went, stay for a while
    cuda_client.py sleep SECONDS        a little work every 50 ms; goes on after errors, as careless programs do;
                                        SIGUSR1 ends it early, and well
    cuda_client.py spin SECONDS         one kernel of that length, then wait for it
    cuda_client.py oob [SECONDS]        after a pause, one kernel that writes far outside its memory
    cuda_client.py mind SECONDS [1]     a kernel of 5 ms every 50 ms, a line every 0.25 s, until its first error; with 1
                                        it goes on after errors; SIGUSR1 ends it early, and well
    cuda_client.py duty PART SECONDS    a kernel for that part of each 0.1 s, and at the end how long kernels ran
    cuda_client.py fault                ready, it waits for SIGUSR1; then one kernel that writes far outside its memory
    cuda_client.py work N               N kernels of 10 ms, each waited for
    cuda_client.py init SECONDS         cuInit only: connected to MPS, but without a CUDA context
    cuda_client.py two SECONDS          two CUDA contexts in one process
    cuda_client.py contexts N SECONDS   CUDA contexts until there are N or an error comes; then stay; at SIGUSR1 one of
                                        them ends, and another is made
    cuda_client.py leave SECONDS        fork; it ends, and the other one stays with all that was open

`--ignore-term` makes it ignore SIGTERM. The environment variable DEV is the device ordinal (0); with SAY_MPS=1 it also
says `mps yes` or `mps no`, where the driver can tell.
Every line is `[seconds pid P uid U] text`, flushed at once. Exit status: 0 fine, 10 cuInit, 11 no such device, 12 no
context, 13 allocation, 14 work, 16 kernel, 17 the kernel outside its memory, 98 no libcuda, 99 usage.

Start-up time counts in the measurements, so nothing is imported that is not needed.
"""

import ctypes
import os
import sys
import time

MULTIPROCESSOR_COUNT = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
MPS_ENABLED = 133  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED, from CUDA 12.4 on
MIB = 1 << 20

# Newest last: the first that this driver takes is used. sm_70 runs on everything from Volta on.
PTX_TARGETS = (b".version 7.0\n.target sm_70\n", b".version 7.8\n.target sm_90\n")
PTX_NOT_TAKEN = (209, 218, 222)  # NO_BINARY_FOR_GPU, INVALID_PTX, UNSUPPORTED_PTX_VERSION

# The store in `oob` goes 4 TiB past the allocation.
PTX = b"""
.address_size 64

.visible .entry spin(.param .u64 spin_ns)
{
    .reg .pred %p<2>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [spin_ns];
    mov.u64 %rd2, %globaltimer;
AGAIN:
    mov.u64 %rd3, %globaltimer;
    sub.s64 %rd4, %rd3, %rd2;
    setp.lt.s64 %p1, %rd4, %rd1;
    @%p1 bra AGAIN;
    ret;
}

.visible .entry oob(.param .u64 oob_p)
{
    .reg .b32 %r<2>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [oob_p];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u64 %rd3, 4398046511104;
    add.s64 %rd2, %rd2, %rd3;
    mov.u32 %r1, 1;
    st.global.u32 [%rd2], %r1;
    ret;
}
"""

LIBCUDA = (
    "libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "/usr/lib64/libcuda.so.1",
    "/usr/lib/aarch64-linux-gnu/libcuda.so.1",
)

T0 = time.monotonic()


def say(text):
    line = "[%8.3f pid %d uid %d] %s\n" % (time.monotonic() - T0, os.getpid(), os.getuid(), text)
    os.write(1, line.encode())


class Driver:
    """The few driver calls that are needed. Every method returns the CUresult, 0 for success."""

    def __init__(self):
        problem = None
        for name in LIBCUDA:
            try:
                self.lib = ctypes.CDLL(name)
                break
            except OSError as error:
                problem = problem or error
        else:
            raise OSError("libcuda.so.1 cannot be loaded: %s" % problem)
        self.kernels = None
        self.contexts = []

    def call(self, name, *arguments):
        function = getattr(self.lib, name)
        function.restype = ctypes.c_int
        return function(*arguments)

    def name(self, result):
        text = ctypes.c_char_p()
        self.call("cuGetErrorName", ctypes.c_int(result), ctypes.byref(text))
        return text.value.decode() if text.value else "?"

    def device(self, ordinal):
        handle = ctypes.c_int()
        result = self.call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(ordinal))
        return result, handle

    def device_count(self):
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def uuid_start(self, device):
        raw = (ctypes.c_ubyte * 16)()
        try:
            self.call("cuDeviceGetUuid_v2", raw, device)
        except AttributeError:
            self.call("cuDeviceGetUuid", raw, device)
        return "GPU-%02x%02x%02x%02x" % tuple(raw[:4])

    def multiprocessors(self, device):
        return self.attribute(MULTIPROCESSOR_COUNT, device)[1]

    def attribute(self, number, device):
        """(CUresult, value)"""
        value = ctypes.c_int()
        result = self.call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), device)
        return result, value.value

    def primary_context(self, device):
        context = ctypes.c_void_p()
        result = self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.contexts.append(context)
        return result or self.call("cuCtxSetCurrent", context)

    def another_context(self, device):
        context = ctypes.c_void_p()
        result = self.call("cuCtxCreate_v2", ctypes.byref(context), ctypes.c_uint(0), device)
        if not result:
            self.contexts.append(context)
        return result

    def everywhere(self):
        """A little work in each context."""
        result = 0
        for context in self.contexts:
            result = result or self.call("cuCtxSetCurrent", context)
            if not result:
                result, pointer = self.allocate(MIB)
                result = result or self.fill(pointer, MIB) or self.synchronize() or self.call("cuMemFree_v2", pointer)
        return result

    def memory(self):
        """(CUresult, free bytes, total bytes)"""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        result = self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return result, free.value, total.value

    def allocate(self, size):
        pointer = ctypes.c_uint64()
        result = self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return result, pointer

    def fill(self, pointer, size):
        return self.call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(1), ctypes.c_size_t(size))

    def synchronize(self):
        return self.call("cuCtxSynchronize")

    def load_kernels(self):
        module = ctypes.c_void_p()
        result = 0
        for target in PTX_TARGETS:
            result = self.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(target + PTX))
            if result not in PTX_NOT_TAKEN:
                break
        if result:
            return result
        kernels = {}
        for name in (b"spin", b"oob"):
            handle = ctypes.c_void_p()
            result = self.call("cuModuleGetFunction", ctypes.byref(handle), module, ctypes.c_char_p(name))
            if result:
                return result
            kernels[name] = handle
        self.kernels = kernels
        return 0

    def launch(self, name, argument):
        """One thread of kernel `name` with one 64-bit argument, on the default stream."""
        result = 0 if self.kernels else self.load_kernels()
        if result:
            return result
        value = ctypes.c_uint64(argument)
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(value))
        one = ctypes.c_uint(1)
        return self.call(
            "cuLaunchKernel",
            *(self.kernels[name], one, one, one, one, one, one, ctypes.c_uint(0), ctypes.c_void_p()),
            *(parameters, ctypes.c_void_p()),
        )


def launch_name(cuda, result):
    # The C probe used the runtime API here, whose success has another name.
    return cuda.name(result) if result else "cudaSuccess"


def until(seconds):
    """Sleep for `seconds`, even when a signal interrupts."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(left)


ENOUGH = []


def sleep(cuda, seconds):
    pointer = cuda.allocate(64 * MIB)[1]
    end = time.monotonic() + seconds
    iterations = last = 0
    while time.monotonic() < end and not ENOUGH:
        result = cuda.fill(pointer, MIB) or cuda.synchronize()
        if result != last:
            say("work now %s" % cuda.name(result))
            last = result
        iterations += 1
        time.sleep(0.05)
    say("done %d iterations, last %s" % (iterations, cuda.name(last)))
    return 14 if last else 0


def work(cuda, count):
    last = 0
    for _ in range(count):
        result = cuda.launch(b"spin", 10_000_000) or cuda.synchronize()
        if result != last:
            say("work now %s" % cuda.name(result))
            last = result
        if result:
            time.sleep(0.01)  # a broken context fails at once; keep the pace all the same
    say("done %d iterations, last %s" % (count, cuda.name(last)))
    return 14 if last else 0


def spin(cuda, seconds):
    start = time.monotonic()
    launched = cuda.launch(b"spin", int(seconds * 1e9))
    say("launch %s" % launch_name(cuda, launched))
    result = cuda.synchronize()
    say("sync %s after %.3f s" % (cuda.name(result), time.monotonic() - start))
    return 16 if launched or result else 0


def mind(cuda, seconds, goes_on):
    end = time.monotonic() + seconds
    count = last = 0
    said = 0.0
    while time.monotonic() < end and not ENOUGH:
        result = cuda.launch(b"spin", 5_000_000) or cuda.synchronize()
        count += 1
        if result != last:
            say("work now %s at %.4f" % (cuda.name(result), time.monotonic()))
            last = result
        if result and not goes_on:
            break
        if not result and time.monotonic() - said > 0.25:
            said = time.monotonic()
            say("step %d at %.4f" % (count, said))
        time.sleep(0.05)
    say("done %d iterations, last %s" % (count, cuda.name(last)))
    return 14 if last else 0


def duty(cuda, part, seconds):
    begun = time.monotonic()
    busy = last = 0
    while not last and (now := time.monotonic()) < begun + seconds:
        if part:
            last = cuda.launch(b"spin", int(part * 1e8)) or cuda.synchronize()
            busy += time.monotonic() - now
        until(0.1 - (time.monotonic() - begun) % 0.1)
    say("busy %.3f of %.3f s, last %s" % (busy, time.monotonic() - begun, cuda.name(last)))
    return 14 if last else 0


def fault(cuda, wait_for_the_word):
    """The times that it says are those of the clock that all processes share."""
    loaded = cuda.load_kernels()
    pointer = cuda.allocate(1024)[1]
    say("armed %s" % cuda.name(loaded))
    wait_for_the_word()
    launched = cuda.launch(b"oob", pointer.value)
    say("oob launch %s at %.4f" % (launch_name(cuda, launched), time.monotonic()))
    result = cuda.synchronize()
    say("oob sync %s at %.4f" % (cuda.name(result), time.monotonic()))
    return 17 if launched or result else 0


def contexts(cuda, device, number, seconds):
    count, result = 1, 0
    while count < number and not result:
        result = cuda.another_context(device)
        count += not result

    def one_for_another(*_):
        results = [cuda.everywhere()]
        results[0] = results[0] or cuda.call("cuCtxDestroy_v2", cuda.contexts.pop())
        results += [cuda.another_context(device), cuda.everywhere()]
        say("works everywhere %s, another ctx %s, works %s" % tuple(map(cuda.name, results)))

    import _signal

    _signal.signal(_signal.SIGUSR1, one_for_another)
    say("made %d contexts, last %s" % (count, cuda.name(result)))
    until(seconds)
    return 12 if result else 0


def out_of_bounds(cuda, seconds):
    # Before the pause, so that compiling the kernel does not delay the fault.
    cuda.load_kernels()
    until(seconds)
    pointer = cuda.allocate(1024)[1]
    launched = cuda.launch(b"oob", pointer.value)
    say("oob launch %s" % launch_name(cuda, launched))
    result = cuda.synchronize()
    say("oob sync %s" % cuda.name(result))
    return 17 if launched or result else 0


def main(arguments):
    import _signal  # the C module itself: `signal` brings enum with it, and that costs milliseconds

    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)  # Ctrl-C ends it at once, like a program in C
    if "--ignore-term" in arguments:
        _signal.signal(_signal.SIGTERM, _signal.SIG_IGN)
        arguments = [argument for argument in arguments if argument != "--ignore-term"]
    mode = arguments[0] if arguments else "query"
    if mode in ("sleep", "mind"):
        _signal.signal(_signal.SIGUSR1, lambda *_: ENOUGH.append(True))
    if mode == "fault":  # before the driver has threads of its own that could get it
        _signal.pthread_sigmask(_signal.SIG_BLOCK, [_signal.SIGUSR1])
    try:
        first = float(arguments[1]) if len(arguments) > 1 else 0.0
        second = float(arguments[2]) if len(arguments) > 2 else 0.0
    except ValueError:
        say("arguments must be numbers: %s" % " ".join(arguments[1:]))
        return 99

    try:
        cuda = Driver()
    except OSError as error:
        say(str(error))
        return 98
    result = cuda.call("cuInit", ctypes.c_uint(0))
    say("cuInit %s" % cuda.name(result))
    if result:
        return 10
    if mode == "init":
        until(first)
        return 0
    result, device = cuda.device(int(os.environ.get("DEV", "0")))
    if result:
        say("cuDeviceGet %s" % cuda.name(result))
        return 11
    result = cuda.primary_context(device)
    say("ctx %s" % cuda.name(result))
    if result:
        return 12
    multiprocessors = cuda.multiprocessors(device)
    result, free, total = cuda.memory()
    say("devices %d using %s" % (cuda.device_count(), cuda.uuid_start(device)))
    say("sms %d meminfo %s free %d MiB total %d MiB" % (multiprocessors, cuda.name(result), free // MIB, total // MIB))

    if os.environ.get("SAY_MPS"):
        result, enabled = cuda.attribute(MPS_ENABLED, device)
        if not result:
            say("mps %s" % ("yes" if enabled else "no"))

    if mode == "query":
        return 0
    if mode == "alloc":
        result = cuda.allocate(int(first * MIB))[0]
        say("cuMemAlloc %.0f MiB: %s" % (first, cuda.name(result)))
        until(int(second))
        return 13 if result else 0
    if mode == "two":
        result = cuda.another_context(device)
        say("second ctx %s" % cuda.name(result))
        until(first)
        return 12 if result else 0
    if mode == "contexts":
        return contexts(cuda, device, int(first), second)
    if mode == "leave":
        if os.fork():
            os._exit(0)
        os.setsid()  # else the number stays taken
        until(first)
        os._exit(0)
    if mode == "sleep":
        return sleep(cuda, first)
    if mode == "work":
        return work(cuda, int(first))
    if mode == "spin":
        return spin(cuda, first)
    if mode == "duty":
        return duty(cuda, first, second)
    if mode == "mind":
        return mind(cuda, first, bool(second))
    if mode == "fault":
        return fault(cuda, lambda: _signal.sigwait([_signal.SIGUSR1]))
    if mode == "oob":
        return out_of_bounds(cuda, first)
    return 99


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
