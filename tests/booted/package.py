"""The package of this checkout, built once for as long as nothing that it is made of changes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SYSTEM_PYTHON = "/usr/bin/python3"
INGREDIENTS = (
    "mpsagent",
    "mpsagent_bench",
    "mpsagent_sim",
    "mpsagent_tools",
    "systemd",
    "packaging",
    "policies",
    "docs",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
    "requirements.lock",
    "pyproject.toml",
)


BEFORE = "057f969"
"""The last commit whose agent was its own API and kept the history."""


class NotBuilt(Exception):
    """With what the build said."""


def _digest() -> str:
    digest = hashlib.sha256()
    for ingredient in INGREDIENTS:
        path = ROOT / ingredient
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file() and "__pycache__" not in file.parts:
                digest.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _built(kind: str, checkout: Path, dist: Path, **more: str) -> Path:
    version = "import sys; print('%d.%d' % sys.version_info[:2])"
    python = subprocess.run([SYSTEM_PYTHON, "-c", version], capture_output=True, text=True, check=True).stdout.strip()
    environment = {**os.environ, "PYTHONS": python, "COMPRESSION": "none", "DIST": str(dist), **more}
    script = checkout / "packaging" / {"deb": "debian", "rpm": "rpm"}[kind] / "build.sh"
    done = subprocess.run([script], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotBuilt(f"the package does not build:\n{done.stdout}{done.stderr}")
    return next(dist.glob(f"*.{kind}"))


def build(kind: str = "deb") -> Path:
    """The .deb (or .rpm) for this machine's Python; several processes build it once between them. Raises NotBuilt."""
    place = ROOT / "build" / "test-package" / kind
    place.mkdir(parents=True, exist_ok=True)
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = place / _digest()
        if not built.exists():
            for old in place.glob("*/"):
                shutil.rmtree(old)
            new = place / "new"
            _built(kind, ROOT, new)
            new.rename(built)
        return next(built.glob(f"*.{kind}"))


def build_before(place: Path, kind: str = "deb") -> Path:
    """The .deb (or .rpm) of BEFORE, as an older version, from this checkout's history. Raises NotBuilt."""
    place.mkdir()
    packed = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        raise NotBuilt(f"commit {BEFORE} is not in this clone: {packed.stderr.decode()}")
    subprocess.run(["tar", "-x", "-C", str(place)], input=packed.stdout, check=True)
    (place / ".venv").symlink_to(ROOT / ".venv")
    return _built(kind, place, place / "dist", VERSION="0.0.9")
