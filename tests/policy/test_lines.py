"""A wrong line sends the person at three in the morning to the wrong place."""

from __future__ import annotations

import tomli
from hypothesis import given
from hypothesis import strategies as st

from mpsagent.policy.lines import key_lines, line_of

TEXT = """\
# a comment with [brackets] and "quotes
top = 1

[limits] # another
active_threads = 26
memory_limit = "# not a comment"
[user."jane.doe"]
turn.time_limit = "10m"; x = 1
""".replace("; x = 1", "")


def test_keys_tables_and_dotted_keys() -> None:
    """The ordinary case, comments and quotes included."""
    assert key_lines(TEXT) == {
        ("top",): 2,
        ("limits",): 4,
        ("limits", "active_threads"): 5,
        ("limits", "memory_limit"): 6,
        ("user",): 7,
        ("user", "jane.doe"): 7,
        ("user", "jane.doe", "turn"): 8,
        ("user", "jane.doe", "turn", "time_limit"): 8,
    }


def test_values_over_several_lines_do_not_shift_what_follows() -> None:
    """Multi-line texts and arrays may hold anything that looks like a key or a section."""
    text = (
        'a = """\n[b]\nc = 1\\"""\n""""\n'
        "d = '''\n[e]\n''\n'''''\n"
        "f = [\n  '[g]', # ]\n  [\"]\", 2],\n]\n"
        "h = 1\r\n"
        "i . 'j k' . \"l\\u0021\" = {m = '}', n = [1]}\n"
        "[[o]]\np = 1\n[[o]]\np = 2\n"
    )
    tomli.loads(text)
    lines = key_lines(text)
    assert {key: line for key, line in lines.items() if len(key) == 1} == {
        ("a",): 1,
        ("d",): 5,
        ("f",): 9,
        ("h",): 13,
        ("i",): 14,
        ("o",): 15,
    }
    assert lines["i", "j k", "l!"] == 14
    assert lines["o", "p"] == 16


def test_the_nearest_known_key_stands_in() -> None:
    """Keys inside an inline table have the line of the key that holds the table."""
    lines = key_lines(TEXT)
    assert line_of(lines, ("limits", "active_threads", "clients")) == 5
    assert line_of(lines, ("limits", "nothing")) == 4
    assert line_of(lines, ("nothing",)) == 0


_names = st.text(st.characters(codec="utf-8", exclude_characters="\r"), min_size=1, max_size=6)


def _quoted(name: str) -> str:
    return '"' + "".join(c if c.isalnum() and c.isascii() else f"\\U{ord(c):08x}" for c in name) + '"'


_values = st.sampled_from(
    [
        "1",
        "true",
        '"a # b"',
        "'[x]'",
        '"""\nx = 1\n"""',
        "'''\n[y]\n'''",
        "[\n1, # ]\n2]",
        "{ a = 1 }",
        '"\\""',
        '""""q"""',
    ]
)


@given(
    st.lists(st.tuples(_names, _values, st.sampled_from(["", "\n", "# [c]\n", "  \t"])), unique_by=lambda one: one[0])
)
def test_every_key_is_found_on_its_line(entries: list[tuple[str, str, str]]) -> None:
    """Against the parser: the same keys, each on the line that it was put on."""
    text, expected = "", {}
    for name, value, before in entries:
        text += before
        expected[(name,)] = text.count("\n") + 1
        text += f"{_quoted(name)} = {value}\n"
    assert set(tomli.loads(text)) == {key for (key,) in expected}
    assert key_lines(text) == expected


@given(st.text(alphabet=st.sampled_from(list("[]{}\"'=.#\\\n\r ab1,"))))
def test_it_never_fails_on_what_is_not_toml(text: str) -> None:
    """It is meant for valid texts, but a disagreement with the parser must not stop the agent."""
    for line in key_lines(text).values():
        assert 1 <= line <= text.count("\n") + 1
