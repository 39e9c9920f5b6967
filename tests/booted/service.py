"""The agent as a service, seen from outside: its API, its units, and clients that notice when something goes wrong."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.booted.machine import Machine
from tests.policies import in_turns

SIMULATED = "/opt/simulated-mps"
CLIENT = f"{SIMULATED}/cuda-client"
OWN_LIBRARY = """
cd {place}
root=$(sed -n "s/^sys.path.insert(0, '\\(.*\\)')$/\\1/p" cuda-client)
mkdir lib
for one in mpsagent mpsagent_sim; do [ ! -d "$root/$one" ] || cp -r "$root/$one" lib/; done
sed -i "s|'$root'|'{place}/lib'|" cuda-client nvidia-cuda-mps-control
"""
"""The simulator is part of the package; a driver is there before the package and after it, and during an upgrade."""
ALICE, BOB = "2001", "2002"
SHARES = {ALICE: 60, BOB: 20}
MULTIPROCESSORS = 132
POLICY = "[limits]\nactive_threads = '40%'\n" + "".join(
    f'[user."{uid}"]\nactive_threads = "{share}%"\n' for uid, share in SHARES.items()
)


def until(what: str, true: Callable[[], object], timeout: float = 90) -> Any:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = true()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {timeout:g} s: {what}")


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, patience: float) -> None:
        super().__init__("mpsagent", timeout=patience)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def api(node: Machine, path: str, patience: float = 60, again: int = 2) -> Any:
    """From outside, as root. A request in the hands of an agent that is killed is lost; then it is asked `again`."""
    for _ in range(1 + again):
        connection = _Connection(str(node.path("/run/mpsagent/mpsagent.sock")), patience)
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        except (http.client.RemoteDisconnected, ConnectionResetError):
            continue
        finally:
            connection.close()
    raise AssertionError(f"the agent went away while it answered {path}, {1 + again} times in a row")


def ready(node: Machine) -> bool:
    """Healthy: gate, control daemon and agent are there and know of each other."""
    return node.run("mpsagent-cli", "status", check=False).returncode == 0


def installer(suffix: str) -> tuple[str, ...]:
    """Installs a package, over a newer one, too. Debian 12's rpm wants to be told that this is no system of its own;
    Debian 13's knows no such option."""
    if suffix == ".deb":
        return ("dpkg", "--install")
    known = subprocess.run(["rpm", "--force-debian", "--version"], capture_output=True, check=False)
    force = ("--force-debian",) if known.returncode == 0 else ()
    return ("rpm", *force, "--nodeps", "--upgrade", "--oldpackage")


def install(node: Machine, package: Path) -> None:
    """The package, and the simulator in the place of NVIDIA's programs; nothing is enabled."""
    copy = f"/root/mpsagent{package.suffix}"
    shutil.copyfile(package, node.path(copy))
    node.run(*installer(package.suffix), copy)
    node.run("mpsagent-sim", "install", SIMULATED)
    node.run("sh", "-ec", OWN_LIBRARY.format(place=SIMULATED))
    node.run("ln", "-s", f"{SIMULATED}/nvidia-cuda-mps-control", "/usr/bin/nvidia-cuda-mps-control")


def configure(node: Machine, words: Callable[[str], str] = str) -> None:
    """Write the policy; ``words``: of the edition that reads it. Users take turns, unless a part of the policy that is
    there already says otherwise."""
    node.write("/etc/mpsagent/policy.d/10-test.toml", words(POLICY))
    parts = [one for one in node.path("/etc/mpsagent/policy.d").glob("*.toml") if one.name != "11-way.toml"]
    node.write("/etc/mpsagent/policy.d/11-way.toml", words(in_turns("".join(part.read_text() for part in parts))))


def enable(node: Machine, wait: bool = True, words: Callable[[str], str] = str) -> None:
    """Configure and enable mpsagent as an administrator does. ``wait``: until it is healthy."""
    for user, name in ((ALICE, "alice"), (BOB, "bob")):
        node.run("useradd", "--uid", user, "--no-create-home", name)
    configure(node, words)
    # No GPU here, and no NVML to ask.
    node.write(
        "/etc/systemd/system/mpsagent.service.d/simulated.conf",
        "[Service]\nExecStart=\n"
        f"ExecStart=/usr/bin/mpsagent run --supervise systemd --devices {SIMULATED}/devices.json\n",
    )
    node.systemctl("daemon-reload")
    node.systemctl("enable", "--now", "mpsagent.socket", "mpsagent.service")
    if wait:
        until("ready for users", lambda: ready(node))


def agent_pid(node: Machine) -> str:
    return node.show("mpsagent.service", "MainPID")["MainPID"]


def multiprocessors(said: str) -> int:
    found = re.search(r"sms (\d+)", said)
    assert found, said
    return int(found[1])


def assert_served_exactly(node: Machine, user: str) -> None:
    """A first client of this user gets the user's share: not more, and not less for long."""
    said = node.run(CLIENT, "query", user=user).stdout
    assert multiprocessors(said) == MULTIPROCESSORS * SHARES[user] // 200 * 2


def until_it_computes(process: subprocess.Popen[str]) -> str:
    """What a client said until it had its context: MPS serves it for some tenths of a second before that."""
    said = ""
    while "] sms " not in said:
        line = process.stdout.readline() if process.stdout else ""
        assert line, said
        said += line
    return said


def enough(node: Machine, user: str) -> None:
    """Tells a user's clients that sleep to come to a good end."""
    node.run("pkill", "-USR1", "--uid", user, "-f", f"{CLIENT} sleep")


class Worker:
    """A CUDA client that works until it is told to stop, and says so when anything went wrong."""

    def __init__(self, node: Machine, user: str) -> None:
        self._node = node
        self._process = node.start(CLIENT, "sleep", "600", user=user)
        self.user = user
        self._said = until_it_computes(self._process)
        until("the worker works", lambda: self._served(node))

    def _served(self, node: Machine) -> bool:
        servers = [(server["uid"], server["status"]) for server in api(node, "/v1/servers")["servers"]]
        clients = [client["state"] for client in api(node, "/v1/clients")["clients"]]
        return servers == [(int(self.user), "ACTIVE")] and clients == ["running"]

    def finish(self) -> None:
        enough(self._node, self.user)
        said = self._said + self._process.communicate(timeout=60)[0]
        assert self._process.returncode == 0, said
        assert "last CUDA_SUCCESS" in said
        assert multiprocessors(said) == MULTIPROCESSORS * SHARES[self.user] // 200 * 2
