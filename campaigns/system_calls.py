#!/usr/bin/env python3
"""Which system calls the units make, and which of them their SystemCallFilter= does not let them make.

    system_calls.py COMMAND ...      while this runs: pytest tests/booted, for instance

It sees the calls of each control group by bpftrace, so nothing of the units is changed; a call that a filter refuses
does not come that far. Prints each unit's calls, with the programs that made them, and says which are not in its file
(the agent's names groups: not compared). As root, with bpftrace, cc and systemd-analyze. Exit status: 1 if one is not.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

UNITS = Path(__file__).resolve().parents[1] / "systemd"
LISTED = ("mpsagent-gate.service", "mpsagent-api.service")
WATCH = r"""
tracepoint:raw_syscalls:sys_enter / !@seen[cgroup, comm, args->id] / {
  @seen[cgroup, comm, args->id] = 1;
  printf("%s\t%s\t%d\n", cgroup_path(cgroup), comm, args->id);
}
END { clear(@seen); }
"""
NUMBERS = "#include <sys/syscall.h>\n"


def names() -> dict[int, str]:
    """Of this machine's processor, from its headers."""
    defined = subprocess.run(["cc", "-E", "-dM", "-"], input=NUMBERS, capture_output=True, text=True, check=True).stdout
    return {int(number): name for name, number in re.findall(r"#define __NR_(\w+) (\d+)", defined)}


def seen(text: str) -> dict[str, dict[str, set[str]]]:
    """Calls of each unit, and which programs made them; systemd's own, before it starts one, are left out."""
    numbers, found = names(), defaultdict[str, dict[str, set[str]]](lambda: defaultdict(set))
    for path, program, number in re.findall(r"^(\S+?)\t([^\t(][^\t]*)\t(\d+)$", text, re.MULTILINE):
        unit = re.search(r"/(mpsagent[^/,]*\.service)", path)
        if unit is not None and program != "systemd":
            found[unit[1]][numbers.get(int(number), number)].add(program)
    return found


def listed(unit: str) -> set[str]:
    words = " ".join(re.findall(r"^SystemCallFilter=(?!~)(.*)$", (UNITS / unit).read_text(), re.MULTILINE)).split()
    for group in [one for one in words if one.startswith("@")]:
        said = subprocess.run(["systemd-analyze", "syscall-filter", group], capture_output=True, text=True, check=True)
        words += said.stdout.split()[1:]
    return set(words)


def main() -> int:
    with tempfile.TemporaryFile("w+") as out:
        watch = subprocess.Popen(
            ["bpftrace", "-B", "line", "-e", WATCH], stdout=out, env={"BPFTRACE_MAP_KEYS_MAX": "200000"}
        )
        time.sleep(5)
        subprocess.run(sys.argv[1:], check=False)
        watch.terminate()
        watch.wait()
        out.seek(0)
        found = seen(out.read())
    missing = 0
    for unit, calls in sorted(found.items()):
        print(f"{unit}: {len(calls)} calls")
        for call, programs in sorted(calls.items()):
            absent = unit in LISTED and call not in listed(unit) and programs != {"mpsagent-open"}
            missing += absent
            print(f"  {call}{' IS NOT LISTED' if absent else ''} ({', '.join(sorted(programs))})")
    return 1 if missing or not found else 0


if __name__ == "__main__":
    sys.exit(main())
