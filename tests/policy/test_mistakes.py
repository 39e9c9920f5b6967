"""What is wrong in a policy is said all at once, where it is, and so that one knows what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpsagent.policy.files import LARGEST, LONGEST_LINE, MOST_ERRORS, load
from mpsagent.policy.keys import REMOVED_KEYS
from mpsagent.policy.origins import PolicyError
from mpsagent.policy.syntax import syntax_error

NAMES = Path(__file__).parents[2] / "docs/develop/names.md"


def errors(*texts: str) -> list[PolicyError]:
    policy, found = load([(f"{place}.toml", text) for place, text in enumerate(texts)], syntax_error)
    assert (policy is None) == bool(found), "a policy, or what is wrong with it, never both"
    return found


TEN = """\
mode = "yes"
[limits]
active_threads = "150%"
memori = "20G"
[user.alice]
active_threads = 0.5
memory_limit = "0G"
turn.time_limit = 10
[group.students]
max_clients = 0
[timeouts]
control_daemon = "soon"
[agent]
on_stop = "exit"
[hook]
pre_terminate = "/bin/true"
"""


def test_ten_mistakes_are_ten_errors() -> None:
    """Nobody wants to start the agent ten times. Exactly these, each with its line, key and a way out."""
    assert [str(one) for one in errors(TEN)] == [
        '0.toml:1: mode: "yes" is not possible here; write "enforce" or "report"',
        '0.toml:3: limits.active_threads: "150%" is '
        "more than 100%; write a part of the multiprocessors from 0.1% to 100%",
        '0.toml:4: limits.memori: unknown key; did you mean "memory_limit"?',
        '0.toml:6: user.alice.active_threads: 0.5 has no percent sign; write "50%"',
        '0.toml:7: user.alice.memory_limit: "0G" would take the limit away in MPS; write "100%" for no limit, '
        'or at least "1M"',
        "0.toml:8: user.alice.turn.time_limit: 10 has "
        'no unit; write a duration like "30s", "10m" or "1h30m", or "never"',
        "0.toml:10: group.students.max_clients: 0 is less than 1; write a whole number from 1 to 1000",
        '0.toml:12: timeouts.control_daemon: "soon" is not a duration; write a duration like "30s", "10m" or "1h30m"',
        '0.toml:14: agent.on_stop: "exit" is not possible here; did you mean "quit"?',
        '0.toml:15: hook: unknown section; did you mean "hooks"?',
    ]


def test_a_broken_file_does_not_hide_the_mistakes_in_others() -> None:
    """TOML's syntax errors come one at a time; everything else is still checked."""
    found = errors(
        "[limits\nactive_threads = '5%'\n",
        "[limits]\nactive_threads = '0%'\n",
        "[limits]\nactive_threads = '5%'\nactive_threads = '6%'\n",
    )
    assert [(one.file, one.line) for one in found] == [("0.toml", 1), ("1.toml", 2), ("2.toml", 3)]
    assert "not TOML" in found[0].problem
    assert "remove one of them" in found[2].hint


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("[limits]\nthreads =\n", 2, "a text needs quotes"),
        ("[limits]\nmemory = 20G\n", 2, "quotes"),
        ("[limits]\n[limits]\n", 2, "join the two"),
        ('[limits]\nmemory_limit = "20G\nactive_threads = "3%"\n', 2, "quote"),
        ("[instance.a]\ndevices = [\n\n\n", 2, "bracket"),
        ("[user.jane doe]\n", 1, "quotes"),
        ("limits\n", 1, "key = value"),
        ("x = " + "[" * 2000 + "\n", 0, "no value of a policy needs that"),
        ("[limits]\nactive_threads = '1%'" + "0" * 4100 + "\n", 2, "several lines"),
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
        ("active_threads = 0", "limits.active_threads", "not a number of multiprocessors"),
        ("active_threads = -5", "limits.active_threads", "not a number of multiprocessors"),
        ("active_threads = nan", "limits.active_threads", "has no percent sign"),
        ("active_threads = inf", "limits.active_threads", "has no percent sign"),
        ("active_threads = -inf", "limits.active_threads", "has no percent sign"),
        ("active_threads = true", "limits.active_threads", "not a number of multiprocessors"),
        ("active_threads = 99999999999999999999999999", "limits.active_threads", "not a number of multiprocessors"),
        ("active_threads = 0x" + "f" * 3000, "limits.active_threads", "not a number of multiprocessors"),
        ("active_threads = 1e308", "limits.active_threads", "has no percent sign"),
        ('active_threads = "101"', "limits.active_threads", "not a percentage"),
        ('active_threads = "101%"', "limits.active_threads", "more than 100%"),
        ('active_threads = "0%"', "limits.active_threads", "less than 0.1%"),
        ("active_threads = 1", "limits.active_threads", "not a number of multiprocessors"),
        ("active_threads = []", "limits.active_threads", "not a number of multiprocessors"),
        ("active_threads = 1979-05-27", "limits.active_threads", "not a number of multiprocessors"),
        ("active_threads = {}", "limits.active_threads", "says nothing"),
        ('active_threads = { weight = 4, rule = "even" }', "limits.active_threads.rule", "not possible here"),
        ('active_threads = { clients = 4, rule = "evn" }', "limits.active_threads.rule", '"evn" is not possible'),
        ("active_threads = { client = 4 }", "limits.active_threads.client", "unknown key"),
        ("active_threads = { weight = 0 }", "limits.active_threads.weight", "less than 0.001"),
        ("active_threads = { weight = nan }", "limits.active_threads.weight", "not a usable number"),
        ("memory_limit = 20", "limits.memory_limit", "has no unit"),
        ('memory_limit = "20"', "limits.memory_limit", "has no unit"),
        ('memory_limit = "512K"', "limits.memory_limit", "less than 1M"),
        ('memory_limit = "0"', "limits.memory_limit", "take the limit away"),
        ('memory_limit = "0%"', "limits.memory_limit", "less than 0.1%"),
        ('memory_limit = "101%"', "limits.memory_limit", "more than 100%"),
        ('memory_limit = "-1G"', "limits.memory_limit", "not a size"),
        ('memory_limit = "999999999T"', "limits.memory_limit", "more than 100T"),
        ('memory_limit = "lots"', "limits.memory_limit", "not a size"),
        ('memory_limit = "1\\u0661G"', "limits.memory_limit", "not a size"),
        ("memory_limit = {}", "limits.memory_limit", "says nothing"),
        ('memory_limit = { x = "1G" }', "limits.memory_limit.x", "not a device"),
        ('memory_limit = { 0 = { 0 = "1G" } }', "limits.memory_limit.0", "not a size"),
        ("max_clients = 3.0", "limits.max_clients", "not a whole number"),
        ('memory_limit = "' + "1" * 3000 + 'G"', "limits.memory_limit", "longer than 40 characters"),
        ('max_runtime = "0s"', "limits.max_runtime", "less than 1s"),
        ('max_runtime = "999999999d"', "limits.max_runtime", "more than 3650d"),
        ('idle_timeout = ""', "limits.idle_timeout", "not a duration"),
        ('idle_timeout = "' + "1s" * 1000 + '"', "limits.idle_timeout", "longer than 40 characters"),
        ("max_clients = true", "limits.max_clients", "not a whole number"),
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
        ('[user."a\\u0000b"]\nactive_threads = "5%"\n', 'user."a\\x00b"', "is not a name"),
        ('[user." "]\nactive_threads = "5%"\n', 'user." "', "is not a name"),
        ('[user."../x"]\nactive_threads = "5%"\n', 'user."../x"', "is not a name"),
        ("[user.007]\nactive_threads = '5%'\n", "user.007", "is not a uid"),
        ("[user.4294967295]\nactive_threads = '5%'\n", "user.4294967295", "is not a uid"),
        ('[group.""]\nactive_threads = "5%"\n', 'group.""', "is not a name"),
        ("[user]\nactive_threads = '5%'\n", "user.active_threads", "is not a section"),
        ("limits = 3\n", "limits", "is not a section"),
        ("[[limits]]\nactive_threads = '3%'\n", "limits", "is not a section"),
        ("user = []\n", "user", "is not a section"),
        ("[user.jane.doe]\nactive_threads = '3%'\n", "user.jane.doe", "unknown key"),
        ('[user.jane]\ngrace = "3s"\n', "user.jane.grace", "unknown key"),
        ("[turn]\nactive_threads = '3%'\n", "turn.active_threads", "unknown key"),
        ("[users.jane]\nactive_threads = '3%'\n", "users", "unknown section"),
        ('[turn]\non_expiry = "kill"\n', "turn.on_expiry", "not possible"),
        ('[turn]\ngrace = "never"\n', "turn.grace", "not a duration"),
        ('[timeouts]\ncontrol_daemon = "0s"\n', "timeouts.control_daemon", "less than 100ms"),
        ('[timeouts]\ncontrol_daemon = "2d"\n', "timeouts.control_daemon", "more than 1d"),
        ('[hooks]\npre_terminate = "rm -rf"\n', "hooks.pre_terminate", "absolute path"),
        ('[hooks]\npre_terminate = ["/bin/sh", "-c"]\n', "hooks.pre_terminate", "absolute path"),
        ('[instance.a]\npipe_directory = "/tmp/../etc"\n', "instance.a.pipe_directory", '".."'),
        ('[instance.a]\npipe_directory = "/tmp"\n', "instance.a.pipe_directory", "not a directory of its own"),
        ('[instance.a]\nlog_directory = "/var//log/"\n', "instance.a.log_directory", "not a directory of its own"),
        ('[instance.a]\nlog_directory = "/root"\n', "instance.a.log_directory", "not a directory of its own"),
        (
            '[instance.a]\npipe_directory = "/run/mpsagent/instances/a/pipe"\n',
            "instance.a.pipe_directory",
            "not a directory of its own",
        ),
        ('[instance."x y"]\nserver_scope = "user"\n', 'instance."x y"', "cannot be part of a unit's name"),
        ('[instance.".."]\nserver_scope = "user"\n', 'instance.".."', "cannot be part of a unit's name"),
        ('[instance.a]\npipe_directory = "/' + "x" * 88 + '"\n', "instance.a.pipe_directory", "longer than 88"),
        ('[instance.a]\ndevices = "GPU-1"\n', "instance.a.devices", "not a list"),
        ('[instance.a]\ndevices = ["GPU-1", "GPU-1"]\n', "instance.a.devices.1", "twice"),
        ("[instance.a]\ndevices = [0]\n", "instance.a.devices.0", "not the UUID"),
        ('[instance.a]\ncompute_mode = "exclusive_process"\n', "instance.a.compute_mode", "not possible"),
        ('[instance.a]\ncontrol_daemon_path = "a; b"\n', "instance.a.control_daemon_path", "not a program"),
        ('[instance.a]\nserver_scope = "two"\n', "instance.a.server_scope", "not possible"),
        ('[instance]\nserver_scope = "user"\n', "instance.server_scope", "is not a section"),
        ("[limits]\naccess = false\n", "limits.access", "false is not possible"),
        ("[[user]]\nactive_threads = '5%'\n", "user", "is not a section"),
        ("[timeouts.control_daemon.server]\n", "timeouts.control_daemon", "a table is not a duration"),
        ('[limits.memory_limit.0.x]\ny = "1G"\n', "limits.memory_limit.0", "a table is not a size"),
        ("[turn]\ntime_limit.x.y = 1\n", "turn.time_limit", "a table is not a duration"),
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
        ("[limit]\nactive_threads = '5%'\n", 'did you mean "limits"?'),
        ("[limits]\nthread = 5\n", 'did you mean "active_threads"?'),
        ("[users.jane]\nactive_threads = '3%'\n", 'did you mean "user"?'),
        ("[user.jane.doe]\nactive_threads = '3%'\n", 'a name with a dot needs quotes: [user."jane.doe"]'),
        ('[user.jane]\ngrace = "3s"\n', "write turn.grace"),
        ("[turn]\nactive_threads = '3%'\n", "it belongs in [limits]"),
        ('[agent]\npipe_directory = "/x"\n', "it belongs in [instance.NAME]"),
        ("[limits]\nactive_threads = { wieght = 5 }\n", 'did you mean "weight"?'),
        ('[turn]\non_expiry = "terminated"\n', 'did you mean "terminate"?'),
        ('[instance.a]\ncompute_mode = "exclusive_process"\n', 'did you mean "exclusive-process"?'),
        ("[user.jane.m.doe]\nactive_threads = '3%'\n", 'a name with a dot needs quotes: [user."jane.m.doe"]'),
        ('[user.jane.doe.turn]\ntime_limit = "1m"\n', 'a name with a dot needs quotes: [user."jane.doe"]'),
        ("[user.alice.limits]\nactive_threads = '5%'\n", "its keys stand in [user.alice] itself"),
        ("[limits.user.alice]\nactive_threads = '5%'\n", "[user.NAME] stands by itself, not within [limits]"),
        ('[user.alice.hooks]\npre_terminate = "/x"\n', "[hooks] stands by itself, not within [user.alice]"),
        ("[user]\nactive_threads = '5%'\n", "say whose: [user.NAME] with active_threads below it"),
        ("[[user]]\nactive_threads = '5%'\n", "write [user.NAME] and its keys below"),
        ("active_threads = 5\n", "it belongs in [limits]"),
        ('server_scope = "user"\n', "it belongs in [instance.NAME]"),
        ("[group.a]\nacces = 'deny'\n", 'did you mean "access"?'),
        ("[limits]\nthreads = 5\n", 'it is called "active_threads" now: write active_threads = "5%"'),
        ("[limits]\nthreads = 12.5\n", 'it is called "active_threads" now: write active_threads = "12.5%"'),
        ("[limits]\nthreads = { sms = 26 }\n", 'it is called "active_threads" now: write active_threads = 26'),
        ("[limits]\nthreads = { clients = 4 }\n", 'it is called "active_threads" now'),
        ("[limits]\nthreads = 500\n", 'it is called "active_threads" now'),
        (
            "[user.alice]\ntotal_threads = 50\n",
            'it is called "total_active_threads" now: write total_active_threads = "50%"',
        ),
        ("[group.a]\nswitch.after = '5m'\n", 'it is called "turn" now'),
        ("[instance.a.switch]\nafter = '5m'\n", 'it is called "turn" now'),
        ("[switch]\nafter = '5m'\n", 'it is called "turn" now'),
        ("[turn]\nafter = '5m'\n", 'it is called "time_limit" now'),
        ("[user.alice]\nmemory = '5G'\n", 'it is called "memory_limit" now'),
        ("enforce = false\n", 'it is called "mode" now: write mode = "report"'),
        ("[user.alice]\nenforce = true\n", 'it is called "mode" now: write mode = "enforce"'),
        ("mode = false\n", 'it is called "report" now'),
        ("[instance.a]\nserver = 'own'\n", 'it is called "server_scope" now: write server_scope = "user"'),
        ("[agent]\nplacement = 'own'\n", 'it is called "by-directory" now'),
        ("[turn]\naction = 'quit'\n", 'it is called "on_expiry" now: write on_expiry = "restart-mps"'),
        ("[turn]\naction = 'pause'\n", 'it is called "on_expiry" now'),
        ("[instance.a]\nsharing = 'apart'\n", 'it is called "per-user" now'),
        ("[instance.a]\nserver_scope = 'shared'\n", 'it is called "all" now'),
    ],
)
def test_the_hint_is_what_was_meant(text: str, hint: str) -> None:
    """A mistake that people really make, and the answer that ends it."""
    (found,) = errors(text)
    assert found.hint == hint


@pytest.mark.parametrize(
    ("section", "name", "hint"),
    [(section, name, hint) for section, keys in REMOVED_KEYS.items() for name, hint in keys.items()],
)
def test_a_removed_key_is_a_mistake_that_tells_what_holds_now(section: str, name: str, hint: str) -> None:
    title = "instance.a" if section == "instance" else section
    (found,) = errors(f"[{title}]\n{name} = 1\n" if section else f"[{name}]\n")
    what = (f"{title}.{name}", "this key no longer exists") if section else (name, "this section no longer exists")
    assert (found.key, found.problem, found.hint) == (*what, hint)
    written = NAMES.read_text()
    assert f"`{name}`" in written or f".{name}`" in written or f"`[{name}]`" in written


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("[limits]\n\n[limits]\n", 3, "the section [limits] is there twice, first on line 1"),
        ('[user."j.d"]\n[limits]\n[user."j.d"]\n', 3, 'the section [user."j.d"] is there twice, first on line 1'),
        ("limits.active_threads = '1%'\n[limits]\n", 2, "the section [limits] is there twice, first on line 1"),
        (
            "[limits]\nactive_threads = '1%'\nactive_threads = '2%'\n",
            3,
            "limits.active_threads is there twice, first on line 2",
        ),
        (
            "[limits]\nactive_threads = '1%'\n[limits.active_threads]\nsms = 4\n",
            3,
            "limits.active_threads is there twice, first on line 2",
        ),
        ("[limits]\nmemory_limit = { 0 = '1G', 0 = '2G' }\n", 2, "a key stands twice between { and }"),
        ("[timeouts]\ncontrol = \u201c10s\u201d\n", 2, "found U+201C (left double quotation mark)"),
        ("[limits]\n\u00a0threads = 1\n", 2, "found U+00A0 (no-break space)"),
        (".".join("a" * 2000) + " = 1\n", 0, "a key has too many parts"),
        ("x = " + "[" * 2000 + "\n", 0, "brackets within brackets without end"),
        ("[limits]\nactive_threads = 1" + "0" * 4000 + "\n", 2, "a number of more than 18 digits is not"),
        ("\ufeff[limits]\nactive_threads = '1%'\n", 1, "begins with a byte order mark (BOM)"),
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
    found = errors('[limits]\nmemory_limit = { 0 = 1, x = "1G", 2 = "9%", 3 = "1" }\n')
    assert [one.key for one in found] == ["limits.memory_limit.0", "limits.memory_limit.x", "limits.memory_limit.3"]
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
    "many users": "".join(f"[user.u{place}]\nactive_threads = '5%'\n" for place in range(9_000)),
    "many lines": "\n" * (LARGEST - 1),
    "byte order mark": "\ufeff[limits]\n",
    "carriage returns": "[limits]\r\nactive_threads = '5%'\r\n",
    "a carriage return": "\r",
    "a surrogate": "x = '\ud800'\n",
}


@pytest.mark.parametrize("what", HURTFUL)
@pytest.mark.timeout(120)
def test_texts_made_to_hurt_a_parser_are_harmless(what: str) -> None:
    """Depth, width and quotes: an answer in bounded time, whatever it is."""
    errors(HURTFUL[what])


@pytest.mark.parametrize(("text", "hint"), [
    ('[limits]\ntotal_memory_limit = "5G"\n', "set memory_limit, the limit of each process"),
    ("[limits]\nnotify_terminal = no\n", "write true or false"),
    ("notify_terminal = False  # for now\n", "write true or false"),
    ("mode = no\n", 'write mode = "enforce" or mode = "report"'),
    ("[user.a]\n  mode = report # for now\n", 'write mode = "enforce" or mode = "report"'),
    ("enforce = no\n", 'write mode = "enforce" or mode = "report"'),
    ('[cgroup."/a"]\naccess = "deny"\n', "only [limits], [user.NAME] and [group.NAME] have it: write it for the users"),
    ("[limits]\nactive_threads = 33,3\n", "a number has a point and no comma: 33.3"),
    ("[limits]\nmemory = 25%\n", 'a percentage needs quotes: "25%"'),
    ('[limits]\nmem = "5G"\n', 'did you mean "memory_limit"?'),
    ("[limits]\nactive_threads = '150%'\n", "write a part of the multiprocessors from 0.1% to 100%"),
    ("[limits]\nthreads = half\n", 'a text needs quotes: "10m", "20G"'),
])  # fmt: skip
def test_the_hint_is_for_what_was_written(text: str, hint: str) -> None:
    """Several led astray: `lower memory` where there was none, quotes around `no`, a section that has no such key."""
    (found,) = errors(text)
    assert found.hint == hint
