"""Holds the layers of the design by reading imports: a module that reaches up, out, or round in a circle fails here."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# What the pure layers may take from the standard library: values and text, no clock, no file, nothing of the system.
PURE_STDLIB = frozenset(
    "__future__ abc array bisect codecs collections collections.abc copy dataclasses datetime decimal difflib enum "
    "fractions functools hashlib heapq ipaddress itertools json math numbers operator re string struct textwrap types "
    "typing unicodedata zlib".split()
)


@dataclass(frozen=True)
class Layer:
    """What the modules under `prefix` may import of mpsagent, and from elsewhere (None: anything)."""

    prefix: str
    ours: frozenset[str]
    others: frozenset[str] | None


def _layer(prefix: str, ours: str, others: frozenset[str] | None) -> Layer:
    names = (name if name.startswith("mpsagent_") else f"mpsagent.{name}" for name in ours.split())
    return Layer(prefix, frozenset(names), others)


# From the lowest up. The most specific prefix counts. A module may always import its own package, but in no circle.
LAYERS = (
    _layer("mpsagent.linux", "", None),
    _layer("mpsagent.mps", "", PURE_STDLIB),
    _layer("mpsagent.wire", "mps", PURE_STDLIB),
    _layer("mpsagent.policy", "mps", PURE_STDLIB | {"tomli"}),
    _layer("mpsagent.core", "mps wire policy", PURE_STDLIB | {"signal"}),
    _layer("mpsagent.gate", "linux mps wire", None),
    _layer("mpsagent.gate.handshake", "linux mps wire gate", PURE_STDLIB),
    _layer("mpsagent.gate.handover", "linux mps wire gate", PURE_STDLIB),
    _layer("mpsagent.gate.queue", "mps wire gate", PURE_STDLIB),
    _layer("mpsagent.gate.limits", "mps wire gate", PURE_STDLIB),
    _layer("mpsagent.snapshot", "mps wire policy core", None),
    _layer("mpsagent.system", "linux mps wire policy", None),
    _layer("mpsagent.agent", "linux mps wire policy core snapshot system", None),
    _layer("mpsagent.api", "linux mps wire policy core snapshot system", None),
    _layer("mpsagent.cli", "linux mps wire policy core system api", None),
    # Packages beside mpsagent: none of them knows another one.
    _layer("mpsagent_bench", "system cli", None),
    _layer("mpsagent_bench.plan", "mpsagent_bench", PURE_STDLIB),
    _layer("mpsagent_bench.results", "mpsagent_bench", PURE_STDLIB),
    _layer("mpsagent_bench.provision", "mpsagent_bench", PURE_STDLIB),
    _layer("mpsagent_kubernetes", "cli", None),
    _layer("mpsagent_sim", "", None),
    _layer("mpsagent_tools", "mps wire policy core gate system api cli", None),
)
# What a user's shell starts again and again: neither these nor anything that they import at their top may be heavy.
LIGHT = ("mpsagent.cli.main", "mpsagent.cli.pages", "mpsagent.cli.client")
HEAVY = frozenset("aiohttp asyncinotify psutil pydantic pynvml pystemd structlog tomli asyncio".split())

# A page is pickled by root for the api, which takes our own values from root alone; the agent unpickles nothing.
PAGES = ("mpsagent.snapshot.page", "mpsagent.api.received")

# Programs whose output is their answer: the command line, the simulator, and helpers of the units.
PRINTS = (
    "mpsagent.cli",
    "mpsagent_sim",
    "mpsagent_tools",
    "mpsagent.system.compute_mode",
    "mpsagent.system.generator",
    "mpsagent.system.prepare",
)

# Calls that are a clock or the outside world in disguise.
IMPURE_NAMES = frozenset({"open", "input", "print", "exec", "eval", "__import__", "breakpoint"})
# `signal` is there for the names of signals only.
IMPURE_ATTRIBUTES = frozenset({"now", "utcnow", "today", "alarm", "pause", "raise_signal", "setitimer", "signal"})
PURE = ("mpsagent.mps", "mpsagent.wire", "mpsagent.policy", "mpsagent.core")


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


def layer_of(module: str) -> Layer | None:
    candidates = [layer for layer in LAYERS if within(module, layer.prefix)]
    return max(candidates, key=lambda layer: len(layer.prefix), default=None)


def wrong_imports(module: str, found: list[tuple[int, str]]) -> list[str]:
    layer = layer_of(module)
    if layer is None:
        return [] if module == "mpsagent" else [f"{module}: is in no layer; add it to the table"]
    own_package = ".".join(module.split(".")[: 2 if within(module, "mpsagent") else 1])
    allowed = layer.ours | ({own_package} if layer.prefix == own_package else set())
    problems = []
    for line, name in found:
        if name.startswith("mpsagent"):
            if name in ("mpsagent", "mpsagent.__version__"):
                continue
            if not any(within(name, one) for one in allowed):
                problems.append(f"{module}:{line}: imports {name}, which is above or beside its layer")
        elif layer.others is not None and not any(within(name, one) for one in layer.others):
            problems.append(f"{module}:{line}: imports {name}, which is not pure")
    return problems


def circles(imports: dict[str, list[str]]) -> list[list[str]]:
    """Modules that import each other, directly or through others, be it for types only or within a function."""
    graph: dict[str, set[str]] = {}
    for module, names in imports.items():
        known = {name if name in imports else name.rpartition(".")[0] for name in names}
        graph[module] = {one for one in known if one in imports and one != module and one != module.rpartition(".")[0]}

    def reached(module: str) -> set[str]:
        found: set[str] = set()
        todo = [module]
        while todo:
            fresh = graph[todo.pop()] - found
            found |= fresh
            todo += fresh
        return found

    far = {module: reached(module) for module in graph}
    found = {frozenset(one for one in far[module] if module in far[one]) for module in graph if module in far[module]}
    return sorted(map(sorted, found))


def wrong_calls(module: str, tree: ast.AST) -> list[str]:
    problems = []
    pure = any(within(module, layer) for layer in PURE)
    may_print = module.startswith(PRINTS)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if pure and (name in IMPURE_NAMES or attribute in IMPURE_ATTRIBUTES):
            problems.append(f"{module}:{node.lineno}: calls {name or attribute}(), which is not pure")
        if name == "print" and not may_print and not pure:
            problems.append(f"{module}:{node.lineno}: prints; only programs whose output is their answer do")
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
    """All violations in the packages of root, one line each."""
    problems: list[str] = []
    top_level: dict[str, list[str]] = {}
    every: dict[str, list[str]] = {}
    for path in sorted(root.glob("mpsagent*/**/*.py")):
        module = module_name(path, root)
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=str(path))
        is_package = path.name == "__init__.py"
        found = imported(ast.walk(tree), module, is_package)
        every[module] = [name for _, name in found]
        top_level[module] = [name for _, name in imported(at_import(tree), module, is_package)]
        problems += wrong_imports(module, found)
        problems += wrong_calls(module, tree)
        for line, name in found:
            if name.split(".")[0] in ("pickle", "marshal") and module not in PAGES:
                problems.append(f"{module}:{line}: imports {name}; no data of others is ever unpickled")
            if name.split(".")[0] in ("grpc", "google") and not within(module, "mpsagent_kubernetes"):
                problems.append(f"{module}:{line}: imports {name}, which only the device plugin has")
    problems += [f"a circle of imports: {', '.join(one)}" for one in circles(every)]
    for module in top_level:
        if module.startswith(LIGHT):
            problems += heavy_imports(module, top_level)
    return problems


def test_the_package_keeps_to_its_layers() -> None:
    """The design is only true as long as something fails when it is not."""
    problems = violations(ROOT)
    assert not problems, "\n" + "\n".join(problems)


def test_the_api_has_no_engine() -> None:
    """It shows pages; what decides, signals and asks the driver is the agent's, and is not even loaded."""
    code = "import sys, mpsagent.api.main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    of_agent = ("core.engine", "core.reduce", "agent.node", "agent.showing", "system.nvml", "system.spawn")
    assert {f"mpsagent.{name}" for name in of_agent}.isdisjoint(done.stdout.split())


@pytest.mark.parametrize("name", ["gate.main", "api.main", "system.control_start", "system.compute_mode"])
def test_psutil_is_not_loaded_where_the_kernel_alone_is_believed(name: str) -> None:
    """Nor by the api, which looks at no process, nor with all rights beside NVIDIA's daemon."""
    code = f"import sys, mpsagent.{name}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "psutil" not in done.stdout.split()


BAD_MODULES = {
    "a clock in mps": ("mps/bad.py", "import time\n", "not pure"),
    "the system in mps": ("mps/bad.py", "from os import path\n", "not pure"),
    "logging in the core": ("core/bad.py", "import logging\n", "not pure"),
    "third party in mps": ("mps/bad.py", "import click\n", "not pure"),
    "now() in the core": ("core/bad.py", "import datetime\nx = datetime.datetime.now()\n", "calls now()"),
    "a file opened in the policy": ("policy/bad.py", "x = open('/etc/passwd')\n", "calls open()"),
    "mps looks up": ("mps/bad.py", "from mpsagent.core import engine\n", "above or beside"),
    "mps looks up, relatively": ("mps/bad.py", "from ..system import frontend\n", "above or beside"),
    "the system decides": ("system/bad.py", "from mpsagent.core.coordinator import Core\n", "above or beside"),
    "the system looks up": ("system/bad.py", "import mpsagent.agent.host\n", "above or beside"),
    "the gate decides": ("gate/bad.py", "from mpsagent.core.coordinator import Core\n", "above or beside"),
    "the handshake does I/O": ("gate/handshake.py", "import socket\n", "not pure"),
    "linux takes from a room": ("linux/bad.py", "from mpsagent.mps import units\n", "above or beside"),
    "the gate takes from the agent's helpers": ("gate/bad.py", "from mpsagent.system import nvml\n", "above or beside"),
    "the api takes from the agent": ("api/bad.py", "from mpsagent.agent import settings\n", "above or beside"),
    "the command line takes from the agent": (
        "cli/main.py",
        "from mpsagent.agent.host import Agent\n",
        "above or beside",
    ),
    "the command line gets heavy": ("cli/client.py", "import aiohttp\n", "stays light"),
    "the agent takes from the api": ("agent/bad.py", "import mpsagent.api.calls\n", "above or beside"),
    "the simulator takes from the core": (
        "../mpsagent_sim/bad.py",
        "from mpsagent.core.model import Server\n",
        "above or beside",
    ),
    "the system takes from the simulator": ("system/bad.py", "import mpsagent_sim.cli\n", "above or beside"),
    "the command line takes from a package beside": (
        "cli/bad.py",
        "def f():\n    from mpsagent_bench import cli\n",
        "above or beside",
    ),
    "an import inside a function": ("mps/bad.py", "def f():\n    import socket\n", "not pure"),
    "the agent takes from the device plugin": (
        "agent/bad.py",
        "from mpsagent_kubernetes import shares\n",
        "above or beside",
    ),
    "gRPC in the agent": ("agent/bad.py", "def f():\n    import grpc\n", "only the device plugin"),
    "a shell": ("system/bad.py", "import subprocess\nsubprocess.run('x', shell=True)\n", "starts a shell"),
    "pickle": ("system/bad.py", "import pickle\n", "unpickled"),
    "print in the agent": ("agent/bad.py", "print('x')\n", "prints"),
    "a package in no layer": ("cellar/bad.py", "", "in no layer"),
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


def test_what_the_layers_allow_is_not_reported(tmp_path: Path) -> None:
    """The other direction: rules that forbid everything would pass the test above too."""
    good = {
        "mps/model.py": ["import dataclasses, collections.abc", "from mpsagent.mps.units import Percent"],
        "core/engine.py": ["import signal", "from mpsagent.core.model import State", "from . import ladder"],
        "core/model.py": ["from mpsagent.policy.policy import Policy"],
        "gate/loop.py": ["import asyncio, socket", "from mpsagent.gate import handshake"],
        "system/frontend.py": ["import asyncio, os", "from mpsagent.wire.link import Knock"],
        "agent/host.py": [
            "import structlog",
            "from mpsagent.system import frontend",
            "from mpsagent import __version__",
        ],
        "cli/main.py": ["import click, socket", "from mpsagent.cli import client", "print('x')"],
        "cli/client.py": ["import socket", "from mpsagent.core.model import State"],
        "api/calls.py": ["import aiohttp", "from mpsagent.snapshot.page import Page"],
        "../mpsagent_tools/trial.py": ["from mpsagent.gate import queue", "from mpsagent.cli import ask", "print('x')"],
        "../mpsagent_sim/cli.py": [
            "from mpsagent_sim.server import Server",
            "print('x')",
        ],
    }
    for place, text in good.items():
        path = tmp_path / "mpsagent" / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(text) + "\n")
    assert violations(tmp_path) == []


def test_circles_are_found(tmp_path: Path) -> None:
    """Two modules that need each other are one module; three in a ring are harder to see, and an import for types or in
    a function is one, too."""
    package = tmp_path / "mpsagent" / "core"
    package.mkdir(parents=True)
    (package / "a.py").write_text("from mpsagent.core import b\n")
    (package / "b.py").write_text("def f():\n    import mpsagent.core.c\n")
    (package / "c.py").write_text("if TYPE_CHECKING:\n    from mpsagent.core.a import x\n")
    (package / "d.py").write_text("from mpsagent.core.a import y\n")
    problems = [one for one in violations(tmp_path) if "circle" in one]
    assert problems == ["a circle of imports: mpsagent.core.a, mpsagent.core.b, mpsagent.core.c"]


def test_heavy_imports_are_found_through_other_modules(tmp_path: Path) -> None:
    """`mpsagent-cli status` is run in scripts and prompts; one import too many, three modules away, doubles it."""
    package = tmp_path / "mpsagent"
    for place, text in {
        "cli/main.py": "from mpsagent.cli import client\n",
        "cli/client.py": "from mpsagent.policy.policy import load\ndef f():\n    import tomli\n",
        "policy/policy.py": "import pydantic\n",
    }.items():
        (package / place).parent.mkdir(parents=True, exist_ok=True)
        (package / place).write_text(text)
    problems = violations(tmp_path)
    assert any("client -> mpsagent.policy.policy -> pydantic" in problem for problem in problems), problems
    assert not any("tomli" in problem for problem in problems), "an import inside a function costs nothing at start"
