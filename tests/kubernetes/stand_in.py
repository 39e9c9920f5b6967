"""The kubelet's stand-in as a test drives it."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conformance.backends import REPOSITORY

PATIENCE = 60.0


class Failed(Exception):
    """What the kubelet said instead of an answer."""


class Kubelet:
    def __init__(self, place: Path) -> None:
        self.plugins, self.pods, self.logs = place / "device-plugins", place / "pod-resources", place / "pods"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.kubernetes.kubelet", str(place)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, cwd=REPOSITORY,
        )  # fmt: skip

    def call(self, method: str, *arguments: object) -> Any:
        """Raises Failed."""
        self.begin(method, *arguments)
        return self.answer()

    def begin(self, method: str, *arguments: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")

    def answer(self) -> Any:
        """To what was begun."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        assert ready, "the kubelet's stand-in says nothing"
        said = json.loads(self._process.stdout.readline())
        if "error" in said:
            raise Failed(said["error"])
        return said["answer"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
