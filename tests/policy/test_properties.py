"""What must hold for any policy and any text, not only for those that somebody thought of."""

from __future__ import annotations

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpsagent.mps.limits import Device
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.policy import Policy, PolicyError

DEVICES = [Device(0, "GPU-a", "", 139 << 30, 132), Device(1, "GPU-b", "", 16 << 30, 10)]
USERS, GROUPS = ("alice", "bob", "1003"), ("g1", "g2", "g3")

# --- texts

_keys = st.sampled_from(
    "enforce limits user group switch hang instance agent hooks threads memory max_clients max_runtime idle_timeout "
    "after grace action exempt control server kill_grace devices compute_mode pipe_directory on_stop parked_user "
    "before_end deadline sms clients weight rule 0 GPU-a alice x".split()
)
_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["10m", "never", "20G", "25%", "terminate", "/x", "nobody", "even"])
)
_trees = st.recursive(
    _leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=4), max_leaves=12
)


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return '"' + "".join(f"\\U{ord(c):08x}" for c in value if not 0xD800 <= ord(c) < 0xE000) + '"'
    return "0" if value is None else json.dumps(value)


def _accepted(policy: Policy | None, errors: list[PolicyError]) -> None:
    assert (policy is None) == bool(errors)
    for error in errors:
        assert str(error).isprintable()
        assert error.problem
    if policy is not None:
        json.dumps(policy.sections())
        policy.strictest(DEVICES)
        json.dumps(policy.rules(Identity(1, "alice", ("x",))).explain(DEVICES))


@given(st.lists(st.text(max_size=80), max_size=3))
@example(["\ud800", "[limits]\nthreads = 1\ud800"])
def test_any_text_gives_a_policy_or_errors(texts: list[str]) -> None:
    """load never raises: the agent that reloads a policy as root survives whatever an editor left there."""
    _accepted(*load([(f"{place}.toml", text) for place, text in enumerate(texts)]))


@settings(max_examples=300)
@given(st.dictionaries(_keys, _trees, max_size=5))
def test_any_tables_give_a_policy_or_errors(tables: dict[str, object]) -> None:
    """Valid TOML with the policy's own words in every wrong place: deeper than random text ever gets."""
    text = "".join(f"{json.dumps(key)} = {_toml(value)}\n" for key, value in tables.items())
    _accepted(*load([("x.toml", text)]))


# --- resolution

_threads = (
    st.floats(0.1, 100).map(lambda value: round(value, 2))
    | st.integers(2, 200).map(lambda count: f"{{ sms = {count} }}")
    | st.integers(1, 50).map(lambda count: f'{{ clients = {count}, rule = "double" }}')
    | st.integers(1, 9).map(lambda weight: f"{{ weight = {weight} }}")
).map(lambda value: f"threads = {value}")
_amounts = st.integers(1, 200).map(lambda size: f'"{size}G"') | st.integers(1, 100).map(lambda size: f'"{size}%"')
_memory = (
    _amounts
    | st.tuples(st.sampled_from(["0", "1", "GPU-b"]), _amounts).map(lambda pair: f"{{ {pair[0]} = {pair[1]} }}")
).map(lambda value: f"memory = {value}")
_max_clients = st.integers(1, 99).map(lambda count: f"max_clients = {count}")
_after = st.integers(0, 99).map(lambda minutes: f'after = "{minutes}m"')
_body = st.tuples(st.none() | _threads, st.none() | _memory, st.none() | _max_clients, st.none() | _after)
_sections = st.fixed_dictionaries(
    {"limits": _body},
    optional={f"user.{name}": _body for name in USERS} | {f"group.{name}": _body for name in GROUPS},
)
_who = st.builds(
    Identity,
    uid=st.integers(1001, 1004),
    name=st.sampled_from(["alice", "bob", "carol", None]),
    groups=st.permutations(GROUPS).flatmap(lambda names: st.integers(0, 3).map(lambda count: tuple(names[:count]))),
)


def _text(sections: dict[str, tuple[str | None, ...]]) -> str:
    lines = []
    for name, body in sections.items():
        own = [one for one in body if one is not None]
        if name == "limits":
            lines += ["[switch]", *(one for one in own if one.startswith("after"))]
            lines += ["[limits]", *(one for one in own if not one.startswith("after"))]
        else:
            lines += [f"[{name}]", *("switch." + one if one.startswith("after") else one for one in own)]
    return "\n".join(lines) + "\n"


def _expected(sections: dict[str, tuple[str | None, ...]], who: Identity, place: int) -> tuple[str | None, str | None]:
    """Section and text of the value that applies, by the rule as the documentation has it."""
    names = [f"user.{who.name}", f"user.{who.uid}", *(s for s in sections if s[6:] in who.groups), "limits"]
    for name in names:
        if name in sections and sections[name][place] is not None:
            return name, sections[name][place]
    return None, None


@settings(max_examples=300)
@given(_sections, _who)
def test_the_first_section_in_the_documented_order_gives_each_key(
    sections: dict[str, tuple[str | None, ...]], who: Identity
) -> None:
    """Against a second, naive statement of the rule; the origin must name the line where the value really stands."""
    text = _text(sections)
    policy, errors = load([("x.toml", text)])
    assert policy is not None, errors
    rules = policy.rules(who)
    for name, place in (("threads", 0), ("max_clients", 2), ("switch.after", 3)):
        section, line = _expected(sections, who, place)
        origin = rules.origin(name)
        if section is None:
            assert (origin.file, origin.line) == ("", 0)
            continue
        assert line is not None
        assert text.split("\n")[origin.line - 1].removeprefix("switch.") == line
        expected = {"limits": {"switch.after": "switch.after"}.get(name, f"limits.{name}")}.get(
            section, f"{section}.{name}"
        )
        assert origin.key == expected
    wanted = _expected(sections, who, 2)[1]
    assert rules.max_clients == (None if wanted is None else int(wanted.removeprefix("max_clients = ")))


@settings(max_examples=300)
@given(_sections, _who)
def test_the_floor_is_never_above_anybodys_limits(sections: dict[str, tuple[str | None, ...]], who: Identity) -> None:
    """A server that starts without the agent having armed for it gives less, never more."""
    policy, errors = load([("x.toml", _text(sections))])
    assert policy is not None, errors
    floor, limits = policy.strictest(DEVICES), policy.rules(who).limits(DEVICES)
    assert floor.threads <= limits.threads <= 100
    for device, size in limits.memory.items():
        assert floor.memory[device] <= size
        assert size >= 1 << 20
        assert size % (1 << 20) == 0
    assert round(limits.threads, 1) == limits.threads


@given(_sections, _sections, _who)
def test_a_second_file_changes_only_what_it_names(
    first: dict[str, tuple[str | None, ...]], second: dict[str, tuple[str | None, ...]], who: Identity
) -> None:
    """Two files are one policy: the value in force is in the second file wherever its section gives it there."""
    policy, errors = load([("1.toml", _text(first)), ("2.toml", _text(second))])
    assert policy is not None, errors
    for key, setting in policy.settings.items():
        again = second.get(".".join(key[:2])) or (second.get("limits") if key[0] in ("limits", "switch") else None)
        place = {"threads": 0, "max_clients": 2, "after": 3}.get(key[-1])
        if place is not None:
            assert setting.origin.file == ("2.toml" if again is not None and again[place] is not None else "1.toml")
    assert load([("1.toml", _text(first)), ("2.toml", _text(second))])[0] == policy
