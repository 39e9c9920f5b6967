"""The units, looked at without running them: they are in everybody's trusted computing base."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
UNITS = ROOT / "systemd"
# Lower is better. Each exception that makes up the rest has its reason in the unit.
HIGHEST_EXPOSURE = {
    "mpsagent.service": 2.1,
    "mpsagent-gate.service": 1.4,
    "mpsagent-api.service": 0.5,
    "mpsagent-metrics.service": 2.0,
}
# Known from systemd 254 on; older ones pass it over with a warning.
NEWER = re.compile("Unknown key .*'(FileDescriptorStorePreserve)'")
SYSTEM_UNITS = Path("/usr/lib/systemd/system")

needs_systemd_analyze = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None or not (SYSTEM_UNITS / "sysinit.target").exists(),
    reason="systemd-analyze and systemd's own units are not here",
)


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False, timeout=60)


def exposure(unit: Path) -> float:
    done = analyze("security", "--offline=yes", "--no-pager", unit)
    found = re.search(r"Overall exposure level for \S+: (\d+\.\d+)", done.stdout)
    assert found, done.stdout + done.stderr
    return float(found[1])


@needs_systemd_analyze
@pytest.mark.parametrize("unit", HIGHEST_EXPOSURE)
def test_each_daemon_is_hardened_as_far_as_its_work_allows(unit: str) -> None:
    """A root daemon that reads hostile input gets nothing that it does not need."""
    assert exposure(UNITS / unit) <= HIGHEST_EXPOSURE[unit]


@needs_systemd_analyze
def test_the_measure_of_hardening_notices_its_absence(tmp_path: Path) -> None:
    """The test above holds nothing if any unit passes it."""
    bare = tmp_path / "bare.service"
    bare.write_text("[Service]\nExecStart=/bin/true\n")
    assert exposure(bare) > max(HIGHEST_EXPOSURE.values())


@needs_systemd_analyze
def test_systemd_has_no_complaint_about_the_units(tmp_path: Path) -> None:
    """A misspelt directive is only a warning in the journal, and the protection it stood for is gone."""
    place = tmp_path / "usr/lib/systemd/system"
    place.mkdir(parents=True)
    for unit in SYSTEM_UNITS.iterdir():
        if unit.suffix in (".target", ".slice") and unit.is_file():
            shutil.copyfile(unit, place / unit.name)
    for unit in [*UNITS.glob("*.service"), *UNITS.glob("*.socket")]:
        shutil.copyfile(unit, place / unit.name)
    for program in (
        *("usr/bin/mpsagent", "usr/bin/mpsagent-cli", "usr/bin/mpsagent-api", "usr/bin/mpsagent-gate", "usr/bin/env"),
        *(f"usr/lib/mpsagent/mpsagent-{name}" for name in ("open", "directories", "compute-mode", "control-start")),
        "usr/lib/mpsagent/mpsagent-tell",
    ):
        (tmp_path / program).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy("/bin/true", tmp_path / program)
    names = sorted(unit.name.replace("@.", "@gpu0.") for unit in [*UNITS.glob("*.service"), *UNITS.glob("*.socket")])

    done = analyze("verify", "--man=no", f"--root={tmp_path}", *names)
    said = [line for line in (done.stdout + done.stderr).splitlines() if not NEWER.search(line)]
    assert (done.returncode, said) == (0, [])

    broken = place / "mpsagent.service"
    broken.write_text(broken.read_text().replace("ProtectSystem=strict", "ProtectSytem=strict"))
    done = analyze("verify", "--man=no", f"--root={tmp_path}", *names)
    assert "ProtectSytem" in done.stderr, "verify says nothing whatever the unit says"


EXCEPTIONS = {
    "mpsagent.service": "User= CAP_KILL CAP_SYS_PTRACE CAP_DAC_READ_SEARCH PrivateUsers PrivateTmp PrivateDevices "
    "ProtectProc ProcSubset MemoryDenyWriteExecute",
    "mpsagent-gate.service": "User= CAP_SETUID CAP_SETGID PrivateUsers PrivateTmp ProtectProc",
}


@pytest.mark.parametrize("unit", EXCEPTIONS)
def test_every_exception_to_the_hardening_has_its_reason(unit: str) -> None:
    """What `systemd-analyze security` still complains about is named in the unit, with why."""
    text = (UNITS / unit).read_text()
    granted = re.findall(r"^CapabilityBoundingSet=(.*)$", text, re.MULTILINE)[0].split()
    assert set(granted) == {one for one in EXCEPTIONS[unit].split() if one.startswith("CAP_")}
    for exception in EXCEPTIONS[unit].split():
        assert re.search(rf"^# \(?(no )?{exception}\S*\s+\S+", text, re.MULTILINE), f"{exception} has no reason"


def test_message_ids_are_well_formed_and_each_once() -> None:
    """journald drops a catalog entry whose id is not 32 hexadecimal digits, without a word."""
    ids = re.findall(r"^-- (\S+)$", (UNITS / "mpsagent.catalog").read_text(), re.MULTILINE)
    assert ids
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[0-9a-f]{32}", one) for one in ids)
