"""Totals of users that no client would ever fit in. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpsagent.mps.limits import Device
from mpsagent.policy import values
from mpsagent.policy.origins import Path, PolicyError
from mpsagent.policy.policy import Policy, Rules


def mistakes(policy: Policy) -> tuple[PolicyError, ...]:
    """What is wrong on every GPU: for everybody, and for each section of a user or a group by itself."""
    return tuple(dict.fromkeys(one for rules in _sections(policy) for one in _in_itself(rules)))


def against_devices(policy: Policy, devices: Sequence[Device]) -> tuple[PolicyError, ...]:
    """What is wrong on these GPUs, where sizes and parts or percentages and multiprocessors have to be compared."""
    return tuple(dict.fromkeys(one for rules in _sections(policy) for one in _on(rules, devices)))


def _sections(policy: Policy) -> Iterator[Rules]:
    paths: list[Path] = [(), *(path for path in policy.named if path[0] in ("user", "group"))]
    for path in paths:
        rules = policy.section(path)
        if rules.access == "allow":
            yield rules


def _in_itself(rules: Rules) -> Iterator[PolicyError]:
    total, own = rules.total_threads, rules.threads
    counts = isinstance(total, values.Multiprocessors), isinstance(own, values.Multiprocessors)
    if isinstance(total, values.Multiprocessors) and isinstance(own, values.Multiprocessors):
        if own.count > total.count:
            yield _never(rules, "total_threads", f"a client process gets {own.count} multiprocessors, which is more")
    elif total is not None and not any(counts):
        percent = values.percent_of(own, (), rules.weights)
        if percent > values.percent_of(total, (), 0.0):
            yield _never(rules, "total_threads", f"threads of a client process are {percent:g} %, which is more")
    if rules.total_memory is None or _whole(rules.total_memory):
        return
    if not rules.memory:
        yield _never(rules, "total_memory", "the memory of a client process is not limited")
    for one in (setting.value for table in rules.memory[:1] for setting in table.value.values()):
        if _whole(one):
            yield _never(rules, "total_memory", "the memory of a client process is not limited")
        elif _more(one, rules.total_memory):
            yield _never(rules, "total_memory", f"a client process gets {values.text(one)}, which is more")


def _more(one: values.Memory, total: values.Memory) -> bool:
    if isinstance(one, values.Share) and isinstance(total, values.Share):
        return one.percent > total.percent
    return isinstance(one, int) and isinstance(total, int) and one > total


def _whole(memory: values.Memory) -> bool:
    return isinstance(memory, values.Share) and memory.percent >= 100


def _on(rules: Rules, devices: Sequence[Device]) -> Iterator[PolicyError]:
    total = rules.total(devices)
    if total is None or total.fits((), rules.limits(devices)) or any(_in_itself(rules)):
        return
    name = "total_threads" if total.threads is not None and total.threads < rules.limits(devices).threads else ""
    yield _never(rules, name or "total_memory", "on the GPUs here a client process gets more")


def _never(rules: Rules, name: str, why: str) -> PolicyError:
    origin = rules.origin(name)
    key = name.removeprefix("total_")
    problem = f"no client process ever fits: {why}"
    return PolicyError(origin.file, origin.line, origin.key, problem, f"lower {key}, or raise {name}")
