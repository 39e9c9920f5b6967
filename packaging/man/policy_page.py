"""Writes mpsagent-policy(5), in mdoc, from docs/policy.md, so that the manual and the reference cannot drift apart.

usage: policy_page.py docs/policy.md > mpsagent-policy.5
It knows the few forms that this one file uses: headings, paragraphs, literal blocks, lists, and tables with
`key | value | default`.
"""

import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

HEAD = """\
.Dd November 21, 2026
.Dt MPSAGENT-POLICY 5
.Os
.Sh NAME
.Nm mpsagent-policy
.Nd who may use how much of a shared GPU, and for how long
.Sh DESCRIPTION"""
TAIL = """\
.Sh FILES
.Bl -tag -width Ds -compact
.It Pa /etc/mpsagent/policy.toml , Pa /etc/mpsagent/policy.d/*.toml
the policy
.It Pa /usr/share/doc/mpsagent/examples
worked examples
.It Pa /usr/share/mpsagent/policy.schema.json
a schema for editors
.El
.Sh SEE ALSO
.Xr mpsagent-cli 1 ,
.Xr mpsagent 8"""


def inline(text: str) -> str:
    """Code in bold, emphasis in italics."""
    out = []
    for part in re.split(r"(`[^`]*`|\*\*[^*]+\*\*|\*[^*]+\*)", text.replace("\\", r"\e")):
        if part.startswith("`"):
            out.append(r"\fB" + part[1:-1].replace("-", r"\-") + r"\fR")
        elif part.startswith("*"):
            out.append(r"\fI" + part.strip("*") + r"\fR")
        else:
            out.append(part)
    return "".join(out).replace("·", "*").replace("…", "...").replace("policies/", "")


def filled(text: str) -> Iterator[str]:
    """Short lines, one sentence after the other; none begins like a request."""
    for sentence in re.split(r"(?<=[.:;]) (?=[A-Z\\])", inline(text)):
        for line in textwrap.wrap(sentence, 78, break_long_words=False, break_on_hyphens=False):
            yield r"\&" + line if line[0] in ".'" else line


def sentence(text: str) -> str:
    return text if not text or text.endswith((".", ":")) else text + "."


def table(rows: list[str]) -> Iterator[str]:
    """A key, its value, further forms of the value on lines without a key, and the default at last."""
    yield ".Bl -tag -width Ds"
    default = ""
    for row in [*rows[2:], "| `end` | | |"]:
        key, value, given = (cell.strip() for cell in row.strip("|").split("|"))
        if key and default:
            yield ".br"
            yield from filled(f"Default: {default}.")
        if key == "`end`":
            break
        default = given if key else default
        yield ".It Ic " + key.strip("`") if key else ".br"
        yield from filled(sentence(value[:1].upper() + value[1:]))
    yield ".El"


def items(lines: list[str]) -> Iterator[str]:
    yield ".Bl -{} -width 3n -compact".format("bullet" if lines[0].startswith("- ") else "enum")
    entry: list[str] = []
    for line in [*lines, "- "]:
        start = re.match(r"(- |\d+\. )(.*)", line)
        if start and entry:
            yield ".It"
            yield from filled(" ".join(entry))
        entry = [start[2]] if start else [*entry, line.strip()]
    yield ".El"


def blocks(text: str) -> Iterator[list[str]]:
    """Groups of lines between empty ones; a literal block keeps its empty lines."""
    lines = text.splitlines()
    for number, line in enumerate(lines[1:-1], 1):
        if not line and lines[number - 1].startswith("    ") and lines[number + 1].startswith("    "):
            lines[number] = "    "
    for empty, group in groupby(lines, key=lambda line: line == ""):
        if not empty:
            yield list(group)


def page(text: str) -> Iterator[str]:
    yield HEAD
    paragraph_may_start = False
    for block in blocks(text):
        first = block[0]
        if first.startswith("# "):
            continue
        if first.startswith("## "):
            yield ".Ss " + re.sub(r"[`\[\]]", "", first[3:])
            paragraph_may_start = False
            continue
        if first.startswith("    "):
            yield ".Bd -literal -offset indent"
            yield from (line[4:].replace("\\", r"\e") for line in block)
            yield ".Ed"
        elif first.startswith("|"):
            yield from table(block)
        elif re.match(r"- |\d+\. ", first):
            yield from items(block)
        else:
            if paragraph_may_start:
                yield ".Pp"
            yield from filled(" ".join(block))
        paragraph_may_start = True
    yield TAIL


def main() -> None:
    sys.stdout.write("\n".join(page(Path(sys.argv[1]).read_text(encoding="utf-8"))) + "\n")


if __name__ == "__main__":
    main()
