"""NVIDIA's own control daemon, front-end and libcuda of three drivers, from Debian's non-free section.

They need no GPU to start: the daemon, the front-end and the rendezvous up to ``cuInit`` are real. Nothing of them is
part of this project: they are downloaded by name with the ordinary apt client, from the mirror that this machine uses
already, into a private apt state and a cache outside the source tree. ``MPSAGENT_TEST_CACHE`` names another cache,
``MPSAGENT_TEST_OFFLINE`` forbids downloads.

    python tests/nvidia/fetch.py            downloads what is missing and prints where everything is
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SUITES = {"470": "bullseye", "535": "bookworm", "550": "trixie"}
_PACKAGES = ("nvidia-cuda-mps", "libcuda1")
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_LIMIT = 90.0  # seconds for one command of apt
_FAILED_FOR = 600.0  # seconds for which a failure is not tried again, so that no worker waits for it twice


class Unavailable(Exception):
    """These programs cannot be had here; the text says why."""


@dataclass(frozen=True)
class Driver:
    """The unpacked programs of one driver."""

    branch: str  # "535"
    version: str  # "535.261.03"
    root: Path

    @property
    def control(self) -> Path:
        """The control daemon, which is its own front-end."""
        return self.root / "usr/bin/nvidia-cuda-mps-control"

    @property
    def libraries(self) -> Path:
        """The directory with libcuda.so.1."""
        return self.root / "usr/lib/x86_64-linux-gnu/nvidia/current"

    def environment(self) -> dict[str, str]:
        """PATH and LD_LIBRARY_PATH with this driver's programs first."""
        path = f"{self.root}/usr/bin:{self.root}/usr/sbin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
        return {"PATH": path, "LD_LIBRARY_PATH": str(self.libraries), "LANG": "C.UTF-8"}


def cache() -> Path:
    """Where downloads are kept: readable for other users when root runs this, as the tests drop privileges."""
    if named := os.environ.get("MPSAGENT_TEST_CACHE"):
        return Path(named)
    if os.geteuid() == 0:
        return Path("/var/cache/mpsagent-tests")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mpsagent-tests"


def get(branch: str) -> Driver:
    """The programs of one driver, downloaded once for all processes. Raises Unavailable."""
    home = cache() / "nvidia"
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o755)
        lock = os.open(home / f"{branch}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Unavailable(f"cannot write to the cache {home}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if found := _present(home, branch):
            return found
        failure = home / f"{branch}.failed"
        if failure.exists() and time.time() - failure.stat().st_mtime < _FAILED_FOR:
            raise Unavailable(failure.read_text())
        try:
            _download(home, branch)
        except Unavailable as error:
            failure.write_text(str(error))
            raise
        failure.unlink(missing_ok=True)
        found = _present(home, branch)
        if found is None:
            raise Unavailable(f"the packages of {SUITES[branch]} do not hold what they used to")
        return found
    finally:
        os.close(lock)


def _present(home: Path, branch: str) -> Driver | None:
    for root in sorted(home.glob(f"{branch}.*.*")):
        found = Driver(branch, root.name, root)
        if found.control.is_file() and (found.libraries / "libcuda.so.1").exists():
            return found
    return None


def _download(home: Path, branch: str) -> None:
    if os.environ.get("MPSAGENT_TEST_OFFLINE"):
        raise Unavailable("MPSAGENT_TEST_OFFLINE is set")
    for program in ("apt-get", "dpkg", "dpkg-deb"):
        if shutil.which(program) is None:
            raise Unavailable(f"no {program} on this machine: NVIDIA's programs are taken from Debian's packages")
    if os.uname().machine != "x86_64":
        raise Unavailable("the packages are for x86_64")
    suite = SUITES[branch]
    with tempfile.TemporaryDirectory(prefix=f"{branch}.", dir=home) as name:
        work = Path(name)
        options = _private_state(work, suite)
        _apt(work, [*options, "update", "--error-on=any"], f"Debian {suite}")
        # One by one: the release's suffix makes sure that no other source of the machine answers.
        _apt(work, [*options, "download", *(f"{package}/{suite}" for package in _PACKAGES)], f"Debian {suite} non-free")
        unpacked = work / "unpacked"
        for archive in sorted(work.glob("*.deb")):
            _run(work, ["dpkg-deb", "--extract", str(archive), str(unpacked)], "unpacking")
        libraries = unpacked / "usr/lib/x86_64-linux-gnu/nvidia/current"
        real = [path for path in libraries.glob("libcuda.so.*.*") if re.fullmatch(r"libcuda\.so(\.\d+){2,}", path.name)]
        if len(real) != 1:
            raise Unavailable(f"{suite}: libcuda.so is not where it used to be in the package")
        link = libraries / "libcuda.so.1"
        if not link.exists():
            link.symlink_to(real[0].name)
        version = real[0].name.removeprefix("libcuda.so.")
        if version.split(".")[0] != branch:
            raise Unavailable(f"Debian {suite} now has driver {version}, not {branch}")
        unpacked.chmod(0o755)
        unpacked.rename(home / version)


def _private_state(work: Path, suite: str) -> list[str]:
    """Options that keep the machine's own apt untouched: own sources, lists and cache; its keyring and its mirror."""
    for directory in ("lists/partial", "cache/archives/partial"):
        (work / directory).mkdir(parents=True)
    trusted = f" signed-by={_KEYRING}" if _KEYRING.exists() else ""
    (work / "sources.list").write_text(f"deb [arch=amd64{trusted}] {_mirror()} {suite} non-free\n")
    (work / "status").touch()
    settings = {
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::State::Lists": work / "lists",
        "Dir::State::Status": work / "status",
        "Dir::Cache": work / "cache",
        "APT::Sandbox::User": "root",
        "APT::Architecture": "amd64",
        "APT::Update::Post-Invoke-Success": "",
        "Acquire::Languages": "none",
        "Acquire::Retries": "1",
        "Acquire::http::Timeout": "10",
        "Acquire::https::Timeout": "10",
        "DPkg::Lock::Timeout": "20",
    }
    return ["-q", *(word for key, value in settings.items() for word in ("-o", f"{key}={value}"))]


def _mirror() -> str:
    """The Debian mirror that this machine is configured with."""
    wanted = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)"]
    listed = subprocess.run(wanted, capture_output=True, text=True, timeout=_LIMIT, check=False).stdout
    for line in listed.splitlines():
        words = line.split()
        # Security and updates are other repositories or suites; their names have a hyphen or a slash.
        if len(words) == 3 and words[2] == "main" and re.fullmatch(r"[a-z]+", words[1]) and "debian" in words[0]:
            return words[0]
    raise Unavailable("apt has no Debian mirror configured here")


def _apt(work: Path, words: list[str], what: str) -> None:
    _run(work, ["apt-get", *words], what)


def _run(work: Path, command: list[str], what: str) -> None:
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            command,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{what}: {command[0]} took longer than {_LIMIT:.0f} s") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        said = [line for line in lines if line.startswith(("E:", "W:", "dpkg"))]
        # Never the addresses: they name this machine's mirror.
        text = re.sub(r"\S+://\S+", "(mirror)", said[0] if said else f"exit status {done.returncode}")
        raise Unavailable(f"{what}: {command[0]}: {text}")


def main() -> int:
    """Download what is missing; exit status 1 if a driver cannot be had."""
    missing = 0
    for branch in SUITES:
        try:
            found = get(branch)
        except Unavailable as error:
            missing = 1
            print(f"{branch}: {error}")
        else:
            print(f"{branch}: {found.version} {found.root}")
    return missing


if __name__ == "__main__":
    sys.exit(main())
