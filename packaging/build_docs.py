"""README.md and docs/ as pages for a browser, in build/docs, with the files that they name: ``make docs``. No network.

A name of a page, like docs/policy.md, becomes a link wherever it stands. What leads nowhere, a page or a heading, is
told, and the status is 1.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title}</title><style>
body {{ max-width: 60rem; margin: 0 auto; padding: 1rem; font: 1rem/1.5 sans-serif }}
pre, table {{ display: block; overflow-x: auto }} pre {{ padding: .7rem; border: 1px solid #8886; font-size: .85rem }}
table {{ border-collapse: collapse }} th, td {{ padding: .2rem .6rem; border: 1px solid #8886; text-align: left }}
small {{ display: block; width: 15rem; overflow-wrap: anywhere }}
</style></head><body><nav><a href="{start}">mpsagent</a></nav>
<main>{body}</main></body></html>
"""
# A cell of tests' names: they would take the width of all else.
_TESTS = re.compile(r"<td>((?:tests|campaigns)/[^<]*)</td>")
_NAME = re.compile(r"(?<![\w/.])((?:docs/)?[\w-]+\.md)\b")


def sources() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def place(source: Path) -> str:
    """Of its page, in the directory of all."""
    name = source.relative_to(ROOT).with_suffix(".html").as_posix()
    return "index.html" if name == "README.html" else name


def page(source: Path) -> str:
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    tokens = markdown.parse(source.read_text(encoding="utf-8"))
    title, taken = source.stem, set[str]()
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and after is not None:
            title = after.content if token.tag == "h1" else title
            token.attrSet("id", anchor(after.content, taken))
        if token.children:
            token.children = list(_linked(token.children, source))
    body = _TESTS.sub(_narrow, markdown.renderer.render(tokens, markdown.options, {}))
    return PAGE.format(title=html.escape(title), start=_relative(ROOT / "README.md", source), body=body)


def _narrow(cell: re.Match[str]) -> str:
    return f"<td>{''.join(f'<small>{one}</small>' for one in cell[1].split(', '))}</td>"


def anchor(heading: str, taken: set[str]) -> str:
    """As links in our pages name a heading."""
    name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    while name in taken:
        name += "-1"
    taken.add(name)
    return name


def _relative(target: Path, source: Path) -> str:
    return os.path.relpath(place(target), Path(place(source)).parent)


def _linked(tokens: list[Token], source: Path) -> Iterator[Token]:
    """With links to pages, and names of pages as links, but for those inside of a link."""
    inside = False
    for token in tokens:
        inside = token.type == "link_open" or (inside and token.type != "link_close")
        if token.type == "link_open":
            name, sign, heading = str(token.attrs["href"]).partition("#")
            if name.endswith(".md") and "://" not in name:
                token.attrSet("href", _relative((source.parent / name).resolve(), source) + sign + heading)
        if token.type == "image":  # a page loads nothing: it says where the picture lies
            where = (source.parent / str(token.attrs["src"])).resolve().relative_to(ROOT)
            yield Token("text", "", 0, content=f"{token.content}: {where}")
            continue
        if inside or token.type not in ("text", "code_inline"):
            yield token
            continue
        for number, part in enumerate(_NAME.split(token.content)):
            piece = token.copy(content=part)
            target = ROOT / part if number % 2 else None
            if target is None or not target.exists():
                yield piece
            elif target != source:
                yield Token("link_open", "a", 1, attrs={"href": _relative(target, source)})
                yield piece
                yield Token("link_close", "a", -1)
            else:
                yield piece


class _Links(HTMLParser):
    """Of a page: where its links lead, and what can be led to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


def mistakes(directory: Path) -> list[str]:
    """Links that lead nowhere, and pages that none leads to. What is elsewhere is not fetched."""
    pages = {path.relative_to(directory).as_posix(): _Links(path.read_text()) for path in directory.rglob("*.html")}
    reached, found = {"index.html"}, []
    for name, one in pages.items():
        for link in one.links:
            if re.match(r"\w+:", link):
                continue
            place, _, heading = link.partition("#")
            target = os.path.normpath(Path(name).parent / place) if place else name
            reached.add(target)
            if target in pages and heading in pages[target].anchors:
                continue
            if heading or not (directory / target).is_file():
                found.append(f"{name}: {link} leads nowhere")
    return found + [f"{name}: no page leads to it" for name in sorted(pages.keys() - reached)]


def build(directory: Path) -> list[str]:
    """Write all pages; what is wrong with them."""
    shutil.copytree(ROOT / "docs", directory / "docs", ignore=shutil.ignore_patterns("*.md"), dirs_exist_ok=True)
    for source in sources():
        target = directory / place(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page(source), encoding="utf-8")
    return mistakes(directory)


if __name__ == "__main__":
    shutil.rmtree(ROOT / "build" / "docs", ignore_errors=True)
    wrong = build(ROOT / "build" / "docs")
    print("\n".join(wrong) or f"build/docs/index.html and {len(sources()) - 1} more pages")
    sys.exit(bool(wrong))
