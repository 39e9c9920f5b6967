"""What each way of sharing a GPU costs and protects, in words for people."""

from __future__ import annotations

WORDS: dict[str, str] = {
    "turns": (
        "one user at a time has the whole GPU; the others wait, and switch.after and switch.grace bound that. A fault, "
        'a hang or a full memory hits no other user (with server = "shared" a fault also hits paused users). '
        "The GPU's idle parts are not used by others."
    ),
    "together": (
        "all users at once on one server that runs as root; no user waits while it has room (48 contexts), and each "
        "client has exactly its limits. A fault of one client ends the clients of all users, and all users are held "
        "until the server is well again. Limits are for each process: total_threads and total_memory bound a user. "
        "switch.* does not apply."
    ),
    "apart": (
        "all users at once, each on a control daemon and a server of the user's own, which start with the first client "
        "and end when idle (apart_idle_timeout). A fault, hang or restart hits that user alone; the server runs as the "
        "user. Costs device memory (650 MiB a user, measured) and throughput. Not with EXCLUSIVE_PROCESS. switch.* "
        "does not apply."
    ),
}
