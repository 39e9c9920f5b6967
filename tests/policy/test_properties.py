"""What must hold for any policy and any text, not only for those that a test names."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from mpsagent.mps.limits import Device
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.keys import NAMED, OF_CGROUPS, SECTIONS, Key, keys_of
from mpsagent.policy.origins import PolicyError
from mpsagent.policy.policy import Policy

DEVICES = [Device(0, "GPU-a", "", 139 << 30, 132), Device(1, "GPU-b", "", 16 << 30, 10)]
USERS, GROUPS = ("alice", "bob", "1003"), ("g1", "g2", "g3")


def _accepted(policy: Policy | None, errors: list[PolicyError]) -> None:
    assert (policy is None) == bool(errors)
    for error in errors:
        assert str(error).isprintable()
        assert error.problem
    if policy is not None:
        json.dumps(policy.sections())
        policy.fail_safe(DEVICES)
        json.dumps(policy.rules(Identity(1, "alice", ("x",))).explain(DEVICES))


# --- mistakes in policies that are right otherwise

_GOOD = {
    "mode": ['"enforce"', '"report"'],
    "access": ['"allow"', '"deny"'],
    "active_threads": ['"50%"', "26", "{ clients = 3 }", "{ weight = 2 }"],
    "memory_limit": ['"20G"', '"25%"', '{ 0 = "1G", GPU-a = "2G" }'],
    "queue_priority": ["7"],
    "total_active_threads": ['"100%"'],
    "total_memory_limit": ['"100%"'],
    "max_clients": ["1", "1000"],
    "max_contexts": ["1", "1000"],
    "on_expiry": ['"restart-mps"', '"none"'],
    "never_preempt": ["true"],
    "client_priority": ['"normal"', '"below-normal"'],
    "notify_terminal": ["true"],
    "idle_metric": ['"cpu"', '"gpu"'],
    "on_limit_exceeded": ['"report"', '"terminate-memory"', '"terminate"'],
    "max_users": ["1", "128"],
    "devices": ["[]", '["GPU-a", "GPU-b"]', '["MIG-b"]'],
    "users": ['["alice", "7"]', "[]"],
    "groups": ['["staff"]'],
    "placement": ['"fixed"', '"least-loaded"', '"by-directory"'],
    "on_outside_mps": ['"terminate"', '"report"'],
    "outside_mps_grace": ['"5m"'],
    "outside_mps_exempt": ['["dcgm", "7"]'],
    "compute_mode": ['"default"'],
    "pipe_directory": ['"/run/mps"'],
    "log_directory": ['"/var/log/mps"'],
    "log_size": ['"512M"', '"2G"'],
    "control_daemon_path": ['"nvidia-cuda-mps-control"', '"/usr/bin/x"'],
    "on_stop": ['"leave"', '"quit"'],
    "cdi_file": ['"/etc/cdi/mpsagent.json"'],
    "admin_group": ['"wheel"'],
    "pre_terminate": ['"/bin/true"'],
    "warning_signal": ['"SIGUSR1"', '"none"'],
    "retention": ['"30d"'],
}
_BAD = ['":/ "', "-1", "[[1]]", "1979-05-27", "{ zz = 1 }", "nan", '""', "[3]"]


def _good(key: Key) -> list[str]:
    if (key.section, key.name) == ("instance", "server_scope"):
        return ['"user"', '"all"']
    if (key.section, key.name) == ("instance", "sharing"):
        return ['"turns"', '"one-server"']
    return _GOOD.get(key.name, ['"30s"', '"1m30s"'])


@st.composite
def _line(draw: st.DrawFn, section: str) -> tuple[str, bool]:
    """A line of a section, and whether it is wrong."""
    who = section in ("user", "group")
    shares = tuple(key for key in keys_of("limits") if key.name in OF_CGROUPS)
    present = keys_of("limits") + keys_of("turn") if who else shares if section == "cgroup" else keys_of(section)
    key = draw(st.sampled_from(present))
    name = f"turn.{key.name}" if who and key.section == "turn" else key.name
    kind = draw(st.sampled_from(["good", "good", "name", "value"]))
    if kind == "name":
        return f"{name}{draw(st.sampled_from(['x', '_', '-of', 's-s']))} = {draw(st.sampled_from(_good(key)))}", True
    if kind == "value":
        return f"{name} = {draw(st.sampled_from(_BAD))}", True
    return f"{name} = {draw(st.sampled_from(_good(key)))}", False


@st.composite
def _policies(draw: st.DrawFn) -> tuple[str, set[int]]:
    """The text of a policy with mistakes in it, and the lines on which they are."""
    lines, wrong = [], set()
    heads = draw(st.lists(st.sampled_from([*SECTIONS]), unique=True, min_size=1))
    for section in heads:
        lines.append(f"[{section}.some-one]" if section in NAMED else f"[{section}]")
        if section not in NAMED and draw(st.integers(0, 9)) == 0:
            lines[-1] = f"[{section}x]"
            wrong.add(len(lines))
            continue
        body = draw(st.lists(_line(section), max_size=5, unique_by=lambda one: one[0].partition(" ")[0]))
        for text, is_wrong in body:
            lines.append(text)
            wrong |= {len(lines)} if is_wrong else set()
    return "\n".join(lines) + "\n", wrong


@settings(max_examples=150)
@given(_policies())
def test_every_mistake_is_on_its_line_and_nothing_else_is(policy_and_lines: tuple[str, set[int]]) -> None:
    """Wrong names and wrong values among right ones: each is named with its line, no right line is blamed, and a
    policy without mistakes is taken."""
    text, wrong = policy_and_lines
    policy, errors = load([("x.toml", text)])
    assert {error.line for error in errors} == wrong, [str(error) for error in errors]
    assert (policy is None) == bool(wrong)
    for error in errors:
        assert error.file == "x.toml"
        assert error.hint
        written = text.split("\n")[error.line - 1]
        assert any(part.strip('"') in written for part in error.key.split(".")), error


@settings(max_examples=100)
@given(_policies(), st.integers(0, 400), st.text(min_size=1, max_size=3))
def test_a_torn_policy_gives_errors_that_name_a_line(
    policy_and_lines: tuple[str, set[int]], place: int, inserted: str
) -> None:
    """Anything typed anywhere, or the rest cut off: an answer, and a place to look at."""
    text, _ = policy_and_lines
    for torn in (text[:place] + inserted + text[place:], text[:place]):
        policy, errors = load([("x.toml", torn)])
        _accepted(policy, errors)
        assert all(0 < error.line <= torn.count("\n") + 1 for error in errors), [str(error) for error in errors]


# --- resolution

_threads = (
    st.floats(0.1, 100).map(lambda value: f"'{round(value, 2)}%'")
    | st.integers(2, 200).map(str)
    | st.integers(1, 50).map(lambda count: f'{{ clients = {count}, rule = "double" }}')
    | st.integers(1, 9).map(lambda weight: f"{{ weight = {weight} }}")
).map(lambda value: f"active_threads = {value}")
_amounts = st.integers(1, 200).map(lambda size: f'"{size}G"') | st.integers(1, 100).map(lambda size: f'"{size}%"')
_memory = (
    _amounts
    | st.tuples(st.sampled_from(["0", "1", "GPU-b"]), _amounts).map(lambda pair: f"{{ {pair[0]} = {pair[1]} }}")
).map(lambda value: f"memory_limit = {value}")
_max_clients = st.integers(1, 99).map(lambda count: f"max_clients = {count}")
_after = st.integers(0, 99).map(lambda minutes: f'time_limit = "{minutes}m"')
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
            lines += ["[turn]", *(one for one in own if one.startswith("time_limit"))]
            lines += ["[limits]", *(one for one in own if not one.startswith("time_limit"))]
        else:
            lines += [f"[{name}]", *("turn." + one if one.startswith("time_limit") else one for one in own)]
    return "\n".join(lines) + "\n"


def _expected(sections: dict[str, tuple[str | None, ...]], who: Identity, place: int) -> tuple[str | None, str | None]:
    """Section and text of the value that applies, by the rule as the documentation has it."""
    names = [f"user.{who.name}", f"user.{who.uid}", *(s for s in sections if s[6:] in who.groups), "limits"]
    for name in names:
        if name in sections and sections[name][place] is not None:
            return name, sections[name][place]
    return None, None


@settings(max_examples=100)
@given(_sections, _who)
def test_the_first_section_in_the_documented_order_gives_each_key(
    sections: dict[str, tuple[str | None, ...]], who: Identity
) -> None:
    """Against a second, naive statement of the rule; the origin must name the line where the value really stands."""
    text = _text(sections)
    policy, errors = load([("x.toml", text)])
    assert policy is not None, errors
    rules = policy.rules(who)
    for name, place in (("active_threads", 0), ("max_clients", 2), ("turn.time_limit", 3)):
        section, line = _expected(sections, who, place)
        origin = rules.origin(name)
        if section is None:
            assert (origin.file, origin.line) == ("", 0)
            continue
        assert line is not None
        assert text.split("\n")[origin.line - 1].removeprefix("turn.") == line
        expected = {"limits": {"turn.time_limit": "turn.time_limit"}.get(name, f"limits.{name}")}.get(
            section, f"{section}.{name}"
        )
        assert origin.key == expected
    wanted = _expected(sections, who, 2)[1]
    assert rules.max_clients == (None if wanted is None else int(wanted.removeprefix("max_clients = ")))


@settings(max_examples=100)
@given(_sections, _who)
def test_the_fail_safe_limits_are_never_above_those_of_a_user(
    sections: dict[str, tuple[str | None, ...]], who: Identity
) -> None:
    """A client whose own limits cannot be confirmed gets less, never more."""
    policy, errors = load([("x.toml", _text(sections))])
    assert policy is not None, errors
    least, limits = policy.fail_safe(DEVICES), policy.rules(who).limits(DEVICES)
    assert least.threads <= limits.threads <= 100
    for device, size in limits.memory.items():
        assert least.memory[device] <= size
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
        again = second.get(".".join(key[:2])) or (second.get("limits") if key[0] in ("limits", "turn") else None)
        place = {"active_threads": 0, "max_clients": 2, "time_limit": 3}.get(key[-1])
        if place is not None:
            assert setting.origin.file == ("2.toml" if again is not None and again[place] is not None else "1.toml")
    assert load([("1.toml", _text(first)), ("2.toml", _text(second))])[0] == policy
