#!/usr/bin/env python3
"""A question to real MPS: what can be seen of a process that came through another process of its user, and when?

    relayed_clients.py [--out DIR] [--only relay,crowd] [--sim]

Root, and a GPU with a driver that knows --multiuser-server; less than two minutes. Behind gate and agent, each part a
timeline: every new line of server.log and control.log, every change of `get_client_list`, of NVML's lists and of the
agent's own list of clients, with the seconds since the part began.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from campaigns.begin import parser, place
from mpsagent.sim import registry
from tests.conformance import rig as rigs
from tests.scenes.stage import A, Agent, B, Client, Machine, Stage

PROGRAMS = Path(__file__).resolve().parents[1] / "tests/conformance"
POLICY = f'[limits]\nthreads = 30\nmemory = "10G"\n[user.{A}]\nmax_clients = 3\nthreads = 20\nmemory = "8G"\n'


class Part:
    """One stage, its observers and what they saw."""

    def __init__(self, name: str, backend: rigs.Backend, machine: Machine, base: Path, server: str) -> None:
        self.name, self.sim = name, backend.name == "sim"
        self.rows: list[tuple[float, str, str]] = []
        self.over = threading.Event()
        self.stage = Stage(backend, base / name, machine, quick=self.sim)
        sharing = "together" if server == "shared" else "turns"
        self.agent: Agent = self.stage.with_agent(POLICY, server=server, extra=f'sharing = "{sharing}"')
        self.pipe = next((self.stage.place / "run").glob("instances/*/pipe"))
        place = base / name / "of-a-user"
        place.mkdir()
        os.chown(place, A, A)
        self.place = place
        self.program = place / "user_relay.py"
        for program in ("user_relay.py", "cuda_client.py"):
            shutil.copy(PROGRAMS / program, place / program)
            (place / program).chmod(0o644)
        self.python = rigs.other_users_python(A)
        self.since = time.monotonic()
        watchers: list[Callable[[], None]] = [self.logs, self.lists, self.listed, self.nvml]
        self.threads = [threading.Thread(target=self.guarded, args=(one,), daemon=True) for one in watchers]

    def guarded(self, watch: Callable[[], None]) -> None:
        try:
            watch()
        except Exception:
            self.row("WATCHER", f"{watch.__name__} ended: {traceback.format_exc()[-400:]}")

    def row(self, source: str, text: str) -> None:
        self.rows.append((time.monotonic() - self.since, source, text))

    # what is watched

    def logs(self) -> None:
        followed = {name: self.stage.rig.log / f"{name}.log" for name in ("server", "control")}
        at = {name: path.stat().st_size if path.exists() else 0 for name, path in followed.items()}
        while not self.over.wait(0.001):
            for name, path in followed.items():
                with contextlib.suppress(OSError), path.open("rb") as file:
                    file.seek(at[name])
                    data = file.read()
                    whole = data[: data.rfind(b"\n") + 1]
                    at[name] += len(whole)
                    for line in whole.decode(errors="replace").splitlines():
                        if name == "server" or re.search(
                            r"CLIENT|SERVER|Server [0-9]|[Tt]ermin|Cmd:shut|Starting", line
                        ):
                            self.row(f"{name}.log", line)

    def command(self, text: str, timeout: float = 8.0) -> str:
        environment = {**self.stage.rig.environment(), "CUDA_MPS_PIPE_DIRECTORY": str(self.pipe)}
        started = self.stage.rig.run([self.stage.backend.control], stdin=text.encode() + b"\n", env=environment)
        began = time.monotonic()
        if not rigs.exited(started.process, timeout):
            started.process.kill()
            return f"NO ANSWER in {timeout} s"
        took = time.monotonic() - began
        return f"{' '.join(started.read().split())}" + (f" (after {took:.2f} s)" if took > 0.1 else "")

    def servers(self) -> list[str]:
        return [word for word in self.command("get_server_list").split() if word.isdigit()]

    def lists(self) -> None:
        last = ""
        while not self.over.wait(0.02):
            found = {server: self.command(f"get_client_list {server}") for server in self.servers()}
            now = str(found)
            if now != last:
                self.row("get_client_list", now)
                self.row("ps", self.command("ps"))
                self.row("sockets", self.sockets([int(one) for one in found]))
                last = now

    def sockets(self, servers: list[int]) -> str:
        """Who shares how many sockets with a server, and who has NVIDIA's devices open."""
        pairs, theirs = peers(), {server: descriptors(server)[0] for server in servers}
        rows = []
        for one in self.stage.rig.ours():
            sockets, devices = descriptors(one.pid)
            shared = {server: len({pairs.get(inode) for inode in sockets} & of) for server, of in theirs.items()}
            if (any(shared.values()) or devices) and one.pid not in servers:
                rows.append(f"{one.pid} uid {one.uid} {shared} {devices} {one.arguments[-30:]}")
        return "; ".join(rows)

    def listed(self) -> None:
        last = ""
        while not self.over.wait(0.05):
            with contextlib.suppress(OSError, http.client.HTTPException, KeyError, ValueError):
                rows = self.agent.api.get("/v1/clients")["clients"]
                now = str([(one["pid"], one["uid"], one["state"]) for one in rows])
                now += f" healthz {self.agent.api.problems()}"
                if now != last:
                    self.row("agent", now)
                    last = now

    def nvml(self) -> None:
        last = ""
        ask = self.simulated if self.sim else real_nvml()
        while not self.over.wait(0.03):
            now = ask()
            if now != last:
                self.row("NVML", now)
                last = now

    def simulated(self) -> str:
        return str(registry.processes(0))

    # what is done

    def user(self, *arguments: object, uid: int = A) -> Client:
        """user_relay.py as a client of the stage."""
        command = [self.python, "-S", "-E", str(self.program), *map(str, arguments)]
        started = self.stage.rig.run(command, uid=uid, env=self.stage.rig.environment())
        return Client(self.stage, self.stage.rig._client(started, uid, (str(arguments[0]),), None), uid)

    def relay(self) -> Client:
        found = self.user("relay", self.place, self.stage.rig.pipe / "control")
        found.saw("listens")
        self.row("do", f"relay {found.pid}")
        return found

    def through(self, mode: str, *arguments: float) -> Client:
        found = self.stage.client(A, mode, *arguments, CUDA_MPS_PIPE_DIRECTORY=str(self.place), SAY_MPS="1")
        self.row("do", f"client {found.pid} through the relay: {mode} {arguments}")
        return found

    def said(self, *clients: Client) -> None:
        for client in clients:
            errors = client.started.err.read_text(errors="replace")[-300:]
            self.row("said", f"{client.pid} rc {client.rc}: {client.text()[-700:]} {errors}")

    def terminate(self, pid: int) -> None:
        for server in self.servers():
            self.row("do", f"terminate_client {server} {pid}: {self.command(f'terminate_client {server} {pid}')}")

    def play(self, script: Callable[[Part], None]) -> None:
        for thread in self.threads:
            thread.start()
        try:
            time.sleep(0.2)
            script(self)
            time.sleep(0.7)
        except Exception:
            self.row("BROKEN OFF", traceback.format_exc()[-1500:])
        self.over.set()
        for thread in self.threads:
            thread.join(10)
        self.row("agent log", self.agent.log()[-1500:])

    def text(self) -> str:
        lines = [f"==================== {self.name}"]
        lines += [f"[{at:7.3f}] {source:16}| {text}" for at, source, text in sorted(self.rows, key=lambda row: row[0])]
        return "\n".join(lines) + "\n"


def real_nvml() -> Callable[[], str]:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def ask() -> str:
        lists = (
            ("compute", pynvml.nvmlDeviceGetComputeRunningProcesses),
            ("mps", pynvml.nvmlDeviceGetMPSComputeRunningProcesses),
        )
        return "; ".join(
            f"{name} " + str(sorted((one.pid, (one.usedGpuMemory or 0) >> 20) for one in ask(handle)))
            for name, ask in lists
        )

    return ask


def peers() -> dict[int, int]:
    """By inode: the socket at the other end, for every Unix socket (NETLINK_SOCK_DIAG)."""
    found: dict[int, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as ask:
        ask.settimeout(2)
        body = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, 4, 0xFFFFFFFF, 0xFFFFFFFF)
        ask.send(struct.pack("=IHHII", 16 + len(body), 20, 0x301, 1, 0) + body)
        while True:
            data = ask.recv(1 << 18)
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind == 3 or length < 16:
                    return found
                (inode,) = struct.unpack_from("=I", data, 20)
                at = 32
                while kind == 20 and at + 8 <= length:
                    size, what = struct.unpack_from("=HH", data, at)
                    if what == 2:
                        (found[inode],) = struct.unpack_from("=I", data, at + 4)
                    at += max(4, (size + 3) & ~3)
                data = data[(length + 3) & ~3 :]


def descriptors(pid: int) -> tuple[set[int], list[str]]:
    """Inodes of its sockets, and its devices."""
    sockets, devices = set(), []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    sockets.add(int(target[8:-1]))
                elif target.startswith("/dev/nvidia"):
                    devices.append(target[5:])
    return sockets, sorted(set(devices))


# --- the parts --------------------------------------------------------------------------------------------------------


def relay(part: Part) -> None:
    """Two clients through one relay; then terminate_client of the first, SIGKILL of the relay, the second lives on?"""
    carrier = part.relay()
    first = part.through("mind", 30, 1)
    first.working(15)
    time.sleep(0.6)
    second = part.through("mind", 5, 1)
    second.working(15)
    part.row("do", f"through the gate itself: {part.stage.client(A, 'query').pid}")
    time.sleep(0.8)
    part.terminate(first.pid)
    time.sleep(0.5)
    part.said(first)
    first.kill()
    part.row("do", "SIGKILL of the relay")
    carrier.kill()
    time.sleep(1)
    part.said(second)
    second.finish()
    part.said(second)


def own(part: Part) -> None:
    """server = "own": her client through the relay, bob waits; what lists say of the server meanwhile."""
    carrier = part.relay()
    first = part.through("mind", 4, 1)
    first.working(15)
    time.sleep(0.5)
    other = part.stage.client(B, "query")
    part.row("do", f"bob's client {other.pid}")
    time.sleep(1)
    part.terminate(first.pid)
    first.kill()
    carrier.kill()
    part.row("do", "her client and relay have gone")
    other.ended(15)
    part.said(first, other)


def stopped(part: Part) -> None:
    """A relayed client that is stopped while it works, beside a neighbour; terminate_client after SIGCONT."""
    carrier = part.relay()
    first = part.through("mind", 20, 1)
    neighbour = part.stage.client(B, "mind", 8, 1)
    first.working(15)
    neighbour.working(15)
    first.signal(signal.SIGSTOP)
    part.row("do", "SIGSTOP")
    time.sleep(1)
    first.signal(signal.SIGCONT)
    part.row("do", "SIGCONT")
    part.terminate(first.pid)
    time.sleep(0.3)
    first.kill()
    neighbour.finish()
    part.said(first, neighbour)
    carrier.kill()


def crowd(part: Part) -> None:
    """Eight at once through one relay."""
    carrier = part.relay()
    clients = [part.through("sleep", 20) for _ in range(8)]
    for client in clients:
        client.working(20)
    time.sleep(0.5)
    for client in clients:
        client.finish()
    carrier.kill()


def passed(part: Part) -> None:
    """The descriptor goes to a sibling by SCM_RIGHTS, then to a child by fork; the bare handshake, no CUDA."""
    for what in ("passes", "forks"):
        one = part.user(what, part.stage.rig.pipe / "control", 1.5)
        part.row("do", f"{what}: {one.pid}")
        one.ended(20)
        part.said(one)
        time.sleep(0.3)


def leaves(part: Part) -> None:
    """A context, fork, the parent ends and the child keeps what it inherited: whom do MPS and NVML name?"""
    one = part.user("leaves", 3)
    part.row("do", f"leaves: {one.pid}")
    one.saw("child: fill", 12)
    part.row("sockets", part.sockets([int(server) for server in part.servers()]))
    one.saw("child ends", 12)
    time.sleep(0.5)
    part.said(one)


def namespace(part: Part) -> None:
    """A client in a pid namespace of its own, through the relay."""
    carrier = part.relay()
    found = part.stage.backend.client
    environment = part.stage.rig.environment({"CUDA_MPS_PIPE_DIRECTORY": str(part.place), "SAY_MPS": "1"})
    inner = shlex.join(["setpriv", "--reuid", str(A), "--regid", str(A), "--clear-groups", *found, "sleep", "3"])
    for options in ("-pf", "-pmf"):
        mount = "mount -t proc proc /proc && " if "m" in options else ""
        command = [shutil.which("unshare") or "/usr/bin/unshare", options, "sh", "-c", f"{mount}{inner}"]
        started = part.stage.rig.run(command, env=environment)
        part.row("do", f"unshare {options}: {started.process.pid}")
        time.sleep(1.5)
        part.row("processes", str([(one.pid, one.uid, one.arguments[-40:]) for one in part.stage.rig.ours()]))
        rigs.exited(started.process, 8)
        part.row("said", f"{started.read()[-600:]} {started.err.read_text(errors='replace')[-300:]}")
    carrier.kill()


PARTS: dict[str, tuple[Callable[[Part], None], str]] = {
    "relay": (relay, "shared"), "own": (own, "own"), "passed": (passed, "shared"), "leaves": (leaves, "shared"),
    "namespace": (namespace, "shared"), "stopped": (stopped, "shared"), "crowd": (crowd, "shared"),
}  # fmt: skip


def main() -> int:
    options = parser(__doc__, 115.0).parse_args()
    end = time.monotonic() + options.seconds
    texts: list[str] = []
    left: list[Any] = []
    with place(options.sim) as (backend, machine, base):
        for name, (script, server) in PARTS.items():
            if (options.only and name not in options.only) or time.monotonic() > end - 12:
                print(f"{name}: left out", flush=True)
                continue
            part = None
            try:
                part = Part(name, backend, machine, base, server)
                part.play(script)
                texts.append(part.text())
            except Exception:
                texts.append(f"==================== {name}\n{traceback.format_exc()[-3000:]}\n")
            finally:
                if part is not None:
                    part.stage.end()
                    left += part.stage.left
            print(texts[-1], flush=True)
            if options.out:
                Path(options.out, "relayed_clients.txt").write_text("\n".join(texts))
    print(f"left behind: {left}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
