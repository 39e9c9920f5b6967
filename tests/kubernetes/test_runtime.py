"""packaging/containers/mpsagent-runtime: what it asks of mpsagent; the runtime is called whatever becomes of that."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "packaging" / "containers" / "mpsagent-runtime"
ID = "3f2a1b4c5d6e7f80" * 4
CONTAINERD = ("--root", "/run/containerd/runc/k8s.io", "--log", "/run/log.json", "--log-format", "json")
END = ["terminate", "--cgroup"]


def called(place: Path, words: tuple[str, ...], settings: str = "") -> tuple[list[str] | None, list[str], int]:
    """What mpsagent-cli was asked, what the runtime was, and its exit status."""
    (place / "cli").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{place}/asked\n')
    (place / "runc").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{place}/done\nexit 7\n')
    for name in ("cli", "runc"):
        (place / name).chmod(0o755)
    (place / "conf").write_text(f"runtime={place}/runc\nclient={place}/cli\n{settings}\n")
    environment = {**os.environ, "MPSAGENT_CONTAINERS_SETTINGS": str(place / "conf")}
    done = subprocess.run(["sh", str(SCRIPT), *words], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", ""), "an engine reads what its runtime says"
    asked = (place / "asked").read_text().split() if (place / "asked").exists() else None
    return asked, (place / "done").read_text().split("\n")[:-1], done.returncode


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ((*CONTAINERD, "--systemd-cgroup", "kill", ID, "15"), [*END, f"*{ID}*", "--timeout", "10s"]),
        ((*CONTAINERD, "kill", "--all", ID, "9"), [*END, f"*{ID}*", "--now", "--timeout", "10s"]),
        (("kill", ID, "SIGTERM"), [*END, f"*{ID}*", "--timeout", "10s"]),
        (("kill", ID), [*END, f"*{ID}*", "--timeout", "10s"]),
        (("--debug", "kill", "box_1", "INT"), [*END, "box_1", "--timeout", "10s"]),
        ((*CONTAINERD, "delete", "--force", ID), [*END, f"*{ID}*", "--now", "--timeout", "10s"]),
        (("kill", "abc", "TERM"), [*END, "abc", "--timeout", "10s"]),  # not all cgroups with these letters
    ],
)
def test_before_a_signal_that_ends_a_container_its_clients_are_ended(
    tmp_path: Path, words: tuple[str, ...], asked: list[str]
) -> None:
    assert called(tmp_path, words) == (asked, list(words), 7)


@pytest.mark.parametrize(
    "words",
    [
        ("kill", ID, "10"),
        ("kill", ID, "USR1"),
        ("kill", ID, "0"),
        ("kill", "*", "9"),
        ("delete", ID),
        ("delete", "--help"),
        ("kill", "../a", "9"),
        ("--root", "kill", "state", ID),
        ("exec", ID, "kill", "-9", "1"),
        ("create", "--bundle", "/kill", ID),
        ("--version",),
        (),
    ],
)
def test_all_else_is_the_runtimes_alone(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert called(tmp_path, words) == (None, [*words] or [""], 7)


def test_who_saves_work_on_sigterm_has_the_grace_for_it(tmp_path: Path) -> None:
    assert called(tmp_path, ("kill", ID, "15"), 'signals="KILL"')[0] is None
    assert called(tmp_path, ("kill", ID, "9"), 'signals="KILL"')[0] is not None


@pytest.mark.parametrize("client", ["false", "/nonexistent", "sleep 600"])
def test_a_container_can_be_ended_when_mpsagent_cannot_be_asked(tmp_path: Path, client: str) -> None:
    asked, done, status = called(tmp_path, ("kill", ID, "9"), f"client='{client}'\ndeadline=0")
    assert (asked, done, status) == (None, ["kill", ID, "9"], 7)
