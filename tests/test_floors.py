"""Holds the floors of the design by reading imports: a module that reaches up, or out, fails here before it is run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST_MODULE = 450

# What floor 0 may take from the standard library: values and text, nothing that reads a clock, a file or the system.
PURE_STDLIB = frozenset(
    "__future__ abc array bisect codecs collections collections.abc copy dataclasses datetime decimal difflib enum "
    "fractions functools hashlib heapq ipaddress itertools json math numbers operator re string struct textwrap types "
    "typing unicodedata".split()
)
# The agent's public values, which the API may show.
AGENT_VALUES = frozenset({"mpsagent.agent.values", "mpsagent.agent.report", "mpsagent.agent.handle"})


@dataclass(frozen=True)
class Floor:
    """What the modules under `prefix` may import of mpsagent, and from elsewhere (None: anything)."""

    prefix: str
    ours: frozenset[str]
    others: frozenset[str] | None


def _floor(prefix: str, ours: str, others: frozenset[str] | None) -> Floor:
    return Floor(prefix, frozenset(ours.split()), others)


# The most specific prefix counts. A module may always import its own package, except where `prefix` names a module.
FLOORS = (
    _floor("mpsagent.facts", "", PURE_STDLIB),
    _floor("mpsagent.decisions", "mpsagent.facts", PURE_STDLIB | {"pydantic", "pydantic_core", "tomli", "signal"}),
    _floor("mpsagent.hands", "mpsagent.facts mpsagent.core.actions mpsagent.policy.policy", None),
    _floor("mpsagent.agent", "mpsagent.facts mpsagent.decisions mpsagent.hands", None),
    _floor("mpsagent.faces", "mpsagent.facts mpsagent.decisions", None),
    # The roof, the one place where the parts are put together: the program starts the agent and its API.
    _floor("mpsagent.program", "mpsagent.facts mpsagent.decisions mpsagent.hands mpsagent.agent mpsagent.faces", None),
    _floor("mpsagent.sim", "mpsagent.mps.units", None),
)
# What a user's shell starts again and again: neither these nor anything that they import at their top may be heavy.
LIGHT = ("mpsagent.interfaces.cli", "mpsagent.interfaces.client")
HEAVY = frozenset("aiohttp asyncinotify psutil pydantic pynvml pystemd structlog tomli asyncio".split())
# The command line may fetch the agent's insides on no account, not even in a function.
OFFLINE = ("mpsagent.interfaces.cli", "mpsagent.interfaces.client", "mpsagent.interfaces.replay")

# Calls that are a clock or the outside world in disguise.
IMPURE_NAMES = frozenset({"open", "input", "print", "exec", "eval", "__import__", "breakpoint"})
# `signal` is there for the names of signals only.
IMPURE_ATTRIBUTES = frozenset({"now", "utcnow", "today", "alarm", "pause", "raise_signal", "setitimer", "signal"})
PURE_FLOORS = ("mpsagent.facts", "mpsagent.decisions")


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported: not those inside functions, nor those for the type checker."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from at_import(node)


def imported(nodes: Iterable[ast.AST], module: str, is_package: bool) -> list[tuple[int, str]]:
    """Every imported module as (line, dotted name); `from a import b` yields a.b, which within() treats like a."""
    found: list[tuple[int, str]] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                keep = len(parts) - node.level + (1 if is_package else 0)
                base = ".".join([*parts[:keep], *([base] if base else [])])
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def floor_of(module: str) -> Floor | None:
    candidates = [floor for floor in FLOORS if within(module, floor.prefix)]
    return max(candidates, key=lambda floor: len(floor.prefix), default=None)


def wrong_imports(module: str, found: list[tuple[int, str]]) -> list[str]:
    floor = floor_of(module)
    if floor is None:
        return [] if module == "mpsagent" else [f"{module}: is on no floor; add it to the table"]
    own_package = ".".join(module.split(".")[:2])
    allowed = floor.ours | ({own_package} if floor.prefix == own_package else set())
    if floor.prefix == "mpsagent.faces" and not module.startswith(OFFLINE):
        allowed |= AGENT_VALUES
    problems = []
    for line, name in found:
        top = name.split(".")[0]
        if top == "mpsagent":
            if name in ("mpsagent", "mpsagent.__version__"):
                continue
            if not any(within(name, one) for one in allowed):
                problems.append(f"{module}:{line}: imports {name}, which is above or beside its floor")
        elif floor.others is not None and not any(within(name, one) for one in floor.others):
            problems.append(f"{module}:{line}: imports {name}, which is not pure")
    return problems


def wrong_calls(module: str, tree: ast.AST) -> list[str]:
    problems = []
    pure = any(within(module, floor) for floor in PURE_FLOORS)
    may_print = module.startswith("mpsagent.interfaces.cli") or within(module, "mpsagent.sim")
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if pure and (name in IMPURE_NAMES or attribute in IMPURE_ATTRIBUTES):
            problems.append(f"{module}:{node.lineno}: calls {name or attribute}(), which is not pure")
        if name == "print" and not may_print and not pure:
            problems.append(f"{module}:{node.lineno}: prints; only the command line and the simulator do")
        for keyword in node.keywords:
            if keyword.arg == "shell" and not (
                isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            ):
                problems.append(f"{module}:{node.lineno}: starts a shell")
    return problems


def heavy_imports(module: str, top_level: dict[str, list[str]], path: tuple[str, ...] = ()) -> list[str]:
    """The heavy imports that importing `module` causes, each with the way by which it comes in."""
    if module in path:
        return []
    way = (*path, module)
    found = []
    for name in top_level.get(module, []):
        if name.split(".")[0] in HEAVY:
            found.append(f"the command line stays light: {' -> '.join(way)} -> {name}")
        known = name if name in top_level else name.rpartition(".")[0]
        if known in top_level and known != module:
            found += heavy_imports(known, top_level, way)
    return found


def violations(root: Path) -> list[str]:
    """All violations in the package tree root/mpsagent, one line each."""
    problems: list[str] = []
    top_level: dict[str, list[str]] = {}
    for path in sorted((root / "mpsagent").rglob("*.py")):
        module = module_name(path, root)
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=str(path))
        is_package = path.name == "__init__.py"
        found = imported(ast.walk(tree), module, is_package)
        top_level[module] = [name for _, name in imported(at_import(tree), module, is_package)]
        problems += wrong_imports(module, found)
        problems += wrong_calls(module, tree)
        for line, name in found:
            if name.split(".")[0] in ("pickle", "marshal"):
                problems.append(f"{module}:{line}: imports {name}; no data of others is ever unpickled")
            if within(name, "mpsagent.sim") and not within(module, "mpsagent.sim"):
                problems.append(f"{module}:{line}: imports the simulator")
        lines = text.count("\n")
        if lines > LONGEST_MODULE:
            problems.append(f"{module}: {lines} lines; split it, {LONGEST_MODULE} is the most")
    for module in top_level:
        if module.startswith(LIGHT):
            problems += heavy_imports(module, top_level)
    return problems


def test_the_package_keeps_to_its_floors() -> None:
    """The design is only true as long as something fails when it is not."""
    problems = violations(ROOT)
    assert not problems, "\n" + "\n".join(problems)


BAD_MODULES = {
    "a clock in the facts": ("facts/bad.py", "import time\n", "not pure"),
    "the system in the facts": ("facts/bad.py", "from os import path\n", "not pure"),
    "logging in the decisions": ("decisions/bad.py", "import logging\n", "not pure"),
    "third party in the facts": ("facts/bad.py", "import pydantic\n", "not pure"),
    "now() in the decisions": ("decisions/bad.py", "import datetime\nx = datetime.datetime.now()\n", "calls now()"),
    "a file opened in the facts": ("facts/bad.py", "x = open('/etc/passwd')\n", "calls open()"),
    "facts look up": ("facts/bad.py", "from mpsagent.decisions import decide\n", "above or beside"),
    "facts look up, relatively": ("facts/bad.py", "from ..hands import frontend\n", "above or beside"),
    "hands decide": ("hands/bad.py", "from mpsagent.core.decide import decide\n", "above or beside"),
    "hands look up": ("hands/bad.py", "import mpsagent.agent.loop\n", "above or beside"),
    "the command line takes from the agent": (
        "faces/cli.py",
        "from mpsagent.agent.main import main\n",
        "above or beside",
    ),
    "the command line takes from the hands": (
        "faces/cli_more.py",
        "from mpsagent.system import frontend\n",
        "above or beside",
    ),
    "the command line gets heavy": ("faces/client.py", "import aiohttp\n", "stays light"),
    "the agent takes from the roof": ("agent/bad.py", "import mpsagent.interfaces.daemon\n", "above or beside"),
    "the agent takes from the faces": ("agent/bad.py", "import mpsagent.interfaces.api\n", "above or beside"),
    "the simulator takes from the facts": (
        "sim/bad.py",
        "from mpsagent.core.model import Server\n",
        "above or beside",
    ),
    "somebody takes from the simulator": ("hands/bad.py", "import mpsagent.sim.cli\n", "imports the simulator"),
    "an import inside a function": ("facts/bad.py", "def f():\n    import socket\n", "not pure"),
    "a shell": ("hands/bad.py", "import subprocess\nsubprocess.run('x', shell=True)\n", "starts a shell"),
    "pickle": ("hands/bad.py", "import pickle\n", "unpickled"),
    "print in the agent": ("agent/bad.py", "print('x')\n", "prints"),
    "a module too long": ("agent/bad.py", "x = 1\n" * (LONGEST_MODULE + 1), "split it"),
    "a package on no floor": ("cellar/bad.py", "", "on no floor"),
}


@pytest.mark.parametrize("what", BAD_MODULES)
def test_each_violation_is_seen(what: str, tmp_path: Path) -> None:
    """A test that cannot fail holds nothing: each rule is broken once, and must be reported."""
    place, text, expected = BAD_MODULES[what]
    path = tmp_path / "mpsagent" / place
    path.parent.mkdir(parents=True)
    path.write_text(text)
    problems = violations(tmp_path)
    assert any(expected in problem for problem in problems), problems


def test_what_the_floors_allow_is_not_reported(tmp_path: Path) -> None:
    """The other direction: rules that forbid everything would pass the test above too."""
    good = {
        "facts/model.py": ["import dataclasses, collections.abc", "from mpsagent.mps.units import Percent"],
        "decisions/decide.py": ["import pydantic", "from mpsagent.core.model import State", "from . import ladder"],
        "hands/frontend.py": ["import asyncio, os", "from mpsagent.core.actions import SetLimits"],
        "agent/loop.py": [
            "import structlog",
            "from mpsagent.system import frontend",
            "from mpsagent import __version__",
        ],
        "program/main.py": ["from mpsagent.interfaces.api import serve", "import mpsagent.agent.loop"],
        "faces/cli.py": ["import click, socket", "from mpsagent.interfaces import client", "print('x')"],
        "faces/client.py": ["import socket", "from mpsagent.core.model import State"],
        "faces/api.py": ["import aiohttp"],
        "sim/cli.py": [
            "from mpsagent.mps.units import Percent",
            "from mpsagent.sim.server import Server",
            "print('x')",
        ],
    }
    for place, text in good.items():
        path = tmp_path / "mpsagent" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(text) + "\n")
    assert violations(tmp_path) == []


def test_heavy_imports_are_found_through_other_modules(tmp_path: Path) -> None:
    """`mpsagent-cli status` is run in scripts and prompts; one import too many, three modules away, doubles it."""
    package = tmp_path / "mpsagent"
    for place, text in {
        "faces/cli.py": "from mpsagent.interfaces import client\n",
        "faces/client.py": "from mpsagent.policy.policy import load\ndef f():\n    import tomli\n",
        "decisions/policy.py": "import pydantic\n",
    }.items():
        (package / place).parent.mkdir(parents=True, exist_ok=True)
        (package / place).write_text(text)
    problems = violations(tmp_path)
    assert any("client -> mpsagent.policy.policy -> pydantic" in problem for problem in problems), problems
    assert not any("tomli" in problem for problem in problems), "an import inside a function costs nothing at start"
