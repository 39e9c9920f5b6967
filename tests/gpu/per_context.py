#!/usr/bin/env python3
"""What a client's own environment may ask of MPS, beside the limit of its server: `per_context.py [limits] [written]
[beyond]`.

CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING: on how many multiprocessors do the blocks of a kernel run
(%smid), when the context is a plain one or asks for a number of its own (cuCtxCreate_v3)? Does a user get beyond the
server's limit that way? How are that variable and CUDA_MPS_ACTIVE_THREAD_PERCENTAGE read?

Root, the real MPS, a GPU; about 80 s; nothing is left. Prints a Markdown table for each.
"""

import ctypes
import json
import os
import sys
import time

PARTITIONING = "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING"
PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
LIMIT = 20
PERCENTAGES = (
    "5", "15", "20", "20.04", "20.1", "21", "25", "40", "50", "60", "75", "90", "99", "99.9", "100", "100.0",
    "0", "0.04", "0.5", "010", "10x", "1e1", "150", "", "-5", " 10", "+10", "10.", "x",
)  # fmt: skip
SWITCHES = ("0", "", "2", "yes", "no", "01", " 1", "true")
BLOCKS, THREADS = 4096, 64
PTX = b""".version 7.0
.target sm_70
.address_size 64
.visible .entry seen(.param .u64 seen_at, .param .u64 seen_ns)
{
    .reg .pred %p<2>;
    .reg .b32 %r<3>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [seen_at];
    ld.param.u64 %rd2, [seen_ns];
    cvta.to.global.u64 %rd1, %rd1;
    mov.u32 %r1, %smid;
    mul.wide.u32 %rd3, %r1, 4;
    add.s64 %rd4, %rd1, %rd3;
    mov.u32 %r2, 1;
    st.global.u32 [%rd4], %r2;
    mov.u64 %rd5, %globaltimer;
AGAIN:
    mov.u64 %rd6, %globaltimer;
    sub.s64 %rd7, %rd6, %rd5;
    setp.lt.s64 %p1, %rd7, %rd2;
    @%p1 bra AGAIN;
    ret;
}
"""


class Affinity(ctypes.Structure):
    """CUexecAffinityParam; type 0 is a number of multiprocessors."""

    _fields_ = (("type", ctypes.c_int), ("count", ctypes.c_uint))


def client(asked, seconds):
    """In a process of the user's: one line of JSON."""
    from cuda_client import Driver

    cuda, context, device = Driver(), ctypes.c_void_p(), ctypes.c_int()
    cuda.call("cuInit", 0)
    cuda.call("cuDeviceGet", ctypes.byref(device), 0)
    if asked:
        wanted = Affinity(0, asked)
        result = cuda.call("cuCtxCreate_v3", ctypes.byref(context), ctypes.byref(wanted), 1, 0, device)
    else:
        result = cuda.call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
    said = {"attribute": cuda.multiprocessors(device), "context": cuda.name(result)}
    if result == 0:
        got = Affinity()
        if cuda.call("cuCtxGetExecAffinity", ctypes.byref(got), 0) == 0:
            said["affinity"] = got.count
        module, kernel, memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
        cuda.call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(PTX))
        cuda.call("cuModuleGetFunction", ctypes.byref(kernel), module, b"seen")
        cuda.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(4096))
        cuda.call("cuMemsetD32_v2", memory, 0, ctypes.c_size_t(1024))
        spin = ctypes.c_uint64(100_000)
        pointers = (ctypes.c_void_p * 2)(*(ctypes.cast(ctypes.byref(one), ctypes.c_void_p) for one in (memory, spin)))
        steps, end = 0, time.monotonic() + seconds
        while not steps or time.monotonic() < end:
            cuda.call("cuLaunchKernel", kernel, BLOCKS, 1, 1, THREADS, 1, 1, 0, None, pointers, None)
            result = cuda.call("cuCtxSynchronize")
            steps += 1
        seen = (ctypes.c_uint32 * 1024)()
        cuda.call("cuMemcpyDtoH_v2", seen, memory, ctypes.c_size_t(4096))
        said.update(steps=steps, last=cuda.name(result), multiprocessors=sum(map(bool, seen)))
    print(json.dumps(said), flush=True)


def main():
    import subprocess
    import tempfile
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.conformance import rig as rigs

    def start(rig, number, asked, seconds, environment):
        command = [*backend.client[:-1], str(base / "per_context.py"), "client", str(asked), str(seconds)]
        user = rigs.USERS[number]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, user=user, group=user,
                                extra_groups=[], cwd="/", env=rig.environment(environment))  # fmt: skip

    def said(process):
        text = process.communicate(timeout=60)[0].decode(errors="replace")
        return json.loads(text) if text.startswith("{") else {"context": text[-300:]}

    with tempfile.TemporaryDirectory(prefix="mpsc", dir="/tmp") as directory:
        base = Path(directory)
        base.chmod(0o755)
        backend = rigs.real_backend(base)
        (base / "per_context.py").write_bytes(Path(__file__).read_bytes())
        (base / "per_context.py").chmod(0o644)
        parts = sys.argv[1:] or ["limits", "written", "beyond"]

        def server(title, environment=None):
            rig = rigs.Rig(backend, base / title)
            rig.start("-d", env=environment)
            return rig

        def limit(rig, percent):
            """As the gate does before each hand-over."""
            for pid in rig.ctl("get_server_list").out.split():
                rig.ctl(f"set_active_thread_percentage {pid} {percent}")

        def row(environment, asked, first=()):
            got = said(start(rig, 0, asked, 0, environment))
            name = ", ".join(f"{key[9:]}={value}" for key, value in environment.items()) or "as it is"
            shown = [got.get(key, "") for key in ("context", "attribute", "affinity", "multiprocessors")]
            cells = [*first, name, asked or "nothing", *shown]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)

        if "limits" in parts:
            print(f"A server with {LIMIT} percent, set as the gate sets it\n")
            print("| the client's environment | asks for | its context | attribute | affinity | multiprocessors used |")
            print("|---|---|---|---|---|---|")
            rig = server("limits")
            try:
                rig.ctl(f"set_default_active_thread_percentage {LIMIT}")
                holder = rig.spawn(rigs.USERS[0], "sleep", 120)  # the server stays while it has a client
                rig.wait_output(holder, r"\] sms", 30)
                limit(rig, LIMIT)
                for environment in (
                    {}, {PERCENTAGE: "100"}, {PARTITIONING: "1"}, {PARTITIONING: "1", PERCENTAGE: "100"},
                    {PARTITIONING: "1", PERCENTAGE: "10"}, {PARTITIONING: "1", PERCENTAGE: str(LIMIT)},
                    {PARTITIONING: "1", PERCENTAGE: "50"},
                ):  # fmt: skip
                    for asked in (0, 8, 132):
                        row(environment, asked)
            finally:
                rig.end()
        if "written" in parts:
            print("\n| others there | its environment | asks for | its context | attribute | affinity | used |")
            print("|---|---|---|---|---|---|---|")
            for others in ("no", "yes"):
                rig = server(f"written-{others}")
                try:
                    rig.ctl(f"set_default_active_thread_percentage {LIMIT}")
                    row({}, 0, ["no"])
                    if others == "yes":
                        holder = rig.spawn(rigs.USERS[0], "sleep", 200)
                        rig.wait_output(holder, r"\] sms", 30)
                    limit(rig, LIMIT)
                    for percentage in PERCENTAGES:
                        row({PARTITIONING: "1", PERCENTAGE: percentage}, 0, [others])
                    for switch in SWITCHES:
                        row({PARTITIONING: switch}, 0, [others])
                    row({}, 0, [others])
                finally:
                    rig.end()
        if "beyond" in parts:
            print(f"\nA plain context with {PARTITIONING[9:]}=1, the limit is {LIMIT} percent\n")
            print(
                "| before it | its environment | asks for | its context | attribute | affinity | multiprocessors used |"
            )
            print("|---|---|---|---|---|---|---|")
            asking = {PARTITIONING: "1"}
            rig = server("fresh")
            try:
                rig.ctl(f"set_default_active_thread_percentage {LIMIT}")
                for number in (1, 2):
                    row(asking, 0, [f"nobody, {number}"])
                for before in (60, 100, 10):
                    limit(rig, before)
                    other = rig.spawn(rigs.USERS[0], "sleep", 6)
                    rig.wait_output(other, r"\] sms", 30)
                    limit(rig, LIMIT)
                    row({}, 0, [f"one with {before} percent works"])
                    row(asking, 0, [f"one with {before} percent works"])
                    row(asking, 0, [f"one with {before} percent works, again"])
                    row({}, 8, [f"one with {before} percent works"])
                    row(asking, 0, [f"one with {before} percent works, one that asked for 8 has ended"])
                    rig.wait(other, 30)
            finally:
                rig.end()
            rig = server("environment", {PERCENTAGE: str(LIMIT)})
            try:
                for number in (1, 2):
                    row(asking, 0, [f"the daemon has {PERCENTAGE[9:]}={LIMIT}, {number}"])
            finally:
                rig.end()


if __name__ == "__main__":
    if sys.argv[1:2] == ["client"]:
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
        client(int(sys.argv[2]), float(sys.argv[3]))
    else:
        main()
