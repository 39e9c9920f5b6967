#!/usr/bin/env python3
"""Boots a systemd of its own, installs the package in it and lives through a service's day (`make test-gpu-system`).

    system.py                     with the real MPS and GPU of this machine: root needed
    system.py --backend sim       with the simulator
    system.py --only limits,kill  these steps, or all whose name begins so (`install` and `enable` always)
    system.py --tree FILE         a packed root file system to boot (made by campaigns/system_tree.sh); without it
                                  .gpu/debian.tar.xz if that is there, otherwise this machine's own files
    system.py --package FILE      the .deb; without it .gpu/mpsagent.deb, otherwise one is built here
    system.py --out DIR           report.md, raw.json and logs go there ($OUT if that is set)

Nothing outside the booted machine is changed, and no setting of the GPU. Exit status: 0 all is well, 1 something is
not, 2 this machine cannot play.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mpsagent.mps.units import multiprocessors_for_percent
from tests.booted.machine import Machine, why_not
from tests.booted.package import build
from tests.booted.service import SIMULATED, agent_pid, api, until

ROOT = Path(__file__).resolve().parents[1]
DRIVER = Path("/usr/local/nvidia")
PROGRAMS = ("nvidia-cuda-mps-control", "nvidia-cuda-mps-server")
LIBRARIES = re.compile(r"lib(cuda|nvidia-[a-z-]+|nvcuvid)\.so[.0-9]*$")
CLIENT = "/opt/cuda-client"
ALICE, BOB = "2001", "2002"
GIB = 1 << 10
SHARES = {ALICE: (60, 6), BOB: (20, 3)}
POLICY = '[limits]\nactive_threads = "40%"\nmemory_limit = "4G"\n' + "".join(
    f'[user.{uid}]\nactive_threads = "{share}%"\nmemory_limit = "{size}G"\n' for uid, (share, size) in SHARES.items()
)
KILLS = 5


class Wrong(Exception):
    """What was found is not what was promised."""


def check(true: object, otherwise: str) -> None:
    if not true:
        raise Wrong(otherwise)


def driver() -> dict[str, str]:
    """Of this machine, by where it is to be inside: device nodes, NVIDIA's programs and libraries."""
    devices = [path for path in Path("/dev").glob("nvidia*") if path.is_char_device()]
    caps = [Path("/dev/nvidia-caps")] if Path("/dev/nvidia-caps").is_dir() else []
    seen = {str(path): str(path) for path in [*devices, *caps]}
    if DRIVER.is_dir():
        return {**seen, str(DRIVER): str(DRIVER)}
    for name in PROGRAMS:
        found = shutil.which(name)
        if found:
            seen[f"/usr/bin/{name}"] = str(Path(found).resolve())
    for line in subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout.splitlines():
        name, _, path = line.strip().partition(" (libc6,x86-64) => ")
        if path and LIBRARIES.match(name):
            real = Path(path).resolve()
            seen[f"/usr/lib/x86_64-linux-gnu/{name}"] = str(real)
    return seen


class Worker:
    """A CUDA client that works until its time is over."""

    def __init__(self, day: Day, user: str, seconds: float) -> None:
        self.user, self._day = user, day
        self._others = self._running()
        self._process = day.node.start(*day.client, "sleep", f"{seconds:g}", user=user)
        until("the worker works", self._served)

    def _served(self) -> bool:
        return bool(self._running() - self._others)

    def _running(self) -> set[int]:
        """The user's running clients; one of an earlier step may still be among them."""
        clients = api(self._day.node, "/v1/clients")["clients"]
        return {client["pid"] for client in clients if (client["uid"], client["state"]) == (int(self.user), "running")}

    def finish(self) -> None:
        said = self._process.communicate(timeout=90)[0]
        check(self._process.returncode == 0 and "last CUDA_SUCCESS" in said, f"a client was disturbed: {said}")
        self._day.judge(self.user, said)


class Day:
    """The steps, in order; each is a method whose name is the step's."""

    STEPS = (
        "install",
        "enable",
        "sandbox",
        "limits",
        "reload",
        "kill",
        "restart",
        "stop",
        "watchdog",
        "quit",
        "reboot",
        "purge",
    )

    def __init__(self, node: Machine, backend: str, package: Path) -> None:
        self.node, self.backend, self.package = node, backend, package
        self.client = (CLIENT,) if backend == "sim" else ("/usr/bin/python3", "-IS", CLIENT)
        self.shares = dict(SHARES)
        self.multiprocessors = 0
        self.figures: dict[str, Any] = {}

    # --- looking ------------------------------------------------------------------------------------------------------

    def wait_ready(self) -> None:
        until("healthy", lambda: api(self.node, "/healthz").get("ok"), 40)

    def servers(self) -> list[dict[str, Any]]:
        """As the API gives them, without names of users: an agent that has just started may not know them yet."""
        return [{**one, "user": None} for one in api(self.node, "/v1/servers")["servers"]]

    def judge(self, user: str, said: str) -> tuple[int, int]:
        found = re.search(r"\] sms (\d+) meminfo \w+ free (\d+) MiB", said)
        check(found, f"the client said nothing of its limits: {said}")
        assert found
        share, size = self.shares[user]
        right = multiprocessors_for_percent(share, self.multiprocessors)
        check(int(found[1]) == right, f"user {user} has {found[1]} multiprocessors, {right} would be right: {said}")
        check(int(found[2]) <= size * GIB, f"user {user} has {found[2]} MiB, not at most {size} GiB: {said}")
        return int(found[1]), int(found[2])

    def serve(self, user: str) -> tuple[int, int]:
        done = self.node.run(*self.client, "query", user=user, check=False)
        check(done.returncode == 0, f"a client of {user} failed: {done.stdout}{done.stderr}")
        return self.judge(user, done.stdout)

    def control(self) -> int:
        return int(self.node.show(self.instance(), "MainPID")["MainPID"])

    def instance(self) -> str:
        units = self.node.systemctl("list-units", "--plain", "--no-legend", "--all", "mpsagent-control@*")
        check(units, "there is no unit for the control daemon")
        return units.split()[0]

    # --- the day ------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """The package installs and enables nothing."""
        node = self.node
        shutil.copyfile(self.package, node.path("/root/mpsagent.deb"))
        node.run("dpkg", "--install", "/root/mpsagent.deb", timeout=120)
        check(node.systemctl("is-enabled", "mpsagent.service", check=False) == "disabled", "it was enabled")
        if self.backend == "sim":
            node.run("mpsagent-sim", "install", SIMULATED)
            node.run("ln", "-sf", f"{SIMULATED}/nvidia-cuda-mps-control", "/usr/bin/nvidia-cuda-mps-control")
            node.run("ln", "-sf", f"{SIMULATED}/cuda-client", CLIENT)
            start = f"ExecStart=/usr/bin/mpsagent run --supervise systemd --devices {SIMULATED}/devices.json"
            node.write("/etc/systemd/system/mpsagent.service.d/test.conf", f"[Service]\nExecStart=\n{start}\n")
        else:
            node.write(CLIENT, (ROOT / "tests/conformance/cuda_client.py").read_text(), 0o755)
            if DRIVER.is_dir():
                places = [path for name in ("lib64", "lib") if (path := DRIVER / name).is_dir()]
                node.write("/etc/ld.so.conf.d/nvidia.conf", "".join(f"{path}\n" for path in places))
                for name in PROGRAMS:
                    node.run("ln", "-sf", str(DRIVER / "bin" / name), f"/usr/bin/{name}")
            node.run("ldconfig")
            libraries = node.run("ldconfig", "-p").stdout
            for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
                check(name in libraries, f"{name} is not in the loader's cache")

        outside = {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/nowhere"}
        said = node.run(*self.client, "query", environment=outside, check=False).stdout
        found = re.search(r"\] sms (\d+) ", said)
        check(found, f"a client outside MPS does not work in here: {said}")
        assert found
        self.multiprocessors = int(found[1])
        self.figures["multiprocessors outside MPS"] = self.multiprocessors

    def enable(self) -> None:
        """`systemctl enable --now`, and the first user's first client has its limits."""
        for user, name in ((ALICE, "alice"), (BOB, "bob")):
            self.node.run("useradd", "--uid", user, "--no-create-home", name)
        self.node.write("/etc/mpsagent/policy.d/10-test.toml", POLICY)
        self.node.systemctl("daemon-reload")
        since = time.monotonic()
        self.node.systemctl("enable", "--now", "mpsagent.socket", "mpsagent.service")
        self.figures["enable --now returned after"] = f"{time.monotonic() - since:.2f} s"
        self.figures["the first client of all"] = self.serve(BOB)
        self.wait_ready()
        self.figures["status"] = self.node.run("mpsagent-cli", "status", check=False).stdout

    def sandbox(self) -> None:
        """The agent works inside its sandbox: the GPUs are found by NVML and libcuda through the devices it may use."""
        said = self.node.journal("-u", "mpsagent.service")
        for bad in ("Permission denied", "Operation not permitted", "EPERM", "EACCES"):
            lines = [line for line in said.splitlines() if bad in line]
            check(not lines, f"the journal says {lines[:3]}")
        shown = self.node.systemctl("show", "mpsagent.service", "--property=DevicePolicy", "--property=DeviceAllow")
        self.figures["device policy"] = ", ".join(shown.splitlines())
        if self.backend == "real":
            closed = ("systemd-run", "--quiet", "--wait", "--property=DevicePolicy=closed")
            done = self.node.run(*closed, "/bin/sh", "-c", ": </dev/nvidiactl", check=False)
            self.figures["without DeviceAllow= the device is closed here"] = "yes" if done.returncode else "NO"
            file = self.node.path("/var/lib/mpsagent/devices.json")
            until("the GPUs are known", file.exists)
            found = file.read_text()
            self.figures["devices found"] = json.loads(found)
            check(f'"multiprocessors": {self.multiprocessors}' in found, f"not what libcuda says: {found}")
        health = api(self.node, "/healthz")
        check(health["ok"], f"there is trouble: {health['problems']}")

    def limits(self) -> None:
        """Two users take turns; each gets exactly the policy's share, also as the first."""
        for user in (ALICE, BOB, ALICE, ALICE, BOB, BOB, ALICE, BOB):
            self.figures[f"user {user}"] = self.serve(user)

    def reload(self) -> None:
        """A good policy takes hold, a bad one is refused with a reason and changes nothing."""
        node = self.node
        node.write("/etc/mpsagent/policy.d/20-new.toml", f"[user.{BOB}]\nactive_threads = '30%'\n")
        node.systemctl("reload", "mpsagent.service")
        self.shares[BOB] = (30, self.shares[BOB][1])
        self.figures["after reload"] = self.serve(BOB)
        node.write("/etc/mpsagent/policy.d/20-new.toml", f"[user.{BOB}]\nthreds = 90\n")
        refused = node.run("systemctl", "reload", "mpsagent.service", check=False)
        check(refused.returncode != 0, "reloading a bad policy succeeded")
        check("threds" in node.journal("-u", "mpsagent.service"), "the journal does not say what is wrong")
        self.serve(BOB)
        node.path("/etc/mpsagent/policy.d/20-new.toml").unlink()
        node.systemctl("reload", "mpsagent.service")
        self.shares = dict(SHARES)
        self.wait_ready()

    def kill(self) -> None:
        """SIGKILL of the agent, again and again: CUDA work goes on, requests wait, the state is as before."""
        worker, before = Worker(self, ALICE, 4 + 3 * KILLS), self.servers()
        gaps = []
        for _ in range(KILLS):
            pid = agent_pid(self.node)
            self.node.run("kill", "-KILL", pid)
            since = time.monotonic()
            after = self.servers()
            check(after == before, f"another state after the restart:\n{before}\n{after}")
            gaps.append(round(time.monotonic() - since, 2))
            until("another agent", lambda pid=pid: agent_pid(self.node) not in ("0", pid))
        self.figures["seconds from SIGKILL to an answer"] = gaps
        worker.finish()
        self.serve(BOB)

    def restart(self) -> None:
        """`systemctl restart` under a stream of requests: each is answered, none refused."""
        worker = Worker(self, ALICE, 12)
        end, took, refused = threading.Event(), [], []

        def ask() -> None:
            while not end.is_set():
                since = time.monotonic()
                try:
                    api(self.node, "/v1/status", again=0)
                    took.append(time.monotonic() - since)
                except Exception as error:
                    refused.append(repr(error))
                time.sleep(0.01)

        asking = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
        for thread in asking:
            thread.start()
        for _ in range(3):
            self.node.systemctl("restart", "mpsagent.service")
        end.set()
        for thread in asking:
            thread.join(30)
        check(not refused, f"{len(refused)} requests were refused, such as {refused[:1]}")
        self.figures["requests during three restarts"] = len(took)
        self.figures["longest wait for an answer"] = f"{max(took):.2f} s"
        worker.finish()
        self.serve(BOB)

    def stop(self) -> None:
        """Stopping the agent leaves MPS running, and the next one takes it over."""
        worker, before = Worker(self, ALICE, 8), self.control()
        self.node.systemctl("stop", "mpsagent.socket", "mpsagent.service")
        check(self.node.run("mpsagent-cli", "status", check=False).returncode == 3, "something still answers")
        check(self.control() == before, "another control daemon")
        self.node.systemctl("start", "mpsagent.socket", "mpsagent.service")
        check(self.control() == before, "another control daemon after the start")
        worker.finish()
        self.serve(BOB)

    def watchdog(self) -> None:
        """A stopped agent is replaced by systemd; nobody's work notices."""
        worker, pid = Worker(self, ALICE, 25), agent_pid(self.node)
        self.node.run("kill", "-STOP", pid)
        since = time.monotonic()
        check(api(self.node, "/v1/status", 40), "no answer")
        self.figures["from SIGSTOP to an answer"] = f"{time.monotonic() - since:.1f} s"
        until("another agent", lambda: agent_pid(self.node) not in ("0", pid))
        worker.finish()
        self.serve(BOB)

    def quit(self) -> None:
        """Stopping the control daemon's unit asks it to quit; the agent starts it again and serves as before."""
        unit, before = self.instance(), self.control()
        self.node.systemctl("stop", "mpsagent.service", "mpsagent.socket")
        since = time.monotonic()
        self.node.systemctl("stop", unit)
        self.figures["the unit stopped after"] = f"{time.monotonic() - since:.2f} s"
        state = self.node.show(unit, "ActiveState", "Result", "ExecMainCode", "ExecMainStatus")
        self.figures["the unit's end"] = state
        check(state["ActiveState"] == "inactive" and state["Result"] == "success", f"it did not end well: {state}")
        log = self.node.path("/var/log/nvidia-mps/control.log").read_text(errors="replace").splitlines()
        self.figures["the daemon's last words"] = [line[-120:] for line in log[-4:]]
        check(any("quit" in line.lower() or "xit" in line for line in log[-6:]), "control.log says nothing of quit")
        self.node.systemctl("start", "mpsagent.socket", "mpsagent.service")
        self.wait_ready()
        check(self.control() != before, "the same control daemon")
        self.serve(ALICE)

    def reboot(self) -> None:
        """Enabled means enabled: after a reboot the first client has its limits."""
        since = time.monotonic()
        self.node.reboot(90)
        if self.backend == "real":
            self.node.run("ldconfig")
        self.wait_ready()
        self.figures["from reboot to healthy"] = f"{time.monotonic() - since:.1f} s"
        self.serve(BOB)
        self.serve(ALICE)
        state = self.node.systemctl("is-system-running", check=False)
        check(state == "running", f"{state}: {self.node.systemctl('--failed')}")

    def purge(self) -> None:
        """Nothing is left, no process and no file."""
        self.node.run("dpkg", "--purge", "mpsagent", timeout=120)
        left = self.node.run("ps", "-eo", "args").stdout
        check("nvidia-cuda-mps" not in left and "mpsagent run" not in left, f"processes are left: {left}")
        for place in (
            "/etc/mpsagent",
            "/var/lib/mpsagent",
            "/run/mpsagent",
            "/var/log/nvidia-mps",
            "/usr/lib/mpsagent",
        ):
            check(not self.node.path(place).exists(), f"{place} is left")


def play(day: Day, names: list[str], keep: Callable[[], None]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in names:
        since, day.figures, problem = time.monotonic(), {}, ""
        try:
            getattr(day, name)()
        except (Wrong, AssertionError) as error:
            problem = str(error)
        except Exception:
            problem = traceback.format_exc()
        title = " ".join((getattr(day, name).__doc__ or "").split())
        row = {"name": name, "title": title, "problem": problem, "figures": day.figures}
        rows.append({**row, "seconds": round(time.monotonic() - since, 1)})
        print(
            f"{'well ' if not problem else 'WRONG'} {name:9} {rows[-1]['seconds']:6.1f} s  {problem[:1500]}", flush=True
        )
        keep()
        if problem and name in ("install", "enable"):
            break
    return rows


def report(about: dict[str, str], rows: list[dict[str, Any]]) -> str:
    lines = ["# A service's day", "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    lines += ["| step | well | what | seconds |", "|---|---|---|---|"]
    lines += [f"| {r['name']} | {'NO' if r['problem'] else 'yes'} | {r['title']} | {r['seconds']} |" for r in rows]
    for row in rows:
        lines += ["", f"## {row['name']}", ""]
        for key, value in row["figures"].items():
            many = isinstance(value, str) and "\n" in value
            lines += (
                [f"- {key}:", "", *(f"      {line}" for line in value.splitlines()), ""]
                if many
                else [f"- {key}: {value}"]
            )
        if row["problem"]:
            lines += ["", "WRONG:", "", *(f"    {line}" for line in row["problem"].splitlines())]
    return "\n".join(lines) + "\n"


def package_here() -> Path:
    carried = ROOT / ".gpu/mpsagent.deb"
    if carried.exists():
        return carried
    return build()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("sim", "real"), default="real")
    parser.add_argument("--only", default="")
    parser.add_argument("--tree", type=Path)
    parser.add_argument("--package", type=Path)
    parser.add_argument("--out", type=Path, default=Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    options = parser.parse_args()
    carried = ROOT / ".gpu/debian.tar.xz"
    tree = options.tree or (carried if carried.exists() else None)
    reason = why_not(own_systemd=tree is None)
    seen = driver() if options.backend == "real" else {}
    if not reason and options.backend == "real" and not Path("/dev/nvidiactl").exists():
        reason = "no NVIDIA driver: /dev/nvidiactl is missing (--backend sim plays on the simulator)"
    if reason:
        print(f"cannot play here: {reason}", file=sys.stderr)
        return 2
    only = [name.strip() for name in options.only.split(",") if name.strip()]
    always = ("install", "enable")
    names = [one for one in Day.STEPS if not only or one in always or any(one.startswith(name) for name in only)]
    about = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "MPS": "NVIDIA's" if options.backend == "real" else "SIMULATED (mpsagent-sim)",
        "machine": f"{platform.platform()}, {os.cpu_count()} CPUs",
        "booted": "this machine's own files" if tree is None else "a packed Debian",
    }
    place = Path(tempfile.mkdtemp(prefix="mpsday", dir="/tmp"))
    rows: list[dict[str, Any]] = []
    node = Machine(place / "machine", tree, seen)
    try:
        node.boot(60)
        about["systemd"] = node.run("systemctl", "--version").stdout.splitlines()[0]
        about["python"] = node.run("/usr/bin/python3", "--version").stdout.strip()
        for path in ("/proc/driver/nvidia/version", "/sys/module/nvidia/version"):
            if options.backend == "real" and Path(path).exists():
                about["driver"] = Path(path).read_text().splitlines()[0]
                break
        rows = play(
            Day(node, options.backend, options.package or package_here()), names, lambda: keep(node, options.out)
        )
    except Exception:
        rows.append({"name": "boot", "title": "", "problem": traceback.format_exc(), "figures": {}, "seconds": 0})
        print(rows[-1]["problem"], file=sys.stderr)
    finally:
        keep(node, options.out)
        text = report(about, rows)
        if options.out is not None:
            (options.out / "report.md").write_text(text)
            (options.out / "raw.json").write_text(json.dumps({"about": about, "steps": rows}, indent=1, default=str))
        node.end()
        shutil.rmtree(place, ignore_errors=True)
    print(text)
    return 1 if any(row["problem"] for row in rows) else 0


def keep(node: Machine, out: Path | None) -> None:
    """The logs as they are now; a step may be the last, and purge takes them away."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    for name in ("control.log", "server.log"):
        try:
            text = node.path(f"/var/log/nvidia-mps/{name}").read_bytes()
            (out / name).write_bytes(text[-4 << 20 :])
        except OSError:
            continue
    try:
        journal = node.run("journalctl", "--no-pager", "-o", "short-precise", check=False).stdout
        (out / f"journal-{node.pid1}.txt").write_text(journal[-(4 << 20) :])
        shutil.copyfile(node.console, out / "console.txt")
    except (OSError, AssertionError, subprocess.SubprocessError):
        pass


if __name__ == "__main__":
    sys.exit(main())
