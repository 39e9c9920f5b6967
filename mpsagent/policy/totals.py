"""Totals of users that no client would ever fit in. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from mpsagent.mps.limits import Device
from mpsagent.policy import values
from mpsagent.policy.identity import Identity
from mpsagent.policy.origins import Path, PolicyError, printable
from mpsagent.policy.policy import Policy, Rules


def mistakes(policy: Policy) -> tuple[PolicyError, ...]:
    """What is wrong on every GPU: for everybody, and for a section of a user or a group, whatever groups its users are
    in beside it."""
    return _in_sections(policy, _in_itself)


def against_devices(policy: Policy, devices: Sequence[Device]) -> tuple[PolicyError, ...]:
    """What is wrong on these GPUs, where sizes and parts or percentages and multiprocessors have to be compared."""
    return _in_sections(policy, lambda rules: _on(rules, devices))


def of_users(policy: Policy, users: Iterable[Identity], devices: Sequence[Device]) -> tuple[PolicyError, ...]:
    """What is wrong for these users, with the groups that they are in."""
    rules = (policy.rules(who) for who in users)
    return tuple(one for its in rules if its.access == "allow" for one in (*_in_itself(its), *_on(its, devices)))


def needs_users(policy: Policy) -> bool:
    return any(path[-1] in ("total_active_threads", "total_memory_limit") for path in policy.settings)


def _in_sections(policy: Policy, wrong: Callable[[Rules], Iterable[PolicyError]]) -> tuple[PolicyError, ...]:
    """A section's mistake is not told when another section, which may speak of the same users, takes it away: whether
    it does only the name service knows."""
    sections = [path for path in policy.named if path[0] in ("user", "group")]
    found: dict[PolicyError, None] = {}
    paths: list[Path] = [(), *sections]
    for path in paths:
        alone = policy.section(path)
        for one in wrong(alone) if alone.access == "allow" else ():
            if one in found:
                continue
            name = one.key.rpartition(".")[2]
            beside = [other for other in sections if path and _beside(policy, path, other, name)]
            both = (policy.section(*sorted((path, other), key=sections.index)) for other in beside)
            if all(any(again.key.endswith(name) for again in wrong(rules)) for rules in both):
                found[one] = None
    return tuple(found)


def _beside(policy: Policy, path: Path, other: Path, name: str) -> bool:
    """Whether somebody may be in both sections, and the other one changes something."""
    keys = (name, name.removeprefix("total_"))
    return other != path and "group" in (path[0], other[0]) and any((*other, key) in policy.settings for key in keys)


def _in_itself(rules: Rules) -> Iterator[PolicyError]:
    total, own = rules.total_threads, rules.threads
    counts = isinstance(total, values.Multiprocessors), isinstance(own, values.Multiprocessors)
    if isinstance(total, values.Multiprocessors) and isinstance(own, values.Multiprocessors):
        if own.count > total.count:
            yield _never(
                rules, "total_active_threads", f"a client process gets {own.count} multiprocessors, which is more"
            )
    elif total is not None and not any(counts):
        percent = values.percent_of(own, (), rules.weights)
        if percent > values.percent_of(total, (), 0.0):
            yield _never(rules, "total_active_threads", f"threads of a client process are {percent:g} %, which is more")
    if rules.total_memory is None or _whole(rules.total_memory):
        return
    why, hint = "the memory of a client process is not limited", "set memory_limit, the limit of each process"
    if not rules.memory:
        yield _never(rules, "total_memory_limit", why, hint)
    for one in (setting.value for table in rules.memory[:1] for setting in table.value.values()):
        if _whole(one):
            yield _never(rules, "total_memory_limit", why, hint)
        elif _more(one, rules.total_memory):
            yield _never(rules, "total_memory_limit", f"a client process gets {values.text(one)}, which is more")


def _more(one: values.Memory, total: values.Memory) -> bool:
    if isinstance(one, values.Percent) and isinstance(total, values.Percent):
        return one.percent > total.percent
    return isinstance(one, int) and isinstance(total, int) and one > total


def _whole(memory: values.Memory) -> bool:
    return isinstance(memory, values.Percent) and memory.percent >= 100


def _on(rules: Rules, devices: Sequence[Device]) -> Iterator[PolicyError]:
    total = rules.total(devices)
    if total is None or total.fits((), rules.limits(devices)) or any(_in_itself(rules)):
        return
    name = "total_active_threads" if total.threads is not None and total.threads < rules.limits(devices).threads else ""
    yield _never(rules, name or "total_memory_limit", "on the GPUs here a client process gets more")


def _never(rules: Rules, name: str, why: str, hint: str = "") -> PolicyError:
    key = name.removeprefix("total_")
    who = rules.who
    whose = f" of {printable(who.name or str(who.uid))}" if who.uid >= 0 else ""
    problem = f"no client process{whose} ever fits: {why}"
    return rules.origin(name).wrong(problem, hint or f"lower {key}, or raise {name}")
