"""What a policy says that is right as a policy and surely not meant: names that do not exist, more than a GPU has.

Pure: who exists and what GPUs there are is given. Each function returns warnings in the order of the files.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from mpsagent.mps import units
from mpsagent.mps.limits import Device
from mpsagent.policy import parse, values
from mpsagent.policy.check import shown_path
from mpsagent.policy.instances import names, of, told
from mpsagent.policy.origins import Origin, Path, PolicyError, Setting, key_text, printable
from mpsagent.policy.policy import Policy

PROGRAMS = ("pre_terminate", "control_daemon_path")
SMALL = 256 << 20
"""Bytes. CUDA's own overhead took 120 to 220 MiB of a client's memory limit on an H200."""
CONTEXT, OF_EACH, H200 = 28.0, 3.7, 132
"""MiB that a context takes, and beside that for each multiprocessor, of which an H200 has so many: 72 with 12 of them,
167 with 38, 218 with 52, 516 with 132 (recording 02, R1; memory-allowance.txt)."""
MOST_COMPARED = 500
"""Names that a nearest one is looked for among; of more, those with the same first letter. It takes 25 ms."""
MOST_NEAREST = 20
"""Unknown names for which a nearest one is looked for."""


def in_itself(policy: Policy, texts: Sequence[tuple[str, str]] = ()) -> tuple[PolicyError, ...]:
    """What the policy alone shows: that it admits no one, or says what is of no use. ``texts``: of its files."""
    hint = "was it cut short? restore it, or remove it"
    empty = [file for file, text in texts if not text.strip()]
    found = (
        *(PolicyError(file, 0, "", "is empty: it sets nothing", hint) for file in empty),
        *_of_no_use(policy),
        *_doubts(policy),
        *_too_small(policy),
        *_percentages(policy),
        *_open_doors(policy, texts),
    )
    access = [(path, setting) for path, setting in policy.settings.items() if path[-1] == "access"]
    everybody = next((setting for path, setting in access if path == ("limits", "access")), None)
    if everybody is not None and everybody.value == "deny" and all(one.value == "deny" for _, one in access):
        hint = 'write access = "allow" in the section of each user and group that may use the GPU'
        found = (everybody.origin.wrong("admits no one: no section allows access", hint), *found)
    return found


def _of_no_use(policy: Policy) -> Iterator[PolicyError]:
    """On a server of one user all clients have the same priority (docs/measured.md: servers do not look at others')."""
    lower = [one for path, one in policy.settings.items() if path[-1] == "client_priority" and one.value != "normal"]
    if lower and all(of(policy, name).sharing != "one-server" for name in names(policy)):
        problem = 'changes nothing: no instance has sharing = "one-server", where users share a server'
        yield lower[0].origin.wrong(problem, 'write sharing = "one-server" in an instance, or leave it out')
    turns = [one for path, one in policy.settings.items() if "turn" in (path[0], path[-2] if len(path) > 3 else "")]
    if turns and policy.enforce and all(of(policy, name).sharing == "per-user" for name in names(policy)):
        problem = 'changes nothing: no instance has sharing = "turns", except on GPUs in EXCLUSIVE_PROCESS mode'
        yield turns[0].origin.wrong(problem, 'write sharing = "turns" in an instance, or leave [turn] out')


def _percentages(policy: Policy) -> Iterator[PolicyError]:
    """Warn about numbers of multiprocessors that look like percentages: before version 1.0 they were."""
    for path, setting in policy.settings.items():
        count = setting.value.count if isinstance(setting.value, values.Multiprocessors) else 0
        if path[-1] in ("active_threads", "total_active_threads") and 0 < count <= 100 and count % 5 == 0:
            problem = f"{count} without a percent sign means {count} multiprocessors"
            yield setting.origin.wrong(problem, f'write "{count}%" if a percentage is meant')


def _open_doors(policy: Policy, texts: Sequence[tuple[str, str]]) -> Iterator[PolicyError]:
    """Warn about what opens more than an administrator may think."""
    settings = policy.settings
    mode = settings.get(("mode",))
    if mode is not None and mode.value == "report" and len(texts) > 1 and mode.origin.file != texts[0][0]:
        problem = "is set in another file than the first one: no limit is set, and every user is admitted"
        yield mode.origin.wrong(problem, f"remove it if the trial is over, or write it into {texts[0][0]}")
    preempt = settings.get(("turn", "never_preempt"))
    if preempt is not None and preempt.value:
        problem = "holds for all users: no turn ends by its time limit"
        yield preempt.origin.wrong(problem, "write it in the section of each user or group that needs it")
    for path, setting in settings.items():
        below = settings.get(("limits", path[-1]))
        if path[0] != "cgroup" or path[1].startswith("/") or below is None:
            continue
        if path[-1] == "active_threads":
            device = Device(0, "", "", 0, H200)
            mine, all_ = (values.percent_of(one.value, [device], policy.weights) for one in (setting, below))
            raises = mine > all_
        else:
            raises = path[-1] == "memory_limit"
        if raises:
            problem = "can raise the limit of [limits] in each cgroup of this name, and users can make one"
            yield setting.origin.wrong(problem, 'begin the pattern with a path of root\'s, like "/system.slice/"')


def _too_small(policy: Policy) -> Iterator[PolicyError]:
    for path, setting in policy.settings.items():
        for one in setting.value.values() if path[-1] == "memory_limit" else ():
            if isinstance(one.value, int):
                yield from _little(policy, path, one.origin, one.value, H200)


def _doubts(policy: Policy) -> list[PolicyError]:
    """Of the instances."""
    sections = [of(policy, name) for name in names(policy)]
    if len(sections) < 2:
        return []
    found = [*_shared_devices(policy, sections), *_twice(policy, sections)]
    if not any(_open(one) for one in sections):
        text = "no instance serves the users whom no instance names"
        hint = "leave users and groups out of one [instance.NAME], or refuse the others in so many words with access"
        found.append(told(policy, sections[0], "users", text, hint))
    return found


def _shared_devices(policy: Policy, sections: Sequence[Policy]) -> Iterator[PolicyError]:
    seen: dict[str, str] = {}
    for one in sections:
        if not one.devices:
            text = "serves all GPUs, beside other instances"
            yield told(policy, one, "devices", text, 'name its GPUs: devices = ["GPU-…"]')
        for uuid in one.devices:
            before = seen.setdefault(uuid.lower(), one.instance)
            if before != one.instance:
                text = f"{uuid} is served by {before} too: its users are at work there at the same time"
                yield told(policy, one, "devices", text, "name each GPU in one instance")


def _twice(policy: Policy, sections: Sequence[Policy]) -> Iterator[PolicyError]:
    if policy.placement != "fixed":
        return
    seen: dict[tuple[str, str], str] = {}
    for one in sections:
        for kind, named in (("users", one.only_users), ("groups", one.only_groups)):
            for name in named:
                before = seen.setdefault((kind, name), one.instance)
                if before != one.instance:
                    yield told(policy, one, kind, f"{name} is named in {before} too, which is taken", "remove one")


def _open(one: Policy) -> bool:
    return not (one.only_users or one.only_groups)


def names_in(policy: Policy) -> tuple[list[str], list[str]]:
    """The users (without uids) and the groups that a policy names; the group of administrators only if a file does."""
    users = [path[1] for path in policy.named if path[0] == "user" and not _is_uid(path[1])]
    groups = [path[1] for path in policy.named if path[0] == "group"]
    for path, setting in _of_instances(policy):
        (groups if path[-1] == "groups" else users).extend(name for name in setting.value if not _is_uid(name))
    if ("agent", "admin_group") in policy.settings:
        groups.append(policy.admin_group)
    return users, list(dict.fromkeys(groups))


def unknown_names(policy: Policy, users: Collection[str], groups: Collection[str]) -> tuple[PolicyError, ...]:
    """Of those that are in neither collection. A uid is not looked up: in containers there are uids without a name."""
    wanted = [(path[0], path[1], origin) for path, origin in policy.named.items() if path[0] in ("user", "group")]
    admins = policy.settings.get(("agent", "admin_group"))
    if admins is not None:
        wanted.append(("group", admins.value, admins.origin))
    for path, setting in _of_instances(policy):
        wanted += [(path[-1][:-1], name, setting.origin) for name in setting.value]
    known = {"user": frozenset(users), "group": frozenset(groups)}
    listed = {kind: sorted(names) for kind, names in known.items()}
    found: list[PolicyError] = []
    for kind, name, origin in wanted:
        if name not in known[kind] and not (kind == "user" and _is_uid(name)):
            near = _nearest(name[: parse.SHOWN], listed[kind]) if len(found) < MOST_NEAREST else None
            found.append(_unknown(origin, kind, name, near))
    return tuple(found)


def _of_instances(policy: Policy) -> Iterator[tuple[Path, Setting]]:
    """Users and groups that an instance is for."""
    for path, setting in policy.settings.items():
        if path[0] == "instance" and len(path) == 3 and path[2] in ("users", "groups"):
            yield path, setting


def unusable_programs(policy: Policy, problems: Mapping[str, str]) -> tuple[PolicyError, ...]:
    """Warnings about programs that the policy names; ``problems`` by path: why root does not run it."""
    found = []
    for path, setting in policy.settings.items():
        if path[-1] in PROGRAMS and setting.value in problems:
            found.append(setting.origin.wrong(problems[setting.value], "install it, or correct the path"))
    return tuple(found)


def programs_in(policy: Policy) -> list[str]:
    """The programs that the files of a policy name, as they are written there."""
    return [setting.value for path, setting in policy.settings.items() if path[-1] in PROGRAMS]


def needs_devices(policy: Policy) -> bool:
    """Whether anything in the policy can be compared with GPUs."""
    return any(path[-1] in ("memory_limit", "active_threads", "devices") for path in policy.settings)


def against_devices(policy: Policy, devices: Sequence[Device]) -> tuple[PolicyError, ...]:
    """Warnings about what the GPUs do not have. Devices without a UUID are those of an agent that does not know them
    yet; there is nothing to compare with then."""
    devices = [device for device in devices if device.uuid]
    if not devices:
        return ()
    found: list[PolicyError] = []
    for path, setting in policy.settings.items():
        if path[-1] in ("active_threads", "total_active_threads"):
            found += [*_too_many(setting, devices), *_too_few(setting, devices)]
        elif path[-1] == "memory_limit":
            found += _memory(policy, path, setting, devices)
        elif path[0] == "instance" and path[-1] == "devices":
            here = {device.uuid.lower() for device in devices}
            for uuid in setting.value:
                if uuid.lower() not in here and uuid != parse.EACH:
                    found.append(setting.origin.wrong(f"there is no GPU {uuid} here", "see nvidia-smi -L"))
    return tuple(found)


def _too_many(setting: Setting, devices: Sequence[Device]) -> Iterator[PolicyError]:
    most = max(device.multiprocessors for device in devices)
    if isinstance(setting.value, values.Multiprocessors) and setting.value.count > most:
        problem = f"{setting.value.count} multiprocessors are more than a GPU here has ({most})"
        yield setting.origin.wrong(problem, "it gives the whole GPU; write active_threads = '100%' if that is meant")


def _too_few(setting: Setting, devices: Sequence[Device]) -> Iterator[PolicyError]:
    """Multiprocessors that somebody has counted, or a total, and one process gets more."""
    value, total = setting.value, setting.origin.key.endswith("total_active_threads")
    if not (total or isinstance(value, values.Multiprocessors)):
        return
    if all(values.percent_of(value, [one], 1.0) < values.least_percent([one]) for one in devices):
        least = min(units.least(device.multiprocessors) for device in devices)
        problem = f"MPS gives each client process {least} multiprocessors at least"
        yield setting.origin.wrong(problem, f"write at least {least}, or expect that many")


def _memory(policy: Policy, path: Path, setting: Setting, devices: Sequence[Device]) -> Iterator[PolicyError]:
    table = {name: one.value for name, one in setting.value.items()}
    without = [str(one.ordinal) for one in devices if values.for_device(table, one) is None]
    here = len(devices) - len(without)
    if path == ("limits", "memory_limit") and without and here == len(table):
        problem = f"says nothing about GPU {', '.join(without)}: there is no limit there"
        yield setting.origin.wrong(problem, "name each GPU, or write one limit for all GPUs")
    for name, one in setting.value.items():
        origin = one.origin
        fits = [device for device in devices if values.for_device({name: one.value}, device) is not None]
        if not fits:
            ordinals = ", ".join(str(device.ordinal) for device in devices)
            yield origin.wrong(f"there is no GPU {name} here", f"the GPUs here: {ordinals}; see nvidia-smi -L")
            continue
        largest = max(fits, key=lambda device: device.memory)
        size = values.bytes_of(one.value, largest)
        if isinstance(one.value, int) and one.value > largest.memory:
            has = units.limit_text(largest.memory - largest.memory % units.MIB)
            problem = f"{units.limit_text(one.value)} is more than GPU {largest.ordinal} has ({has})"
            yield origin.wrong(problem, 'it limits nothing; write "100%" if that is meant')
        elif size is not None and not isinstance(one.value, int):
            yield from _little(policy, path, origin, size, largest.multiprocessors)


def _little(policy: Policy, path: Path, origin: Origin, size: int, present: int) -> Iterator[PolicyError]:
    count = units.multiprocessors_for_percent(_percent(policy, path, present), present)
    context = math.ceil(CONTEXT + OF_EACH * count)
    if size < context * units.MIB:
        takes = f"with {count} multiprocessors that alone takes {context}M (measured on an H200)"
        problem = f"{units.limit_text(size)} gives no client a context: {takes}"
        yield origin.wrong(problem, 'write at least "1G", or fewer threads')
    elif size < SMALL:
        problem = f"{units.limit_text(size)} is hardly more than CUDA itself needs of it"
        yield origin.wrong(problem, 'most programs will find no memory; write at least "1G"')


def _percent(policy: Policy, path: Path, present: int) -> float:
    """Of a section's own clients; the least where it does not say: a user may be in a group that does."""
    settings, device = policy.settings, Device(0, "", "", 0, present)
    own = settings.get((*path[:-1], "active_threads"))
    groups = [
        one for at, one in settings.items() if path[0] == "user" and at[0] == "group" and at[-1] == "active_threads"
    ]
    given = [own] if own is not None else [one for one in (settings.get(("limits", "active_threads")), *groups) if one]
    return min((values.percent_of(one.value, [device], policy.weights) for one in given), default=100.0)


def _nearest(name: str, known: list[str]) -> str | None:
    if len(known) > MOST_COMPARED:
        known = [one for one in known if one[:1] == name[:1]]
    return units.nearest(name, known[:MOST_COMPARED])


def _unknown(origin: Origin, kind: str, name: str, near: str | None) -> PolicyError:
    hint = f'did you mean "{printable(near)}"?' if near else f"see `getent {'passwd' if kind == 'user' else 'group'}`"
    (shown,) = shown_path((name,))
    return origin.wrong(f"there is no {kind} {key_text((shown,))} here", hint)


def _is_uid(name: str) -> bool:
    return name.isascii() and name.isdigit()
