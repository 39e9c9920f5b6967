"""What is wrong in a policy is said all at once, where it is, and so that one knows what to write instead."""

from __future__ import annotations

import pytest

from mpsagent.policy.files import LARGEST, LONGEST_LINE, MOST_ERRORS, load
from mpsagent.policy.origins import PolicyError
from mpsagent.policy.syntax import syntax_error


def errors(*texts: str) -> list[PolicyError]:
    policy, found = load([(f"{place}.toml", text) for place, text in enumerate(texts)], syntax_error)
    assert (policy is None) == bool(found), "a policy, or what is wrong with it, never both"
    return found


TEN = """\
enforce = "yes"
[limits]
threads = 150
memori = "20G"
[user.alice]
threads = "50%"
memory = "0G"
switch.after = 10
[group.students]
max_clients = 0
[hang]
control = "soon"
[agent]
on_stop = "exit"
[hook]
before_end = "/bin/true"
"""


def test_ten_mistakes_are_ten_errors() -> None:
    """Nobody wants to start the agent ten times. Exactly these, each with its line, key and a way out."""
    assert [str(one) for one in errors(TEN)] == [
        '0.toml:1: enforce: "yes" is neither true nor false; write true or false, without quotes',
        "0.toml:3: limits.threads: 150 is more than 100; write a percentage from 0.1 to 100",
        '0.toml:4: limits.memori: unknown key; did you mean "memory"?',
        '0.toml:6: user.alice.threads: "50%" is a text; write 50, without quotes and percent sign',
        '0.toml:7: user.alice.memory: "0G" would take the limit away in MPS; write "100%" for no limit, '
        'or at least "1M"',
        '0.toml:8: user.alice.switch.after: 10 has no unit; write a duration like "30s", "10m" or "1h30m", or "never"',
        "0.toml:10: group.students.max_clients: 0 is less than 1; write a whole number from 1 to 1000",
        '0.toml:12: hang.control: "soon" is not a duration; write a duration like "30s", "10m" or "1h30m"',
        '0.toml:14: agent.on_stop: "exit" is not possible here; did you mean "quit"?',
        '0.toml:15: hook: unknown key; did you mean "hooks"?',
    ]


def test_a_broken_file_does_not_hide_the_mistakes_in_others() -> None:
    """TOML's syntax errors come one at a time; everything else is still checked."""
    found = errors("[limits\nthreads = 5\n", "[limits]\nthreads = 0\n", "[limits]\nthreads = 5\nthreads = 6\n")
    assert [(one.file, one.line) for one in found] == [("0.toml", 1), ("1.toml", 2), ("2.toml", 3)]
    assert "not TOML" in found[0].problem
    assert "remove one of them" in found[2].hint


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("[limits]\nthreads =\n", 2, "a text needs quotes"),
        ("[limits]\nmemory = 20G\n", 2, "quotes"),
        ("[limits]\n[limits]\n", 2, "join the two"),
        ('[limits]\nmemory = "20G\nthreads = 3\n', 2, "quote"),
        ("[instance.a]\ndevices = [\n\n\n", 2, "bracket"),
        ("[user.jane doe]\n", 1, "quotes"),
        ("limits\n", 1, "key = value"),
        ("x = " + "[" * 2000 + "\n", 0, "no value of a policy needs that"),
        ("[limits]\nthreads = 1" + "0" * 4100 + "\n", 2, "several lines"),
        ("\x00", 1, ""),
        ("a = 'x\x1b'\n", 1, ""),
    ],
)
def test_syntax_errors_have_a_line_and_a_hint(text: str, line: int, hint: str) -> None:
    """A half-written file is the most common mistake of all."""
    (found,) = errors(text)
    assert (found.line, found.key) == (line, "")
    assert found.hint
    assert hint in found.hint
    assert str(found).isprintable()
    (plain,) = load([("0.toml", text)])[1]  # the agent's own words, which name who has better ones
    assert (plain.problem, plain.line) == (found.problem, found.line) or "policy check" in plain.hint
    assert str(plain).isprintable()


@pytest.mark.parametrize(
    ("line", "key", "says"),
    [
        ("threads = 0", "limits.threads", "less than 0.1"),
        ("threads = -5", "limits.threads", "less than 0.1"),
        ("threads = nan", "limits.threads", "not a usable number"),
        ("threads = inf", "limits.threads", "not a usable number"),
        ("threads = -inf", "limits.threads", "not a usable number"),
        ("threads = true", "limits.threads", "not a number"),
        ("threads = 99999999999999999999999999", "limits.threads", "more than 18 digits is more than 100"),
        ("threads = 0x" + "f" * 3000, "limits.threads", "more than 100"),
        ("threads = 1e308", "limits.threads", "more than 100"),
        ('threads = "101"', "limits.threads", "is a text"),
        ("threads = []", "limits.threads", "a list is not a number"),
        ("threads = 1979-05-27", "limits.threads", "not a number"),
        ("threads = {}", "limits.threads", "says nothing"),
        ("threads = { sms = 1 }", "limits.threads.sms", "less than 2"),
        ("threads = { sms = 2.5 }", "limits.threads.sms", "not a whole number"),
        ("threads = { sms = true }", "limits.threads.sms", "not a whole number"),
        ("threads = { sms = 4, weight = 2 }", "limits.threads", "sms and weight"),
        ('threads = { sms = 4, rule = "even" }', "limits.threads.rule", "not possible here"),
        ('threads = { clients = 4, rule = "evn" }', "limits.threads.rule", '"evn" is not possible'),
        ("threads = { client = 4 }", "limits.threads.client", "unknown key"),
        ("threads = { weight = 0 }", "limits.threads.weight", "less than 0.001"),
        ("threads = { weight = nan }", "limits.threads.weight", "not a usable number"),
        ("memory = 20", "limits.memory", "has no unit"),
        ('memory = "20"', "limits.memory", "has no unit"),
        ('memory = "512K"', "limits.memory", "less than 1M"),
        ('memory = "0"', "limits.memory", "take the limit away"),
        ('memory = "0%"', "limits.memory", "less than 0.1%"),
        ('memory = "101%"', "limits.memory", "more than 100%"),
        ('memory = "-1G"', "limits.memory", "not a size"),
        ('memory = "999999999T"', "limits.memory", "more than 100T"),
        ('memory = "lots"', "limits.memory", "not a size"),
        ('memory = "1\\u0661G"', "limits.memory", "not a size"),
        ("memory = {}", "limits.memory", "says nothing"),
        ('memory = { x = "1G" }', "limits.memory.x", "not a device"),
        ('memory = { 0 = { 0 = "1G" } }', "limits.memory.0", "not a size"),
        ("max_clients = 3.0", "limits.max_clients", "not a whole number"),
        ('memory = "' + "1" * 3000 + 'G"', "limits.memory", "longer than 40 characters"),
        ('max_runtime = "0s"', "limits.max_runtime", "less than 1s"),
        ('max_runtime = "999999999d"', "limits.max_runtime", "more than 3650d"),
        ('idle_timeout = ""', "limits.idle_timeout", "not a duration"),
        ('idle_timeout = "' + "1s" * 1000 + '"', "limits.idle_timeout", "longer than 40 characters"),
        ("enforce = 1", "limits.enforce", "neither true nor false"),
        ('"\\u001b[2J" = 1', 'limits."\\x1b[2J"', "unknown key"),
    ],
)
def test_hostile_values_are_errors(line: str, key: str, says: str) -> None:
    """Whatever stands there: one error that names the key, and nothing that could upset a terminal."""
    (found,) = errors(f"[limits]\n{line}\n")
    assert (found.line, found.key) == (2, key)
    assert says in found.problem
    assert found.hint
    assert str(found).isprintable()
    assert len(str(found)) < 400


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        ('[user."a\\u0000b"]\nthreads = 5\n', 'user."a\\x00b"', "is not a name"),
        ('[user." "]\nthreads = 5\n', 'user." "', "is not a name"),
        ('[user."../x"]\nthreads = 5\n', 'user."../x"', "is not a name"),
        ("[user.007]\nthreads = 5\n", "user.007", "is not a uid"),
        ("[user.4294967295]\nthreads = 5\n", "user.4294967295", "is not a uid"),
        ('[group.""]\nthreads = 5\n', 'group.""', "is not a name"),
        ("[user]\nthreads = 5\n", "user.threads", "is not a section"),
        ("limits = 3\n", "limits", "is not a section"),
        ("[[limits]]\nthreads = 3\n", "limits", "is not a section"),
        ("user = []\n", "user", "is not a section"),
        ("[user.jane.doe]\nthreads = 3\n", "user.jane.doe", "unknown key"),
        ('[user.jane]\ngrace = "3s"\n', "user.jane.grace", "unknown key"),
        ("[switch]\nthreads = 3\n", "switch.threads", "unknown key"),
        ("[users.jane]\nthreads = 3\n", "users", "unknown key"),
        ('[switch]\naction = "kill"\n', "switch.action", "not possible"),
        ('[switch]\ngrace = "never"\n', "switch.grace", "not a duration"),
        ('[hang]\ncontrol = "0s"\n', "hang.control", "less than 100ms"),
        ('[hang]\ncontrol = "2d"\n', "hang.control", "more than 1d"),
        ('[hooks]\nbefore_end = "rm -rf"\n', "hooks.before_end", "absolute path"),
        ('[hooks]\nbefore_end = ["/bin/sh", "-c"]\n', "hooks.before_end", "absolute path"),
        ('[instance.a]\npipe_directory = "/tmp/../etc"\n', "instance.a.pipe_directory", '".."'),
        ('[instance.a]\npipe_directory = "/tmp"\n', "instance.a.pipe_directory", "not a directory of its own"),
        ('[instance.a]\nlog_directory = "/var//log/"\n', "instance.a.log_directory", "not a directory of its own"),
        ('[instance.a]\nlog_directory = "/root"\n', "instance.a.log_directory", "not a directory of its own"),
        (
            '[instance.a]\npipe_directory = "/run/mpsagent/instances/a/pipe"\n',
            "instance.a.pipe_directory",
            "not a directory of its own",
        ),
        ('[instance."x y"]\nserver = "own"\n', 'instance."x y"', "cannot be part of a unit's name"),
        ('[instance.".."]\nserver = "own"\n', 'instance.".."', "cannot be part of a unit's name"),
        ('[instance.a]\npipe_directory = "/' + "x" * 88 + '"\n', "instance.a.pipe_directory", "longer than 88"),
        ('[instance.a]\ndevices = "GPU-1"\n', "instance.a.devices", "not a list"),
        ('[instance.a]\ndevices = ["GPU-1", "GPU-1"]\n', "instance.a.devices.1", "twice"),
        ("[instance.a]\ndevices = [0]\n", "instance.a.devices.0", "not the UUID"),
        ('[instance.a]\ncompute_mode = "exclusive_process"\n', "instance.a.compute_mode", "not possible"),
        ('[instance.a]\ncontrol_program = "a; b"\n', "instance.a.control_program", "not a program"),
        ('[instance.a]\nserver = "two"\n', "instance.a.server", "not possible"),
        ('[instance]\nserver = "own"\n', "instance.server", "is not a section"),
        ("[limits]\naccess = false\n", "limits.access", "false is not possible"),
        ("[[user]]\nthreads = 5\n", "user", "is not a section"),
        ("[hang.control.server]\n", "hang.control", "a table is not a duration"),
        ('[limits.memory.0.x]\ny = "1G"\n', "limits.memory.0", "a table is not a size"),
        ("[switch]\nafter.x.y = 1\n", "switch.after", "a table is not a duration"),
    ],
)
def test_hostile_sections_are_errors(text: str, key: str, says: str) -> None:
    """The same for names, sections and the agent's own keys."""
    (found,) = errors(text)
    assert found.key == key
    assert found.line in (1, 2)
    assert says in found.problem
    assert found.hint
    assert str(found).isprintable()


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[limit]\nthreads = 5\n", 'did you mean "limits"?'),
        ("[limits]\nthread = 5\n", 'did you mean "threads"?'),
        ("[users.jane]\nthreads = 3\n", 'did you mean "user"?'),
        ("[user.jane.doe]\nthreads = 3\n", 'a name with a dot needs quotes: [user."jane.doe"]'),
        ('[user.jane]\ngrace = "3s"\n', "write switch.grace"),
        ("[switch]\nthreads = 3\n", "it belongs in [limits]"),
        ('[agent]\npipe_directory = "/x"\n', "it belongs in [instance.NAME]"),
        ("[limits]\nthreads = { wieght = 5 }\n", 'did you mean "weight"?'),
        ('[switch]\naction = "terminated"\n', 'did you mean "terminate"?'),
        ('[instance.a]\ncompute_mode = "exclusive_process"\n', 'did you mean "exclusive-process"?'),
        ("[user.jane.m.doe]\nthreads = 3\n", 'a name with a dot needs quotes: [user."jane.m.doe"]'),
        ('[user.jane.doe.switch]\nafter = "1m"\n', 'a name with a dot needs quotes: [user."jane.doe"]'),
        ("[user.alice.limits]\nthreads = 5\n", "its keys stand in [user.alice] itself"),
        ("[limits.user.alice]\nthreads = 5\n", "[user.NAME] stands by itself, not within [limits]"),
        ('[user.alice.hooks]\nbefore_end = "/x"\n', "[hooks] stands by itself, not within [user.alice]"),
        ("[user]\nthreads = 5\n", "say whose: [user.NAME] with threads below it"),
        ("[[user]]\nthreads = 5\n", "write [user.NAME] and its keys below"),
        ("threads = 5\n", "it belongs in [limits]"),
        ('server = "own"\n', "it belongs in [hang] or [instance.NAME]"),
        ("[group.a]\nacces = 'deny'\n", 'did you mean "access"?'),
    ],
)
def test_the_hint_is_what_was_meant(text: str, hint: str) -> None:
    """A mistake that people really make, and the answer that ends it."""
    (found,) = errors(text)
    assert found.hint == hint


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("[limits]\n\n[limits]\n", 3, "the section [limits] is there twice, first on line 1"),
        ('[user."j.d"]\n[limits]\n[user."j.d"]\n', 3, 'the section [user."j.d"] is there twice, first on line 1'),
        ("limits.threads = 1\n[limits]\n", 2, "the section [limits] is there twice, first on line 1"),
        ("[limits]\nthreads = 1\nthreads = 2\n", 3, "limits.threads is there twice, first on line 2"),
        ("[limits]\nthreads = 1\n[limits.threads]\nsms = 4\n", 3, "limits.threads is there twice, first on line 2"),
        ("[limits]\nmemory = { 0 = '1G', 0 = '2G' }\n", 2, "a key stands twice between { and }"),
        ("[hang]\ncontrol = \u201c10s\u201d\n", 2, "found U+201C (left double quotation mark)"),
        ("[limits]\n\u00a0threads = 1\n", 2, "found U+00A0 (no-break space)"),
        (".".join("a" * 2000) + " = 1\n", 0, "a key has too many parts"),
        ("x = " + "[" * 2000 + "\n", 0, "brackets within brackets without end"),
        ("[limits]\nthreads = 1" + "0" * 4080 + "\n", 2, "more than 18 digits is more than 100"),
        ("\ufeff[limits]\nthreads = 1\n", 1, "begins with a byte order mark (BOM)"),
    ],
)
def test_a_parsers_complaints_are_told_in_words_of_people(text: str, line: int, problem: str) -> None:
    """No tuples, no namespaces: what is there, and where it was first."""
    (found,) = errors(text)
    assert found.line == line
    assert problem in found.problem
    assert "('" not in str(found)
    assert str(found).isprintable()


def test_a_key_that_does_nothing_is_none() -> None:
    """No release ever had it: accepted, it would look as if it did something."""
    (found,) = errors('[agent]\nparked_user = "mps"\n')
    assert (found.line, found.key, found.problem) == (2, "agent.parked_user", "unknown key")


def test_every_wrong_entry_of_one_value_is_named() -> None:
    """A table for eight devices may have eight mistakes on one line."""
    found = errors('[limits]\nmemory = { 0 = 1, x = "1G", 2 = "9%", 3 = "1" }\n')
    assert [one.key for one in found] == ["limits.memory.0", "limits.memory.x", "limits.memory.3"]
    assert {one.line for one in found} == {2}


def test_sizes_are_bounded() -> None:
    """A log file copied to the wrong place must not keep the agent busy, nor fill its own log."""
    (found,) = errors("#" * 10_000_000)
    assert "larger than 256 KiB" in found.problem
    (found,) = errors("\n#" + "x" * LONGEST_LINE)
    assert (found.line, "characters" in found.problem) == (2, True)
    many = "".join(f"k{place} = 1\n" for place in range(LARGEST // 16))
    found_many = errors(many)
    assert len(found_many) == MOST_ERRORS + 1
    assert f"and {LARGEST // 16 - MOST_ERRORS} more mistakes" in found_many[-1].problem


HURTFUL = {
    "a long dotted key": ".".join("a" * 2000) + " = 1\n",
    "a long section": "[" + ".".join("a" * 2000) + "]\n",
    "many long sections": "\n".join("[" + ".".join("a" * 1000 + str(place)) + "]" for place in range(60)),
    "deep tables": "x = " + "{ a = " * 500 + "1" + " }" * 500,
    "backslashes": 'x = """' + "\\" * 4000 + '"""\n',
    "quotes": "x = " + "'" * 3000,
    "many instances": "[instance]\n" + "".join(f"a{place} = {{}}\n" for place in range(10_000)),
    "many users": "".join(f"[user.u{place}]\nthreads = 5\n" for place in range(9_000)),
    "many lines": "\n" * (LARGEST - 1),
    "byte order mark": "\ufeff[limits]\n",
    "carriage returns": "[limits]\r\nthreads = 5\r\n",
    "a carriage return": "\r",
    "a surrogate": "x = '\ud800'\n",
}


@pytest.mark.parametrize("what", HURTFUL)
@pytest.mark.timeout(120)
def test_texts_made_to_hurt_a_parser_are_harmless(what: str) -> None:
    """Depth, width and quotes: an answer in bounded time, whatever it is."""
    errors(HURTFUL[what])


@pytest.mark.parametrize(("text", "hint"), [
    ('[limits]\ntotal_memory = "5G"\n', "set memory, the limit of each process"),
    ("[limits]\nenforce = no\n", "write true or false"),
    ("enforce = False  # for now\n", "write true or false"),
    ('[cgroup."/a"]\naccess = "deny"\n', "only [limits], [user.NAME] and [group.NAME] have it: write it for the users"),
    ("[limits]\nthreads = 33,3\n", "a number has a point and no comma: 33.3"),
    ("[limits]\nmemory = 25%\n", 'a part of the memory needs quotes: "25%"; threads has no percent sign: 25'),
    ('[limits]\nmem = "5G"\n', 'did you mean "memory"?'),
    ("[limits]\nthreads = 150\n", "write a percentage from 0.1 to 100"),
    ("[limits]\nthreads = half\n", 'a text needs quotes: "10m", "20G"'),
])  # fmt: skip
def test_the_hint_is_for_what_was_written(text: str, hint: str) -> None:
    """Several led astray: `lower memory` where there was none, quotes around `no`, a section that has no such key."""
    (found,) = errors(text)
    assert found.hint == hint
