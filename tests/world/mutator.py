"""Small mistakes in a Python source, each at one place: drawn by a seed, written as a patch of a line or two."""

from __future__ import annotations

import ast
import random
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

FOLDERS = ("mpsagent/core", "mpsagent/gate", "mpsagent/linux")
_OTHERS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_TOLD = frozenset({"Reason", "Report", "replace_text", "wrong", "LinkError", "ValueError", "OSError", "KeyError"})
"""What is inside is for people."""


class Mutation(NamedTuple):
    file: str
    line: int
    before: str
    after: str
    text: str
    """Of the whole file, mutated."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before}  ->  {self.after}"


def drawn(root: Path, seed: int, lines: Mapping[str, Collection[int]] | None = None) -> Iterator[Mutation]:
    """Without end, each place with the same chance. ``lines``: only there, by file."""
    draw = random.Random(seed)
    files = {str(path.relative_to(root)): path.read_text() for name in FOLDERS for path in (root / name).glob("*.py")}
    places = [(file, place) for file in sorted(files) for place, node in enumerate(_places(ast.parse(files[file])))
              if lines is None or getattr(node, "lineno", 0) in lines.get(file, ())]  # fmt: skip
    while True:
        file, place = draw.choice(places)
        found = _mutated(file, files[file], place, draw)
        if found is not None:
            yield found


def drawn_in(root: Path, file: str, seed: str) -> Iterator[Mutation]:
    """Yield the mutations of one file, each place once, in an order that the seed gives."""
    draw = random.Random(seed)
    text = (root / file).read_text()
    places = range(len(list(_places(ast.parse(text)))))
    for place in draw.sample(places, len(places)):
        found = _mutated(file, text, place, draw)
        if found is not None:
            yield found


def _places(tree: ast.AST) -> Iterator[ast.AST]:
    """Where a mistake can be made: not in annotations, in texts, or in what is only said to people."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr | ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id in _TOLD:
                continue
            if isinstance(child, ast.Compare | ast.BoolOp | ast.If | ast.IfExp) or _is_place(child):
                yield child
            yield from _places(child)


def _is_place(node: ast.AST) -> bool:
    match node:
        case ast.BinOp():
            return type(node.op) in _OTHERS
        case ast.UnaryOp():
            return isinstance(node.op, ast.Not)
        case ast.Constant():
            return isinstance(node.value, bool | int | float)
        case ast.Call():
            return isinstance(node.func, ast.Name) and node.func.id in _NAMES
        case ast.Expr():  # a statement that is left out
            return isinstance(node.value, ast.Call)
        case ast.Assign():
            return isinstance(node.targets[0], ast.Attribute | ast.Subscript)
        case ast.AugAssign() | ast.Continue() | ast.Break():
            return True
        case ast.Return():
            return node.value is not None and not isinstance(node.value, ast.Constant)
    return False


def _mutated(file: str, text: str, place: int, draw: random.Random) -> Mutation | None:
    tree = ast.parse(text)
    node = list(_places(tree))[place]
    before, other = ast.get_source_segment(text, node), _other(node, draw)
    if before is None or other is None or "\n" in before:
        return None
    assert isinstance(node, ast.expr | ast.stmt)
    lines = text.split("\n")
    line = lines[node.lineno - 1].encode()
    if node.end_lineno != node.lineno:
        return None
    changed = (line[: node.col_offset] + other.encode() + line[node.end_col_offset :]).decode()
    after = "\n".join([*lines[: node.lineno - 1], changed, *lines[node.lineno :]])
    try:
        same = ast.dump(ast.parse(after)) == ast.dump(tree)
    except SyntaxError:
        return None
    shown = lines[node.lineno - 1].strip()
    return None if same else Mutation(file, node.lineno, shown, changed.strip(), after)


def _other(node: ast.AST, draw: random.Random) -> str | None:
    """The node's text with a mistake in it."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in _OTHERS:
            node.ops = [_OTHERS[type(op)]()]  # type: ignore[list-item]
        case ast.BoolOp():
            if draw.random() < 0.5:
                node.op = _OTHERS[type(node.op)]()  # type: ignore[assignment]
            else:
                node.values.pop(draw.randrange(len(node.values)))
        case ast.BinOp():
            node.op = _OTHERS[type(node.op)]()  # type: ignore[assignment]
        case ast.IfExp():
            node.body, node.orelse = node.orelse, node.body
        case ast.UnaryOp():
            return f"({ast.unparse(node.operand)})"
        case ast.Constant(value=bool(value)):
            return str(not value)
        case ast.Constant(value=int(value) | float(value)):
            return str(draw.choice((value + 1, 0, value * 10)))
        case ast.Call(func=ast.Name(id=name)):
            node.func = ast.Name(_NAMES[name])
        case ast.Return():
            return "return None"
        case ast.Expr() | ast.Assign() | ast.AugAssign() | ast.Continue() | ast.Break():
            return "pass"
        case _:
            return None
    return f"({ast.unparse(node)})"
