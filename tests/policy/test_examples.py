"""The policies that people copy: each loads, does what its comments say, and agrees with schema and reference."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli

from mpsagent.mps.limits import Device, Limits, Total
from mpsagent.policy import values
from mpsagent.policy.files import load
from mpsagent.policy.identity import Identity
from mpsagent.policy.instances import instances
from mpsagent.policy.keys import KEYS, NAMED, SECTIONS
from mpsagent.policy.plausible import in_itself
from mpsagent.policy.policy import Policy, Rules
from mpsagent.policy.shares import Share
from mpsagent.policy.values import Percent
from tests.policies import policy

ROOT = Path(__file__).resolve().parent.parent.parent
schema = runpy.run_path(str(ROOT / "packaging" / "write_policy_schema.py"))["schema"]
POLICIES = ROOT / "policies"
EXAMPLES = sorted(path.name for path in POLICIES.glob("*.toml"))
GIB = 1 << 30
H200 = Device(0, "GPU-3d07cd2a-6e14-11b8-c643-07a1e14ae7bc", "NVIDIA H200", 140 * GIB, 132)
SECOND = Device(1, "GPU-513e171f-4520-0894-ba89-06b9f5c1d7b8", "NVIDIA H200", 140 * GIB, 132)


def example(name: str) -> Policy:
    return policy((POLICIES / name).read_text(encoding="utf-8"))


def uncommented() -> str:
    """The default policy with every key in force."""
    text = (POLICIES / "policy.toml").read_text(encoding="utf-8")
    return re.sub(r"^#(?=[a-z_.]+ = |\[)", "", text, flags=re.MULTILINE)


def test_there_are_a_default_and_four_examples() -> None:
    """What is promised to be there; the tests below would pass with nothing to test."""
    assert EXAMPLES == ["inference-node.toml", "lab-with-students.toml", "policy.toml", "slurm.toml", "turns.toml"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_example_gives_small_shares_in_turns(name: str) -> None:
    """The rest of the GPU would be idle while others wait. Clients are in tests/agent/test_shipped_policies.py."""
    made = example(name)
    if made.sharing == "turns":
        assert not [path for path in made.settings if path[-1] in ("active_threads", "total_active_threads")]


def test_the_default_policy_changes_nothing() -> None:
    """It is installed as it is: with it, an agent must do what it does without."""
    assert policy((POLICIES / "policy.toml").read_text(encoding="utf-8")).settings == {}


def test_the_default_policy_shows_the_true_defaults() -> None:
    """A comment that names another default than the code is worse than none. Examples are excepted by name."""
    shown, built_in = policy(uncommented()), Policy()
    examples = {"compute_mode", "before_end", "cdi_file", "settings", "named", "sources", "digest"}
    examples |= {"users", "groups", "by_uid", "denies"}  # made of the sections that there are
    for name in Policy.__dataclass_fields__:
        if name not in examples and not name.startswith("_"):
            assert getattr(shown, name) == getattr(built_in, name), name
    rules, default = shown.rules(Identity(7)), Rules(Identity(7))
    for name in Rules.__dataclass_fields__:
        if name not in {
            "max_clients",
            "max_contexts",
            "total_threads",
            "total_memory",
            "before_end_hook",
            "memory",
            "origins",
        }:
            assert getattr(rules, name) == getattr(default, name), name
    assert rules.limits([H200]) == Limits(100.0, {})


def test_the_default_policy_shows_every_key() -> None:
    """It is the first documentation that people read."""
    tables = tomli.loads(uncommented())
    assert set(tables) == {"mode", *SECTIONS}
    for section in SECTIONS:
        shown: Any = tables[section]["default"] if section == "instance" else tables[section]
        if section not in NAMED or section == "instance":
            assert set(shown) == {key.name for key in KEYS if key.section == section}, section


def test_the_reference_describes_every_key() -> None:
    """docs/policy.md is what the errors point to."""
    parts = re.split(r"^## ", (ROOT / "docs" / "policy.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for key in KEYS:
        title = f"[{key.section}.NAME]" if key.section in NAMED else f"[{key.section}]"
        part = next(part for part in parts if part.startswith(title if key.section else "Only reporting"))
        assert f"`{key.name}`" in part or f"`{key.name} = " in part, key.path


def test_the_reference_has_a_policy_that_does_what_it_says() -> None:
    """The example at its top, with the sentence that explains it."""
    text = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(?:^ {4}.*\n|^\n(?= {4}))+", text, flags=re.MULTILINE)
    first, idle, second, third, totals, fourth, *_ = (
        policy(re.sub(r"^ {4}", "", block, flags=re.MULTILINE)) for block in blocks
    )
    rules = first.rules(Identity(1, "alice", ("students",)))
    assert rules.limits([H200]) == Limits(60.0, {0: 20 * GIB})
    assert rules.max_runtime == 43200.0
    assert (idle.rules(Identity(1)).idle_timeout, idle.rules(Identity(1)).idle_by) == (900.0, "gpu")
    may = [second.rules(who).access for who in (Identity(1, "mallory", ("gpu",)), Identity(2, "a", ("staff",)))]
    assert third.share("/slurm/job_7/step") == Share(
        'cgroup."/slurm/*"', Percent(25.0), job="/slurm/job_7", origin=third.named["cgroup", "/slurm/*"]
    )
    job = totals.share("/slurm/job_7/step")
    assert job is not None
    assert (job.job, job.total([H200])) == ("/slurm/job_7", Total(30.0, {}, 6.1))
    assert (may, second.rules(Identity(3, "b")).access) == (["deny", "allow"], "deny")
    made = {one.instance: one for one in instances(fourth, [replace(H200, uuid="GPU-a"), H200, SECOND])}
    assert list(made) == ["gpu0", "gpu1", "big"]
    assert made["big"].rules(Identity(3, "b")).limits([H200]).threads == 25.0
    assert in_itself(fourth) == ()


def test_lab_with_students() -> None:
    """A part of the memory for each, alice's exception, staff before students, guests."""
    made = example("lab-with-students.toml")
    assert made.sharing == "per-user"
    bob = made.rules(Identity(1002, "bob", ("students",)))
    assert bob.limits([H200]) == Limits(100.0, {0: 8 * GIB})
    assert (bob.max_clients, bob.max_runtime, bob.total([H200])) == (4, 43200.0, Total(None, {0: 16 * GIB}))
    alice = made.rules(Identity(1001, "alice", ("students",)))
    assert alice.limits([H200]) == Limits(100.0, {0: 20 * GIB})
    assert (alice.max_clients, alice.max_runtime, alice.total([H200])) == (4, 43200.0, Total(None, {0: 40 * GIB}))
    tutor = made.rules(Identity(1003, "carol", ("students", "staff")))
    assert tutor.limits([H200]) == Limits(100.0, {0: 70 * GIB})
    assert tutor.max_runtime is None
    guest = made.rules(Identity(1004, "dave"))
    assert (guest.limits([H200]), guest.max_clients) == (Limits(100.0, {0: 2 * GIB}), 2)


def test_inference_node() -> None:
    """Four replicas at half the GPU each on the service's own daemon; the memory that they need is free of others."""
    made = example("inference-node.toml")
    assert (made.sharing, made.compute_mode) == ("per-user", "unchanged")
    service = made.rules(Identity(900, "inference"))
    assert service.limits([H200]) == Limits(50.0, {0: 21 * GIB})
    assert service.max_clients == 4
    engineer = made.rules(Identity(1001, "eve", ("users",)))
    assert engineer.limits([H200]) == Limits(100.0, {0: 14 * GIB})
    assert engineer.total([H200]) == Total(None, {0: 28 * GIB})
    assert (made.on_stop, made.hang_fault) == ("leave", 3.0)
    assert made.hang_server == 15.0


def test_turns() -> None:
    """An hour, twenty minutes for students, no end for operators, and two minutes of warning."""
    made = example("turns.toml")
    assert (made.sharing, made.server) == ("turns", "user")
    user, student, operator = (made.rules(Identity(1, "a", groups)) for groups in ((), ("students",), ("operators",)))
    assert [one.switch_after for one in (user, student)] == [3600.0, 1200.0]
    assert [one.has_to_leave for one in (user, student, operator)] == [True, True, False]
    assert (user.switch_grace, user.terminal, user.limits([H200])) == (120.0, True, Limits(100.0, {}))
    assert (made.before_end, made.hook_deadline) == ("/usr/local/sbin/request-checkpoint", 20.0)


def test_slurm() -> None:
    """Little outside of jobs; a job's lease may give up to everything."""
    made = example("slurm.toml")
    assert made.sharing == "one-server"
    rules = made.rules(Identity(1, "a"))
    assert rules.limits([H200]) == Limits(10.0, {})
    job = Share("lease 1", values.Percent(30.0), memory={values.ALL_DEVICES: values.Percent(30.0)}, job="1")
    assert rules.limits_within(job, [H200]) == Limits(30.0, {0: 42 * GIB})


def test_schema_and_reference_are_up_to_date() -> None:
    """Editors read the file, people the page, the agent the code. `make schema` writes both."""
    write = runpy.run_path(str(ROOT / "packaging" / "write_policy_schema.py"))
    assert write["TARGET"].read_text(encoding="utf-8") == write["text"](), "run `make schema`"
    assert write["PAGE"].read_text(encoding="utf-8") == write["page"](), "run `make schema`"


def fits(part: dict[str, Any], value: object, whole: dict[str, Any]) -> bool:
    """As much of JSON Schema as the policy's schema uses; any other keyword fails, so that none is passed over."""
    known = set(
        "$ref $schema $defs description type enum const anyOf pattern minLength minimum maximum exclusiveMinimum "
        "properties required additionalProperties minProperties items".split()
    )
    assert part.keys() <= known, part.keys() - known
    if "$ref" in part:
        return fits(whole["$defs"][part["$ref"].removeprefix("#/$defs/")], value, whole)
    types = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float)}
    if "type" in part:
        if not isinstance(value, types[part["type"]]):
            return False
        if isinstance(value, bool) and part["type"] != "boolean":
            return False
    checks = [
        "enum" not in part or value in part["enum"],
        "const" not in part or value == part["const"],
        "anyOf" not in part or any(fits(one, value, whole) for one in part["anyOf"]),
    ]
    if isinstance(value, str):
        checks.append(re.search(part.get("pattern", ""), value) is not None and len(value) >= part.get("minLength", 0))
    if isinstance(value, int | float):
        checks.append(part.get("minimum", value) <= value <= part.get("maximum", value))
        checks.append(value > part.get("exclusiveMinimum", value - 1))
    if isinstance(value, dict):
        named, others = part.get("properties", {}), part.get("additionalProperties", True)
        checks.append(len(value) >= part.get("minProperties", 0) and set(part.get("required", ())) <= set(value))
        for key, one in value.items():
            other = others if isinstance(others, bool) else fits(others, one, whole)
            checks.append(fits(named[key], one, whole) if key in named else other)
    if isinstance(value, list) and "items" in part:
        checks += [fits(part["items"], one, whole) for one in value]
    return all(checks)


@pytest.mark.parametrize("name", [*EXAMPLES, "uncommented"])
def test_the_schema_accepts_what_the_agent_accepts(name: str) -> None:
    """An editor that marks a good policy red is one that people stop believing."""
    text = uncommented() if name == "uncommented" else (POLICIES / name).read_text(encoding="utf-8")
    assert fits(schema(), tomli.loads(text), schema())


@pytest.mark.parametrize(
    "text",
    [
        "[limit]\nactive_threads = '5%'",
        "[limits]\nactive_threads = 0.5",
        "[limits]\nactive_threads = '150%'",
        '[limits]\nactive_threads = "50"',
        "[limits]\nthreads = 4",
        "[limits]\nmemory_limit = 20",
        '[limits]\nmemory_limit = "20"',
        "[limits]\nmemory_limit = {}",
        "[limits]\nmax_clients = 0",
        "[user.alice]\ntime_limit = '10m'",
        "[user.alice]\nturn.time_limit = 10",
        "[turn]\non_expiry = 'kill'",
        "[turn]\ngrace = 'never'",
        "mode = 1",
        "[instance.a]\npipe_directory = 'x'",
        "[instance.a]\ndevices = [0]",
        "[instance.a]\nserver_scope = 'one'",
        "[limits]\naccess = 'yes'",
        "[agent]\nserver_scope = 'user'",
    ],
)
def test_the_schema_refuses_what_the_agent_refuses(text: str) -> None:
    """Otherwise the schema is only a list of names. (It may accept more: not every rule can be said in it.)"""
    assert load([("x.toml", text)])[0] is None
    assert not fits(schema(), tomli.loads(text), schema())


def test_every_key_has_a_description_in_the_schema() -> None:
    """An editor shows it when one hovers over a key."""
    parts = [schema(), *schema()["$defs"].values()]
    missing = [key for part in parts for key, one in part["properties"].items() if not one.get("description")]
    assert missing == []
    json.dumps(schema())
