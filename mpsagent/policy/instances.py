"""The instances of a policy: a policy for each of them, and what is wrong between them. Pure.

An instance's own limits and switch stand in the place of everybody's; what a user's or a group's section says comes
first there as everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from mpsagent.mps.limits import Device
from mpsagent.policy import apart
from mpsagent.policy.keys import KEYS, Scope
from mpsagent.policy.origins import Origin, PolicyError, Setting, key_text
from mpsagent.policy.parse import EACH
from mpsagent.policy.policy import Policy, of_instance, weights_of

LONGEST_OF_EACH = 60


def names(policy: Policy) -> list[str]:
    """The sections, in the order of the files; the default one when there is none."""
    return [path[1] for path in policy.named if path[0] == "instance"] or [policy.instance]


def needs_devices(policy: Policy) -> bool:
    """Whether the GPUs of the machine have to be known before the instances are."""
    return any(_devices(policy, name) == (EACH,) for name in names(policy))


def needs_modes(policy: Policy) -> bool:
    """Return whether the compute modes of the GPUs decide which instances there are."""
    return any(_may_split(of(policy, name)) for name in names(policy))


def instances(
    policy: Policy, devices: Iterable[Device], exclusive: Collection[str] = frozenset()
) -> tuple[Policy, ...]:
    """A policy for each instance. ``devices``: all GPUs of the machine, as far as they are known; ``exclusive``: the
    UUIDs of those in EXCLUSIVE_PROCESS mode."""
    sections, machine = names(policy), tuple(devices)
    taken = {uuid.lower() for name in sections for uuid in _devices(policy, name)}
    free = [device for device in machine if device.uuid and device.uuid.lower() not in taken]
    found: list[Policy] = []
    for name in sections:
        one = of(policy, name)
        made = [_on(one, device) for device in free] if one.devices == (EACH,) else [one]
        for each in made:
            found += _by_mode(each, machine, exclusive)
    return tuple(found)


def _may_split(one: Policy) -> bool:
    return one.sharing == "per-user" and one.compute_mode != "default"


def _by_mode(one: Policy, machine: Sequence[Device], exclusive: Collection[str]) -> Iterator[Policy]:
    """A GPU in EXCLUSIVE_PROCESS mode belongs to one control daemon, so it gets its own instance, in which users
    take turns. The section's own instance keeps all other GPUs, or the first such GPU if all GPUs are in that mode."""
    if not _may_split(one) or not exclusive:
        yield one
        return
    known = {device.uuid.lower(): device for device in machine if device.uuid}
    mine = [uuid.lower() for uuid in one.devices] or list(known)
    shut = [uuid for uuid in mine if uuid in {each.lower() for each in exclusive}]
    rest = tuple(known[uuid].uuid if uuid in known else uuid for uuid in mine if uuid not in shut)
    if shut and rest:
        yield replace(one, devices=rest)
    elif not shut:
        yield one
    for number, uuid in enumerate(shut):
        device = known.get(uuid)
        alone = replace(_in_turns(one), devices=(uuid if device is None else device.uuid,))
        if number or rest:
            place = f"gpu{number if device is None else device.ordinal}"
            log = f"{one.log_directory}/{place}"
            alone = replace(alone, instance=f"{one.instance}-{place}", log_directory=log)
        elif len(shut) == 1:
            alone = replace(alone, devices=one.devices)
        yield alone


def _in_turns(one: Policy) -> Policy:
    """Turns that have no end unless the policy writes one."""
    never = Setting(None, Origin("turn.time_limit"))
    settings = {("turn", "time_limit"): never, **one.settings}
    return replace(one, sharing="turns", server="user", exclusive=one.instance, settings=settings)


def of(policy: Policy, name: str) -> Policy:
    """What holds in the section ``name``."""
    settings = {path: one for path, one in policy.settings.items() if path[0] != "instance" or len(path) < 4}
    for path, one in policy.settings.items():
        if path[:2] == ("instance", name) and len(path) > 3:
            settings[path[2:]] = one
    given = {key.field: key.default for key in KEYS if key.scope is Scope.INSTANCE}
    if len(names(policy)) > 1 or _devices(policy, name) == (EACH,):
        given["log_directory"] = f"{given['log_directory']}/{name}"
    given |= of_instance(policy.settings, name)
    return replace(policy, settings=settings, instance=name, weights=weights_of(settings), **given)


def without_section(policy: Policy, instance: Policy) -> Policy:
    """Return the policy for an instance that runs and whose section the policy no longer has: its rules for users
    hold, and the settings of the instance stay as they are."""
    kept = {key.field: getattr(instance, key.field) for key in KEYS if key.scope is Scope.INSTANCE}
    found = replace(of(policy, instance.instance), **kept)
    return replace(_in_turns(found), exclusive=instance.exclusive) if instance.exclusive else found


def _on(policy: Policy, device: Device) -> Policy:
    """The instance of a section ``["each"]`` for one GPU."""
    number = str(device.ordinal)
    written = ("instance", policy.instance, "log_directory") in policy.settings
    log = f"{policy.log_directory}/{number}" if written else policy.log_directory + number
    return replace(policy, instance=policy.instance + number, devices=(device.uuid,), log_directory=log)


def _devices(policy: Policy, name: str) -> tuple[str, ...]:
    found = policy.settings.get(("instance", name, "devices"))
    return () if found is None else tuple(found.value)


def with_own_directories(made: Iterable[Policy], run: str) -> tuple[Policy, ...]:
    """With ``placement = "by-directory"``: the first one keeps the public directory, the others have theirs in the run
    directory."""
    found = tuple(made)
    return (*found[:1], *(replace(one, pipe_directory=f"{run}/mps/{one.instance}") for one in found[1:]))


def environment(made: Sequence[Policy]) -> dict[str, str]:
    """What a user's programs need to find MPS, whichever of these instances they come to. Inside an instance that has
    some of the GPUs these are numbered from 0, and who counts GPUs by NVML, as PyTorch does, would look for more."""
    found = {"CUDA_MPS_PIPE_DIRECTORY": made[0].pipe_directory}
    shared = [one for one in made if not one.exclusive]
    counts = [len(one.devices) for one in shared or made]
    if all(counts):
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(min(counts))))
    return found


# --- what is wrong between them ---------------------------------------------------------------------------------------


def mistakes(policy: Policy) -> list[PolicyError]:
    """What cannot be, in the order of the files."""
    sections = [of(policy, name) for name in names(policy)]
    found: list[PolicyError] = []
    for number, one in enumerate(sections):
        for other in sections[:number]:
            if one.log_directory == other.log_directory:
                text = f"has the log_directory of {other.instance}"
                found.append(told(policy, one, "log_directory", text, "give each instance a directory of its own"))
        if one.pipe_directory != sections[0].pipe_directory:
            text = f"has another pipe_directory than {sections[0].instance}"
            hint = "one public directory serves all instances: remove the line, or write the same one"
            found.append(told(policy, one, "pipe_directory", text, hint))
    found += [one for section in sections for one in (*_no_pause(section), *_several_parts(policy, section))]
    each = [one for one in sections if one.devices == (EACH,)]
    if len(each) > 1:
        text = f'devices = ["each"] stands in {each[0].instance} already'
        found.append(told(policy, each[1], "devices", text, "one section serves each GPU that no other one names"))
    for one in each:
        if len(one.instance) > LONGEST_OF_EACH:
            text = f"a number is added to its name, which may have {LONGEST_OF_EACH} characters then"
            found.append(told(policy, one, "devices", text, "choose a shorter name"))
    return [*found, *_apart(policy, sections)]


def _apart(policy: Policy, sections: Sequence[Policy]) -> Iterator[PolicyError]:
    for one in sections:
        if apart.split(one.instance) or (one.devices == (EACH,) and apart.split(f"{one.instance}0")):
            text = "mpsagent names the control daemons of users so: NAME-u and a uid"
            yield told(policy, one, "devices", text, "choose another name")
        section, _, number = one.instance.rpartition("-gpu")
        if number.isdecimal() and any(other.sharing == "per-user" and other.instance == section for other in sections):
            text = f"mpsagent names an instance for a GPU of {section} in EXCLUSIVE_PROCESS mode so"
            yield told(policy, one, "devices", text, "choose another name")
        if one.sharing != "per-user":
            continue
        if len(one.instance) > apart.LONGEST:
            text = f"with per-user, uids are added to its name, which may have at most {apart.LONGEST} characters"
            yield told(policy, one, "sharing", text, "choose a shorter name")
        if one.compute_mode == "exclusive-process":
            text = (
                '"exclusive-process" lets one control daemon use a GPU, and sharing = "per-user" has one for each user'
            )
            yield told(policy, one, "compute_mode", text, 'write sharing = "turns" or "one-server", or leave it out')


def _several_parts(policy: Policy, one: Policy) -> Iterator[PolicyError]:
    """CUDA sees one MIG device at a time, so a control daemon serves one."""
    if len(one.devices) > 1 and any(uuid.startswith("MIG-") for uuid in one.devices):
        text = "one control daemon cannot serve a MIG device together with other devices"
        yield told(policy, one, "devices", text, "write an instance for each MIG device")


def _no_pause(one: Policy) -> Iterator[PolicyError]:
    """A server of its own has to end before the next user's can start, and its clients with it."""
    if one.sharing != "turns" or one.server == "all":
        return
    for path, setting in one.settings.items():
        if path[-2:] == ("turn", "on_expiry") and setting.value == "pause" and path[0] != "instance":
            problem = f'"pause" is not possible in {one.instance}, where each turn has a server of its own'
            hint = f'write server_scope = "all" in [instance.{one.instance}]; driver 580 and later'
            yield setting.origin.wrong(problem, hint)


def told(policy: Policy, one: Policy, key: str, problem: str, hint: str) -> PolicyError:
    path = ("instance", one.instance, key)
    setting = policy.settings.get(path)
    origin = policy.named.get(path[:2], Origin(key_text(path[:2]))) if setting is None else setting.origin
    return origin._replace(key=key_text(path)).wrong(problem, hint)
