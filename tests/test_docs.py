"""Documentation that says something else than the code is worse than none: what can be compared is compared."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import subprocess
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest

from campaigns import hostile
from mpsagent.agent import conditions
from mpsagent.agent.orders import ORDERS
from mpsagent.cli.verbs import cli
from mpsagent.policy.files import load
from mpsagent.policy.keys import KEYS, OLD_KEYS, OLD_SECTIONS, REMOVED_KEYS
from mpsagent.policy.parse import OLD_WORDS
from tests import recordings
from tests.nvidia import page

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# Transcripts' sections and scenarios, as comments and pages name them: "recording 02, R3", "X13".
_SECTION = re.compile(r"\brecordings? (\d\d), ([A-Z]\d+)\b")
_RECORDING = re.compile(r"\brecordings? (\d\d)\b")
_TEST = re.compile(r"\b((?:tests|campaigns)/[\w/]+\.py)::(\w+)")
_SCENARIO = re.compile(r"\bX\d+\b")
_FENCED = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^ {4}.*\n(?:\n(?= {4}))*)+", re.MULTILINE)
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]*)\)")
# What a program of ours runs; enough to know an indented block for commands of a shell.
_COMMANDS = ("mpsagent-cli", "systemctl", "curl", "make", "apt", "apt-get", "echo", "python3", "podman", "journalctl")


class Example(NamedTuple):
    """A block of code in a page."""

    kind: str
    """``sh``, ``toml``, ``json`` or ``text``: as it is fenced, else as it looks."""
    text: str


def examples(text: str) -> list[Example]:
    found = [Example(*block) for block in _FENCED.findall(text)]
    for block in _INDENTED.findall(_FENCED.sub("", text)):
        plain = textwrap.dedent(block)
        first = plain.split("\n", 1)[0]
        if re.match(r'\[[\w."*/-]+\]|[a-z_.]+ += ', first):
            found.append(Example("toml", plain))
        elif first.startswith(("{", "[{")):
            shape = re.search(r'\{"\w+"[,}]', plain)  # the names of what there is, without values
            found.append(Example("text" if shape else "json", plain))
        else:
            synopsis = "[-" in plain
            found.append(Example("sh" if first.split()[0] in _COMMANDS and not synopsis else "text", plain))
    return found


def test_the_list_of_modules_is_that_of_the_modules() -> None:
    """Written from the modules' own first sentences: `make modules`."""
    path = ROOT / "packaging" / "write_module_table.py"
    spec = importlib.util.spec_from_file_location("write_module_table", path)
    assert spec is not None
    assert spec.loader is not None
    writer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writer)
    present = writer.TARGET.read_text(encoding="utf-8")
    assert writer.text(present) == present, "docs/develop/modules.md is out of date: run `make modules`"
    found = [*ROOT.glob("mpsagent/*/*.py"), *ROOT.glob("mpsagent_*/*.py")]
    modules = [path for path in found if path.name != "__init__.py"]
    assert present.count("\n- ") >= len(modules) > 50


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    """A reader who follows a name must find something: `make` targets too."""
    text = page.read_text(encoding="utf-8")
    tops = "docs|tests|policies|packaging|systemd|benchmarks|campaigns|demo"
    named = set(re.findall(rf"(?<![\w/.])((?:{tops})/[\w./-]*\w)", text))
    assert not [name for name in named if not (ROOT / name).exists()]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", ["security.md", "develop/nodes.md"])
def test_every_attack_and_every_mistake_names_tests_that_there_are(page: str) -> None:
    """A row without a test that shows it is only a claim."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rows = [row for row in text.splitlines() if row.startswith("| ") and not re.search(r"\| test \|", row)]
    assert len(rows) > 30
    assert [row for row in rows if not _TEST.search(row)] == []
    named = _TEST.findall(text)
    assert [one for one in named if not _defines(ROOT / one[0], one[1])] == []
    played = {hostile.ATTACKS[name].__name__ for name in hostile.SHORT}  # by test_hostile_day.py
    for found in map(_TEST.findall, rows):
        if {file for file, _ in found} == {"campaigns/hostile.py"}:
            assert played & {name for _, name in found}, found


def test_every_row_of_the_drivers_tables_is_compared_by_the_test_that_has_seen_it() -> None:
    """Of 470 to 550, which `make test` runs. A row that no run is compared with would soon be a legend."""
    named = []
    for path in [*(ROOT / "tests" / "nvidia").glob("test_*.py"), ROOT / "tests" / "booted" / "test_control_unit.py"]:
        calls = [one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.Call)]
        named += [one.args[1] for one in calls if isinstance(one.func, ast.Name) and one.func.id == "saw"]
    compared = {name.value for name in named if isinstance(name, ast.Constant)}
    rows = page.rows()
    assert len(rows) > 30
    tried = {row for row, said in rows.items() if set(list(said.values())[:3]) != {page.NOT_TRIED}}
    assert [row for row in tried if not any(row.startswith(str(one)) for one in compared)] == []


def test_the_bounds_of_units_are_those_of_the_units() -> None:
    """systemd and the kernel keep them; the page says what they are. The agent sets its descriptors itself."""
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    said = re.findall(r"^\| at most \| (.*?) \| (.*?) \| (.*?) \|", text, re.MULTILINE)
    bounds = []
    for unit in ("mpsagent-gate", "mpsagent", "mpsagent-api"):
        lines = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / "systemd" / f"{unit}.service").read_text(), re.MULTILINE))
        files = lines.get("LimitNOFILE", str(conditions.FILES))
        bound = f"{lines['MemoryMax']} of memory, {lines['TasksMax']} tasks, {files} files"
        bounds.append(bound + ", one processor" * (lines.get("CPUQuota") == "100%"))
    assert said == [tuple(bounds)]


def _defines(path: Path, name: str) -> bool:
    return path.exists() and re.search(rf"^(?:async )?def {name}\(", path.read_text(), re.MULTILINE) is not None


def test_every_measurement_that_is_named_exists() -> None:
    """A decision that names its measurement is worth nothing if that cannot be looked up."""
    known = {name[:2] for name in recordings.names()}
    sections = {(name[:2], key) for name in recordings.names() for key in recordings.sections(name)}
    scenarios = set(_SCENARIO.findall("".join(p.read_text() for p in (ROOT / "tests" / "conformance").glob("*.py"))))
    wrong = []
    for path in [*PAGES, *ROOT.glob("mpsagent*/**/*.py")]:
        text = " ".join(path.read_text(encoding="utf-8").split()).replace(" # ", " ")
        wrong += [(path.name, found) for found in _SECTION.findall(text) if found not in sections]
        wrong += [(path.name, found) for found in _RECORDING.findall(text) if found not in known]
        if path.suffix == ".md" or "conformance scenario" in text:
            wrong += [(path.name, found) for found in _SCENARIO.findall(text) if found not in scenarios]
    assert not wrong


_CODE = re.compile(r"\b(mpsagent/[\w/]+\.py)::(\w+)")
_SENDS = re.compile(r"pidfd_send_signal\(|os\.killp?g?\(|pthread_kill\(|\.send\((?:signal\.\w+|number|\w+\.signal)\)")


def _functions(path: Path) -> dict[str, str]:
    """The functions and methods of a module by name, with their texts; those of one name together."""
    text = path.read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for one in ast.walk(ast.parse(text)):
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            found[one.name] = found.get(one.name, "") + (ast.get_source_segment(text, one) or "")
    return found


def test_architecture_names_functions_that_there_are() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = _CODE.findall(text)
    assert len(named) > 20
    assert [one for one in named if one[1] not in _functions(ROOT / one[0])] == []
    assert [one for one in _TEST.findall(text) if not _defines(ROOT / one[0], one[1])] == []


def test_all_code_that_sends_a_signal_stands_in_architecture() -> None:
    """`mpsagent-cli run` runs a process of its own, as do the packages beside mpsagent."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    said = set(re.findall(r"^\| (mpsagent/[\w/]+\.py::\w+) \|", text, re.MULTILINE))
    sends = set()
    for path in (ROOT / "mpsagent").rglob("*.py"):
        name = str(path.relative_to(ROOT))
        if name != "mpsagent/cli/program.py":
            sends |= {f"{name}::{one}" for one, body in _functions(path).items() if _SENDS.search(body)}
    assert said == sends


def test_every_figure_names_its_output_and_every_output_is_named() -> None:
    """Device, driver and date stand in the name of the directory in which an output lies."""
    page = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
    measured = ROOT / "docs" / "measured"
    head = "| what | figure | output |"
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if "](measured/" in line and line[0] == "|"]
    assert len(rows) > 100
    assert page.count(head) > 10
    wrong = []
    for what, figure, links in rows:
        for said, name in re.findall(r"\[([^\]]+)\]\(measured/([^)]+)\)", links) or [("", "")]:
            place, _, file = name.rpartition("/")
            gpu, _, date = said.partition(", ")
            known = not place or place.startswith(f"{date}-{gpu.replace(' ', 'x')}-")
            if not (file and (measured / name).exists() and what and figure and known):
                wrong.append((what, name))
    assert wrong == []
    named = set(re.findall(r"\(measured/([^)]+)\)", page))
    there = {str(one.relative_to(measured)) for one in measured.rglob("*.*") if one.is_file()}
    assert {one for one in there - named if not one.endswith((".png", ".svg"))} == set()


def test_an_output_that_says_what_went_wrong_has_a_row_that_says_so() -> None:
    """ "Not good" marks what missed its aim; an output that says so itself cannot be told as a success."""
    page = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
    marked = {name for row in re.findall(r"^.*\*\*not good\*\*.*$", page, re.MULTILINE) for name in _LINK.findall(row)}
    outputs = (ROOT / "docs").glob("measured/*/*")
    wrong = [
        one for one in outputs if one.suffix in (".md", ".txt") and re.search(r"PROBLEM:|NOT GOOD", one.read_text())
    ]
    assert len(wrong) > 5
    assert {str(one.relative_to(ROOT / "docs")) for one in wrong} - marked == set()


def test_the_counts_of_disorder_are_those_of_its_outputs() -> None:
    page = (ROOT / "docs" / "measured.md").read_text(encoding="utf-8")
    part = page.partition("## Disorder")[2].partition("\n## ")[0]
    wrong, compared = [], 0
    for figure, links in re.findall(r"^\| [^|]* \| ([^|]* exact[^|]*) \| ([^|]*) \|$", part, re.MULTILINE):
        names = re.findall(r"\((measured/[^)]+/disorder[^)]+)\)", links)
        texts = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in names]
        seen = {int(one) for text in texts for one in re.findall(r'(?:clients: exact |"exact": )(\d+)', text)}
        said = {
            int(one)
            for counts in re.findall(r"((?:\d+(?:; | and )?)+) exact", figure)
            for one in re.findall(r"\d+", counts)
        }
        if names and not said <= seen:
            wrong.append((figure, said - seen))
        compared += len(said) if names else 0
    assert wrong == []
    assert compared > 20


def test_the_sum_of_disorder_is_that_of_its_outputs() -> None:
    """Of the runs since contexts are paced, without those in which MPS's own servers and daemons are killed."""
    runs, seen = 0, Counter[str]()
    for path in sorted((ROOT / "docs" / "measured").glob("*/disorder*")):
        text = path.read_text(encoding="utf-8")
        if "all-at-once" in path.name or re.search(r"killed \{[^}]*'(?:server|daemon)'", text):
            continue
        lines = re.findall(r"clients: (exact[^\n]*)", text)
        each = [{key: int(count) for key, count in re.findall(r"([a-z]+) (\d+)", line)} for line in lines]
        for counts in each or [json.loads(text)["counts"]]:
            runs += 1
            seen.update(counts)
    assert [seen[one] for one in ("over", "under", "outside", "refused")] == [0] * 4
    said = f"{runs} runs", f"{seen.total():,}", f"{seen['stuck']}", f"{seen['unexplained']}"
    page = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
    assert [one for one in said if one not in page] == []


def test_the_counts_in_readme_are_those_of_the_output_that_it_names() -> None:
    """A sum of many outputs could not be looked up, and left out the runs in which MPS's own servers are killed."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line for line in readme.splitlines() if "](docs/measured/" in line and line.startswith("|")]
    assert len(rows) >= 6
    (row,) = [line for line in rows if "hostile users" in line]
    output = (ROOT / re.findall(r"\((docs/measured/[^)]+)\)", row)[0]).read_text(encoding="utf-8")
    counts = {key: int(count) for key, count in re.findall(r"([a-z]+) (\d+)", output.partition("400 clients: ")[2])}
    assert [counts[one] for one in ("over", "under", "outside", "refused", "stuck", "unexplained")] == [0] * 6
    for word, key in (("exact", "exact"), ("hit by faults", "hit"), ("killed", "died"), ("denied", "denied")):
        assert f"{counts[key]} {word}" in row
    for row in rows:
        (name, *_) = re.findall(r"\((docs/measured/[^)]+)\)", row)
        output = (ROOT / name).read_text(encoding="utf-8").replace("**", "")
        for figure in re.findall(r"\d+ of \d+", row.partition(") | ")[2].partition(" ([")[0]):
            lost, ends = figure.split(" of ")
            assert figure in output or f"{ends} ends, {lost} with lost neighbours" in output, (figure, name)


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """To a file that there is, and to a heading in it. Nothing is fetched: links to other places are for people."""
    wrong = []
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        name, _, heading = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / name if name else page
        if not target.exists() or (heading and heading not in _headings(target)):
            wrong.append(link)
    assert wrong == []


def _headings(page: Path) -> set[str]:
    """As they are named in links."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


_OURS_ALONE = re.compile(
    r"\b(knock\w*|ladders?|keepers?|templates?|sightings?|admissions|fail-safe|nobody|what is so)\b", re.IGNORECASE
)


FOR_PEOPLE = [page for page in PAGES if page.parent in (ROOT, ROOT / "docs")]
FOR_PEOPLE += [*sorted((ROOT / "packaging" / "man").glob("*.[18]")), *sorted((ROOT / "systemd").glob("*.*"))]


@pytest.mark.parametrize("page", FOR_PEOPLE, ids=lambda page: page.name)
def test_pages_for_people_have_the_words_of_the_field(page: Path) -> None:
    """Words that only we know stand in no page, manual or unit; names of files, tests and code may have them."""
    words = re.sub(r"`[^`]*`", "", page.read_text(encoding="utf-8")).split()
    text = " ".join(one for one in words if not re.search(r"::|\]\(|/|\.(md|py|txt|json)\b", one))
    assert _OURS_ALONE.findall(text) == []


# Old names that the field, MPS or the api use for something else as well.
_STILL_USED = {"action", "control", "fault", "hang", "queue", "quit", "shared", "terminate", "leave"}


def old_names(text: str) -> list[str]:
    """Return names in code style that the policy had before today's, alone, as a key with its value, or as a value."""
    old = {name for one in (*OLD_KEYS.values(), *REMOVED_KEYS.values(), OLD_SECTIONS) for name in one}
    old |= {word for word, _ in OLD_WORDS if isinstance(word, str)}
    gone = old - _STILL_USED - {key.name for key in KEYS} | {"sms"}
    value = r'on_limit_exceeded = "(memory)"|(?:sharing|server_scope) = "(\w+)"'
    named = re.compile(rf"{value}|[^\w(]*(?:[\w-]+\.)?(\w+)[^\w(]*(?: = .*)?")
    found = [match for code in re.findall(r"`([^`\n]+)`", text) if (match := named.fullmatch(code))]
    return [name for match in found for name in match.groups() if name in gone]


@pytest.mark.parametrize("page", FOR_PEOPLE, ids=lambda page: page.name)
def test_no_page_for_administrators_has_an_old_name_of_the_policy(page: Path) -> None:
    """`policy check` refuses it. docs/develop/names.md alone lists the old names."""
    assert old_names(page.read_text(encoding="utf-8")) == []


def test_old_names_are_found() -> None:
    assert old_names('`threads`, `{ sms = 26 }`, `"memory"`, `sharing = "apart"`, ``together``') == [
        "threads", "sms", "memory", "apart", "together"
    ]  # fmt: skip
    assert old_names('`active_threads`, `on_stop = "quit"`, `server_scope = "user"`') == []
    described = json.dumps(json.loads((ROOT / "mpsagent/api/openapi.json").read_text(encoding="utf-8")))
    assert not re.search(r"``(apart|together)``", described)


def test_every_document_can_be_found_from_the_first() -> None:
    """README names it, or a page that README names: nobody reads what nothing leads to."""
    docs = ROOT / "docs"
    paths = [*docs.glob("*.md"), *(docs / "develop").glob("*.md")]
    pages = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    found, new = set[str](), {"README.md"}
    while new:
        name = new.pop()
        text = pages.get(name) or (ROOT / name).read_text(encoding="utf-8")
        found.add(name)
        new |= {one for one in pages if one in text or f"({one.removeprefix('docs/')}" in text} - found
    assert sorted(pages.keys() - found) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_example_is_of_its_language(page: Path) -> None:
    """People copy them. Policies are read as the agent reads them, with `...` nowhere."""
    for kind, text in examples(page.read_text(encoding="utf-8")):
        if kind == "toml":
            policy, errors = load([("example.toml", text)])
            assert policy is not None, f"{text}\n{errors}"
        elif kind == "json":
            json.loads(text)
        elif kind == "sh":
            done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, ""), text


def test_examples_are_found_and_told_apart() -> None:
    """The test above would pass if none were."""
    kinds = [one.kind for page in PAGES for one in examples(page.read_text(encoding="utf-8"))]
    assert kinds.count("sh") >= 20
    assert kinds.count("toml") >= 6
    assert kinds.count("json") >= 1
    made = examples("    [limits]\n    active_threads = '5%'\n\nand\n\n    curl x\n\n```json\n{}\n```\n")
    assert made == [("json", "{}\n"), ("toml", "[limits]\nactive_threads = '5%'\n"), ("sh", "curl x\n")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_a_page_shows_exists(page: Path) -> None:
    """With its options."""
    text = page.read_text(encoding="utf-8")
    shown = re.findall(r"`mpsagent-cli ([^`]+)`", text)
    for _, block in examples(text):
        shown += re.findall(r"(?:^|\$\()mpsagent-cli (\S.*)$", block, re.MULTILINE)
    assert [f"{one}: {said}" for one in shown if (said := complaint(one))] == []


_SIGNS = str.maketrans("'\"[](", "     ")


def complaint(command: str) -> str:
    """What is wrong with the words behind ``mpsagent-cli``; empty if nothing."""
    at: click.Command = cli
    for word in shlex.split(re.split(r"[#|>&;)]|\$\(", command)[0].translate(_SIGNS)):
        if word == "--":
            break
        if word.startswith("-") and word != "-":
            options = {name for one in at.params for name in (*one.opts, *one.secondary_opts)}
            if word.split("=")[0] not in {*options, "-h", "--help"}:
                return f"no option {word}"
        elif isinstance(at, click.Group):
            if word not in at.commands:
                return f"no command {word}"
            at = at.commands[word]
    return ""


def test_commands_that_there_are_not_are_found() -> None:
    assert complaint("lease kill 7") == "no command kill"
    assert complaint("report --by user --weekly") == "no option --weekly"
    assert complaint('terminate "$(pgrep x)"') == complaint("policy diff || true") == complaint("top") == ""


def shown(*pages: Path) -> str:
    """Everything that is in a block of these pages; of a page of the manual, its displayed lines."""
    return "\n".join(
        "\n".join(re.findall(r"^\.Dl (.*)$", text, re.MULTILINE)) if page.suffix == ".1"
        else "\n".join(one.text for one in examples(text))
        for page in pages for text in [page.read_text(encoding="utf-8")]
    )  # fmt: skip


def test_every_key_has_an_example() -> None:
    """In its section, on the page that mpsagent-policy(5) is made of."""

    def paths(values: dict[str, Any], *before: str) -> Iterator[tuple[str, ...]]:
        for name, one in values.items():
            yield (*before, name)
            yield from paths(one, *before, name) if isinstance(one, dict) else ()

    blocks = examples((ROOT / "docs/policy.md").read_text(encoding="utf-8"))
    found = {("", *path) for one in blocks if one.kind == "toml" for path in paths(tomllib.loads(one.text))}
    found |= {("", "limits", *path[3:]) for path in found if path[1] in ("group", "user", "cgroup")}
    have = {(path[at], path[-1]) for path in found for at in (1, -2)} | found
    assert {(key.section, key.name) for key in KEYS} - have == set()


MANUAL = ROOT / "packaging/man/mpsagent-cli.1"


def verbs(at: click.Group = cli, *before: str) -> Iterator[tuple[str, click.Command]]:
    """Each verb of the command line, with the names of its groups."""
    context = click.Context(at)
    for name in at.list_commands(context):
        one = at.get_command(context, name)
        assert one is not None
        if isinstance(one, click.Group):
            yield from verbs(one, *before, name)
        else:
            yield " ".join([*before, name]), one


def synopses(page: str) -> dict[str, str]:
    """The lines of the manual that name a verb with its options, those of one verb together."""
    names = sorted((name for name, _ in verbs()), key=len, reverse=True)
    found: dict[str, str] = {}
    for line in re.findall(r"^\.It Cm (.*)$", page, re.MULTILINE):
        for name in names:
            if line.startswith(name):
                found[name] = f"{found.get(name, '')} {line}"
                break
    return found


def test_the_manual_has_each_option_of_each_verb_and_no_others() -> None:
    """Five verbs had options that were gone, or lacked some, while a page said that the manual was complete."""
    page = MANUAL.read_text(encoding="utf-8")
    found = synopses(page)
    wrong = []
    for name, verb in verbs():
        options = {opt for one in verb.params if isinstance(one, click.Option) for opt in one.opts}
        due = {one for one in options if one.startswith("--")} - {"--json"}
        said = {f"-{word}" for word in found[name].split() if re.fullmatch(r"-[a-z][\w-]+", word)}
        wrong += [f"{name} {one}" for one in due ^ said]
    assert wrong == []
    assert found["events"].count("Fl f | -follow") == 1
    exceptions = page.partition("Each command except\n")[2].partition("takes\n.Fl -json")[0]
    without = [name for name, verb in verbs() if not any("--json" in one.opts for one in verb.params)]
    assert re.findall(r"^\.Cm (\w+)$", exceptions, re.MULTILINE) == without


def test_the_help_of_each_option_is_a_sentence() -> None:
    """It begins with what the option does: "Of off, turns" and "The same." told nothing without the line before."""
    options = [one for _, verb in verbs() for one in verb.params if isinstance(one, click.Option) and not one.hidden]
    helps = {one.help or "" for one in options}
    assert len(helps) > 60
    fragments = (
        r"(A|An|All|Also|Before|By|Even|For|How|Its?|No|Of|Only|Or|The|Those|Until|What|When|Where|Which|Who|Whose)"
    )
    wrong = [one for one in helps if not one or re.match(rf"{fragments} (?!set|show)", one) or not one[0].isupper()]
    assert wrong == []


def test_every_verb_has_an_example_and_the_manuals_are_right() -> None:
    text = shown(MANUAL, *(ROOT / "docs").glob("*.md"), ROOT / "README.md")
    assert [one for one, _ in verbs() if not re.search(rf"mpsagent-cli {one}\b", text)] == []
    commands = re.findall(r"mpsagent-cli ([a-z].*)$", shown(MANUAL), re.MULTILINE)
    assert len(commands) > 10
    assert [f"{one}: {said}" for one in commands if (said := complaint(one))] == []


def test_every_reason_to_wait_stands_in_the_api() -> None:
    """Programs compare the word: one that no page names is met in the night."""
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8").partition("| `reason` |")[2].partition("\n\n")[0]
    said = {word for row in re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE) for word in re.findall(r"`(\w+)`", row)}
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "mpsagent/core").glob("*.py"))
    assert said == set(re.findall(r'\bReason\(\s*"(\w+)"', code))


def test_the_orders_in_the_api_and_their_keys_are_those_of_the_agent() -> None:
    """A page showed keys of an order that the agent refuses."""
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    table = page.partition("| `order` | further keys |")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `([a-z-]+)` \|([^|]*)\|", table, re.MULTILINE))
    assert rows.keys() == ORDERS.keys()
    for name, (_, keys, _) in ORDERS.items():
        shown = {one for pair in re.findall(r'"(\w+)":|`"(\w+)"`', rows[name]) for one in pair if one}
        assert shown == keys.keys() - {"instance"}, name  # the paragraph below the table has `instance`


def test_every_label_of_a_metric_has_an_example() -> None:
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    named = {label for group in re.findall(r"mpsagent_\w+\{([\w,]+)\}", text) for label in group.split(",")}
    assert {"user", "job", "pod", "namespace", "outcome", "uuid"} <= named
    blocks = "\n".join(one.text for one in examples(text))
    assert [one for one in [*named, "mps_instance"] if not re.search(rf"[{{(, ]{one}[=),]", blocks)] == []
