"""What each way of sharing a GPU costs and protects, in words for people."""

from __future__ import annotations

from mpsagent.policy.policy import Policy

WORDS: dict[str, str] = {
    "turns": (
        "one user at a time has the whole GPU; the others wait, and turn.time_limit and turn.grace bound that. A "
        'fault, a hang or a full memory hits no other user (with server_scope = "all" a fault also hits paused users). '
        "The GPU's idle parts are not used by others."
    ),
    "one-server": (
        "all users at once on one server that runs as root; no user waits while it has room (48 contexts), and each "
        "client has exactly its limits. A fault of one client ends the clients of all users, and all users are held "
        "until the server is well again. Limits are for each process: total_active_threads and total_memory_limit "
        "bound a user. turn.* does not apply."
    ),
    "per-user": (
        "all users at once, each on a control daemon and a server of the user's own, which start with the first client "
        "and end when idle (daemon_idle_timeout). A fault, hang or restart hits that user alone; the server runs as "
        "the user. Costs 64 MiB of device memory for each user at work (measured). On a GPU in EXCLUSIVE_PROCESS mode "
        "users take turns instead. turn.* does not apply."
    ),
}


def words(policy: Policy) -> str:
    """Return what the way of sharing of an instance means."""
    why = exclusive(policy)
    return f"{why}. {WORDS[policy.sharing]}" if why else WORDS[policy.sharing]


def exclusive(policy: Policy) -> str | None:
    """Return the reason for which users take turns against the policy's ``sharing``; None: they do not."""
    if not policy.exclusive:
        return None
    gpu, which = (f"GPU {policy.devices[0]}", f" -i {policy.devices[0]}") if policy.devices else ("the GPU", "")
    after = policy.settings["turn", "time_limit"]
    limit = "as long as turn.time_limit says" if after.origin.file else "without a time limit"
    return (
        f"the compute mode of {gpu} is EXCLUSIVE_PROCESS, in which one control daemon alone can use it, so users take "
        f"turns, {limit}. To let all users work at once: nvidia-smi{which} -c DEFAULT"
    )
