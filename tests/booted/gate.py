"""The gate as a service, seen from outside: what it holds, and what an agent would tell it."""

from __future__ import annotations

import socket
import subprocess

from mpsagent.mps.limits import Limits
from mpsagent.wire.codec import LONGEST_PACKET, encode
from mpsagent.wire.link import Admissions, FromGate, Knock, Synced, User, decode_from_gate
from tests.booted.machine import Machine
from tests.booted.service import CLIENT, until

PUBLIC = "/tmp/nvidia-mps"
HIDDEN = "/run/mpsagent/instances/default/pipe"
LOG = "/var/log/nvidia-mps"
CONTROL = "mpsagent-control@default.service"
GATE, SOCKETS = "mpsagent-gate.service", ("mpsagent-gate.socket", "mpsagent-gate-privileged.socket")


def start_gate(node: Machine) -> None:
    """Sockets and service."""
    node.systemctl("start", GATE)
    assert [node.systemctl("is-active", unit) for unit in (*SOCKETS, GATE)] == ["active"] * 3


def start_daemon(node: Machine, threads: float = 20.0) -> None:
    """What the agent does before it starts a control daemon (one server for all users), and its start."""
    node.run("/usr/lib/mpsagent/mpsagent-directories", "instance", "default")
    node.run("/usr/lib/mpsagent/mpsagent-directories", "log", LOG)
    variables = {
        "CUDA_MPS_PIPE_DIRECTORY": HIDDEN,
        "CUDA_MPS_LOG_DIRECTORY": LOG,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(threads),
        "MPSAGENT_CONTROL": "nvidia-cuda-mps-control",
        "MPSAGENT_CONTROL_OPTIONS": "--multiuser-server",
    }
    text = "".join(f'{name}="{value}"\n' for name, value in variables.items())
    node.write("/run/mpsagent/instance-default.env", text, 0o600)
    node.systemctl("start", CONTROL)


def gate_pid(node: Machine) -> str:
    return node.show(GATE, "MainPID")["MainPID"]


def _link(node: Machine) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(60)
    sock.connect(str(node.path("/run/mpsagent/gate.sock")))
    return sock


def said(node: Machine) -> list[FromGate]:
    """Everything that a new agent hears first."""
    messages: list[FromGate] = []
    with _link(node) as sock:
        while not messages or not isinstance(messages[-1], Synced):
            messages.append(decode_from_gate(sock.recv(LONGEST_PACKET)))
    return messages


def held(node: Machine) -> list[int]:
    """uids of the clients that are held, in order of arrival."""
    return [message.uid for message in said(node) if isinstance(message, Knock)]


def admit(node: Machine, **shares: float) -> None:
    """Lets users in, each with a thread percentage: ``admit(node, u2001=60)``. Nobody else."""
    users = {int(name[1:]): User(int(name[1:]), "all", Limits(share)) for name, share in shares.items()}
    with _link(node) as sock:
        sock.send(encode(Admissions(1, open=True, fail_safe=Limits(10.0), devices=(0,), users=users)))
        while not isinstance(decode_from_gate(sock.recv(LONGEST_PACKET)), Synced):
            pass


def waiting_client(node: Machine, user: str) -> subprocess.Popen[str]:
    """A CUDA client that is held at the gate from now on."""
    before = len(held(node))
    client = node.start(CLIENT, "query", user=user)
    until("the client is held", lambda: len(held(node)) == before + 1)
    return client
