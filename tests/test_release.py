"""What is released can be checked: it is built again to the byte, lists what it carries, and names each licence."""

from __future__ import annotations

import fnmatch
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAGE = (ROOT / "packaging/stage.sh").read_text()
DISTRIBUTIONS_OWN = re.search(r"^from_distribution='(.*)'$", STAGE, re.MULTILINE)[1].split("|")  # type: ignore[index]
LOCKED = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
CARRIED = {name: version for name, version in LOCKED.items() if name not in DISTRIBUTIONS_OWN}
SAID_OTHERWISE = {"Apache 2.0": "Apache-2.0", "BSD": "BSD-3-Clause"}


def licence_of(library: importlib.metadata.Distribution) -> str:
    said = library.metadata.get("License-Expression") or library.metadata["License"]
    return SAID_OTHERWISE.get(said, said)


@pytest.mark.parametrize("name", CARRIED)
def test_the_packages_name_the_licence_of_what_they_carry(name: str) -> None:
    library = importlib.metadata.distribution(name)
    licence = licence_of(library)
    debian = (ROOT / "packaging/debian/copyright").read_text()
    paragraphs = re.findall(r"^Files:((?:.+\n)+?)Copyright:(?:.+\n)+?License: (.+)$", debian, re.MULTILINE)
    patterns = [
        pattern.removeprefix("usr/lib/mpsagent/lib/*/")
        for files, said in paragraphs
        if said == licence.replace(" AND ", " and ").replace(" OR ", " or ")
        for pattern in files.split()
        if pattern != "*"
    ]
    for top in {file.parts[0] for file in library.files or ()} - {"..", "__pycache__", "example.py"}:
        assert any(fnmatch.fnmatch(top, pattern) for pattern in patterns), f"{top}: {licence}"
    spec = (ROOT / "packaging/rpm/mpsagent.spec.in").read_text()
    whole = re.search(r"^License: +(.+)$", spec, re.MULTILINE)[1].split(" AND ")  # type: ignore[index]
    assert set(re.split(" AND | OR ", licence)) <= set(whole)


def why_not() -> str:
    missing = [
        one for one in ("dpkg-deb", "rpmbuild", "lintian", "rpmlint", "faketime", "git") if not shutil.which(one)
    ]
    if missing:
        return f"missing: {' '.join(missing)}"
    if not (ROOT / ".git").exists():
        return "no git repository"
    tried = subprocess.run(["unshare", "--user", "--map-user=1234", "--net", "true"], capture_output=True, check=False)
    return tried.stderr.decode()


@pytest.mark.timeout(1200)
def test_two_builds_are_the_same_and_the_second_needs_no_network(tmp_path: Path) -> None:
    """It compares what it built itself (packaging/release.sh); one Python, because more are more of the same."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    settings = {"DIST": str(tmp_path), "PYTHONS": "%d.%d" % sys.version_info[:2]}
    done = subprocess.run(
        [ROOT / "packaging/release.sh"], env=os.environ | settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    sums = dict(reversed(line.split("  ")) for line in (tmp_path / "SHA256SUMS").read_text().splitlines())
    assert {Path(name).suffix for name in sums} == {".whl", ".deb", ".rpm"}
    assert sums == {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in sums}

    deb = next(tmp_path.glob("*.deb"))
    tar = subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], capture_output=True, check=True).stdout
    rights = subprocess.run(["tar", "-tv", "--numeric-owner"], input=tar, capture_output=True, check=True).stdout
    files = [line.split()[:2] for line in rights.decode().splitlines()]
    assert {owner for _, owner in files} == {"0/0"}
    assert not [mode for mode, _ in files if re.search("[stST]", mode) or mode[5] == mode[8] == "w"]
    sbom = ["tar", "-xO", "./usr/share/doc/mpsagent/sbom.cdx.json"]
    listed = json.loads(subprocess.run(sbom, input=tar, capture_output=True, check=True).stdout)["components"]
    assert {one["name"].replace("_", "-"): one["version"] for one in listed} == CARRIED
    assert all(one["licenses"] for one in listed)
