"""docs/first-hour.md, command by command: a page that an administrator follows on the first day must go through."""

from __future__ import annotations

import re
import shutil
import time
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.booted.machine import Machine

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "first-hour.md"
README = PAGE.parent.parent / "README.md"
_BLOCK = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A block of nothing but these may be asked again until it says what the page shows: processes take their time.
_LOOKS = re.compile(r"cat job\.out|mpsagent-cli (?:status|clients|queue|report|policy (?:diff|explain|check))\b")


class Step(NamedTuple):
    user: str
    commands: str
    shown: str
    """What the page shows under them; empty if nothing."""


def steps() -> list[Step]:
    found: list[Step] = []
    for language, user, text in _BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if language == "sh":
            found.append(Step(user, text, ""))
        else:
            assert (language, user) == ("text", ""), f"neither commands nor what they print: {text}"
            found[-1] = found[-1]._replace(shown=text)
    return found


# Another run has other times, numbers, identities of policies and GPUs.
_SPAN = re.compile(r"\b(?:\d+(?:\.\d+)?(?:ms|s|m|h|d))+\b")
_IDENTITY = re.compile(r"\b(?:GPU-[0-9a-f]{8}|[0-9a-f]{12})\b")
_NUMBER = re.compile(r"\d+(?:[.:,-]\d+)*")
_MEMORY = re.compile(r"(?<!\S)(?:N MiB|-)(?!\S)")  # a memory that was not measured yet is `-`


def words(text: str) -> list[str]:
    """Return all words and signs of the text in their order, without what differs in another run. Lines may be wrapped
    elsewhere, and a line of `…` stands for lines that the page leaves out."""
    for pattern, sign in ((_IDENTITY, "ID"), (_SPAN, "SPAN"), (_NUMBER, "N"), (_MEMORY, "MEMORY")):
        text = pattern.sub(sign, text)
    return text.replace("[", " ").replace("…", " ").split()


def missing(shown: str, said: str) -> list[str]:
    """Return the words that the page shows and that were not printed in this order."""
    printed = iter(words(said))
    return [word for word in words(shown) if word not in printed]


def perform(machine: Machine, step: Step, timeout: float = 60) -> None:
    """Run the step as the page shows it, and what it looks at last again, until each word of its output has been
    printed in the page's order: just after a start the gate has not connected yet."""
    looks = list(takewhile(_LOOKS.match, reversed(step.commands.splitlines())))[::-1]
    commands, deadline = step.commands, time.monotonic() + timeout
    while True:
        shell = f"set -e\n{commands}"
        command = ("bash", "-c", f"cd\n{shell}") if step.user == "root" else ("su", "-", step.user, "-c", shell)
        said = machine.run(*command, environment={"HOME": "/root"}, timeout=300).stdout
        lacking = missing(step.shown, said)
        if not lacking:
            return
        if not looks or time.monotonic() > deadline:
            raise AssertionError(f"{step.commands}printed\n{said}without {lacking}; the page shows\n{step.shown}")
        commands = "\n".join(looks)
        time.sleep(0.2)


def test_the_page_has_steps_of_all_three() -> None:
    """The test below would pass with nothing to do."""
    made = steps()
    assert {step.user for step in made} == {"root", "alice", "bob"}
    assert sum(bool(step.shown) for step in made) >= 8
    assert len(made) >= 18


def test_words_that_are_not_printed_are_missing() -> None:
    assert missing("PID  USER\n800  alice  running  6.72s", "PID USER\n12 alice  waiting 1m00s")[0] == "running"
    assert missing("threads  20 %", "active_threads  20 %")[0] == "threads"
    assert missing("turn.grace  30.0s\n…\nmode", "KEY turn.grace 1m00s\naccess deny\nmode enforce") == []
    assert missing("mode access", "access mode") == ["access"]


def without_network(machine: Machine) -> None:
    """Keep apt from looking for one. Two services of this machine that it would call take seconds."""
    others = ("/etc/apt/sources.list", "/etc/apt/apt.conf.d/20packagekit", "/var/lib/man-db/auto-update")
    for file in (*map(machine.path, others), *machine.path("/etc/apt/sources.list.d").glob("*")):
        file.unlink(missing_ok=True)


@pytest.mark.timeout(600)
def test_the_first_hour_goes_through(node: Machine, package: Path) -> None:
    """In a booted systemd, as root, alice and bob, with the package in root's home. It is installed already (test_boot
    installs it on a bare machine), so apt has nothing to do but find that out."""
    without_network(node)
    shutil.copyfile(package, node.path(f"/root/{package.name}"))
    for step in steps():
        perform(node, step)
    assert node.run("systemctl", "is-active", "mpsagent-gate.service", check=False).stdout.strip() != "active"
    assert not node.path("/etc/mpsagent").exists()


def on_readme() -> list[str]:
    """Return the commands of README's part about trying mpsagent."""
    part = README.read_text(encoding="utf-8").partition("## Try it")[2].partition("\n## ")[0]
    return [line.partition("#")[0].strip() for line in part.splitlines() if line.startswith("    ")]


def test_readme_names_both_commands_that_set_everything_up() -> None:
    """And the programs that must be there before them: neither is on a fresh Debian."""
    assert on_readme()[:2] == ["make demo", "make test"]
    assert "apt-get install git make" in README.read_text(encoding="utf-8").partition("    make demo")[0]


@pytest.mark.timeout(600)
def test_readme_and_then_the_first_hour_go_through_without_a_gpu(machine: Machine, package: Path) -> None:
    """README starts the agent before there is a simulator. `enable --now` then left the old command in force, and no
    output said so."""
    without_network(machine)
    place = "/root/mpsagent/dist"
    machine.path(place).mkdir(parents=True)
    shutil.copyfile(package, machine.path(f"{place}/{package.name}"))
    shutil.copyfile(package, machine.path(f"/root/{package.name}"))
    for line in on_readme():
        if not line.startswith("make "):
            done = machine.run("bash", "-c", f"cd {place}/.. && {line}", check=False, timeout=300)
            assert done.returncode == 0 or line.startswith("mpsagent-cli"), f"{line}\n{done.stdout}{done.stderr}"
    for step in steps():
        perform(machine, step)
        if "daemon-reload" in step.commands:
            said = " ".join(machine.run("mpsagent-cli", "doctor", check=False).stdout.split())
            assert "-> systemctl restart mpsagent" in said, said
            assert "nvidia-cuda-mps-control is not installed" not in said
    assert not machine.path("/etc/mpsagent").exists()
