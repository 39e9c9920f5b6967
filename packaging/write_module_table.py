"""Writes the list of modules in docs/develop/modules.md from the modules' own first sentences (`make modules`).

A test says when the list is out of date.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "develop" / "modules.md"
BEGIN, END = "<!-- modules: written by make modules -->", "<!-- end of modules -->"
ROOMS = "cli api agent snapshot system gate core policy wire mps linux"
LAYERS = (
    *(f"mpsagent_{beside}" for beside in ("kubernetes", "tools", "bench", "sim")),
    *(f"mpsagent/{room}" for room in ROOMS.split()),
)


def first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?]) (?=[A-Z`:])", paragraph)[0].rstrip(".:")
    head = sentence.partition(": ")[0]
    if len(sentence.split()) > 15 and len(head.split()) > 5:  # a long one is read in the module
        sentence = head
    sentence = re.sub(r":[a-z]+:`[~.\w]*?(\w+)`", r"\1", sentence).replace("``", "`")
    return sentence.replace("<", "&lt;")


def modules() -> str:
    lines: list[str] = []
    for layer in LAYERS:
        package = ROOT / layer
        lines += [f"**{layer}** {first_sentence(package / '__init__.py')}.", ""]
        paths = sorted(path for path in package.glob("*.py") if path.name != "__init__.py")
        lines += [f"- {path.stem}: {first_sentence(path)}" for path in paths]
        lines.append("")
    return "\n".join(lines)


def text(present: str) -> str:
    before, _, rest = present.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{modules()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    TARGET.write_text(text(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
