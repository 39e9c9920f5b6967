"""What is wrong in a policy is said all at once, where it is, and so that one knows what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpsagent.policy.files import LARGEST, LONGEST_LINE, MOST_ERRORS, load
from mpsagent.policy.keys import REMOVED_KEYS
from mpsagent.policy.origins import PolicyError
from mpsagent.policy.syntax import syntax_error
from tests.golden.policies import CASES, TEN

NAMES = Path(__file__).parents[2] / "docs/develop/names.md"


def errors(*texts: str) -> list[PolicyError]:
    policy, found = load([(f"{place}.toml", text) for place, text in enumerate(texts)], syntax_error)
    assert (policy is None) == bool(found), "a policy, or what is wrong with it, never both"
    return found


def test_ten_mistakes_are_ten_errors() -> None:
    """Nobody wants to start the agent ten times."""
    assert [one.line for one in errors(TEN)] == [1, 3, 4, 6, 7, 8, 10, 12, 14, 15]


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


@pytest.mark.parametrize("text", CASES)
def test_a_mistake_is_one_error_with_a_line_and_a_hint(text: str) -> None:
    """The words are in tests/golden/policy_check.txt. The agent's own reader of TOML names the same line."""
    (found,) = errors(text)
    assert found.hint or "unknown key" in found.problem
    assert str(found).isprintable()
    assert len(str(found)) < 400
    assert "('" not in found.problem
    (plain,) = load([("0.toml", text)])[1]
    assert (plain.problem, plain.line) == (found.problem, found.line) or "policy check" in plain.hint
    assert str(plain).isprintable()


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
