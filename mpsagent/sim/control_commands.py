"""The commands of the control daemon and their answers, word for word. Exit status 0 whatever happens."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mpsagent.sim import limits, texts

if TYPE_CHECKING:
    from mpsagent.sim.control_daemon import Daemon
    from mpsagent.sim.control_servers import Server
    from mpsagent.sim.control_session import Session

_PRIVILEGED = {
    "set_default_active_thread_percentage",
    "set_active_thread_percentage",
    "set_default_device_pinned_mem_limit",
    "set_device_pinned_mem_limit",
    "set_default_client_priority",
    "start_server",
    "shutdown_server",
    "terminate_client",
}


def _number(words: list[str], at: int) -> int:
    """The argument as a number, 0 when it is missing or none (as atoi does)."""
    return int(words[at]) if at < len(words) and words[at].isdigit() and len(words[at]) < 19 else 0


def _find(daemon: Daemon, words: list[str], at: int = 1) -> Server | None:
    """The server named by an argument; its absence is answered in words."""
    pid = _number(words, at)
    found = daemon.servers.get(pid)
    if found is None:
        daemon.say(texts.SERVER_NOT_FOUND.format(pid=pid))
    return found


def _tell(daemon: Daemon, reply: str | None) -> None:
    """A server's answer: fields separated by semicolons, a line each; nothing when it died."""
    if reply:
        daemon.say(*reply.split(";"))


def _device_rows(daemon: Daemon, csv: bool) -> list[str]:
    if csv:
        rows = [f"{at},{device.pci},{device.uuid},{device_name()},N/A" for at, device in enumerate(daemon.devices)]
        return [texts.DEVICE_HEADER_CSV, *rows]
    rows = [f"{at:<16}{device.pci}  {device.uuid}  {device_name():<34}N/A" for at, device in enumerate(daemon.devices)]
    return [texts.DEVICE_HEADER, *rows]


def device_name() -> str:
    from mpsagent.sim import gpu

    return gpu.NAME


def execute(daemon: Daemon, command: str, ui: Session) -> None:
    """One command of the open front-end. What follows a newline in it was only written into the log."""
    command = command.partition("\n")[0]
    words = command.split()
    name = words[0] if words else ""
    handler = _COMMANDS.get(name)
    if handler is None:
        daemon.say(texts.UNKNOWN_COMMAND.format(command=command if not words else name))
    elif ui.privileged:
        handler(daemon, words)
    elif name == "quit":
        daemon.say(texts.NO_QUIT_PRIVILEGE)
    elif name in _PRIVILEGED:
        daemon.say(texts.NO_PRIVILEGE.format(uid=ui.uid))
    else:
        handler(daemon, words)


def get_server_list(daemon: Daemon, words: list[str]) -> None:
    if daemon.servers:
        daemon.say(*[str(pid) for pid in daemon.servers])


def get_server_status(daemon: Daemon, words: list[str]) -> None:
    if found := _find(daemon, words):
        _tell(daemon, found.ask("STATUS"))


def get_client_list(daemon: Daemon, words: list[str]) -> None:
    if found := _find(daemon, words):
        _tell(daemon, found.ask("CLIENTS"))


def get_device_client_list(daemon: Daemon, words: list[str]) -> None:
    if len(words) > 1:
        found = _find(daemon, words)
        servers = [found] if found else []
    else:
        servers = list(daemon.servers.values())
    for one in servers:
        _tell(daemon, one.ask("DEVICE_CLIENTS"))


def ps(daemon: Daemon, words: list[str]) -> None:
    if "-p" in words:
        at = words.index("-p") + 1
        found = daemon.servers.get(_number(words, at))
        if found is None:
            daemon.say(*[texts.SERVER_NOT_FOUND.format(pid=_number(words, at))] * 2)
            if daemon.ui is not None:
                daemon.ui.answer("")
            return
        servers = [found]
    else:
        servers = list(daemon.servers.values())
        if not servers:
            daemon.say(texts.NO_SERVER)
            return
    rows: list[str] = []
    for one in servers:
        for row in (one.ask("PS") or "").split(";"):
            columns, _, name = row.partition("|")
            if name:  # whatever the client is called, line feeds and all: MPS prints it as it is
                rows.append(f"{columns}{os.fsdecode(bytes.fromhex(name)):<15}")
    if rows:
        daemon.say(texts.PS_HEADER, *rows)


def set_default_active_thread_percentage(daemon: Daemon, words: list[str]) -> None:
    value = limits.percentage(words[1] if len(words) > 1 else "")
    if value is None:
        daemon.log.write(texts.BAD_PERCENTAGE)
    else:
        daemon.default_percentage = value
    daemon.say(str(daemon.default_percentage))


def get_default_active_thread_percentage(daemon: Daemon, words: list[str]) -> None:
    daemon.say(str(daemon.default_percentage))


def set_active_thread_percentage(daemon: Daemon, words: list[str]) -> None:
    if found := _find(daemon, words):
        value = limits.percentage(words[2] if len(words) > 2 else "")
        if value is None:
            daemon.log.write(texts.BAD_PERCENTAGE)
            _tell(daemon, found.ask("GET_PERCENTAGE"))
        else:
            _tell(daemon, found.ask(f"SET_PERCENTAGE {value}"))


def get_active_thread_percentage(daemon: Daemon, words: list[str]) -> None:
    if found := _find(daemon, words):
        _tell(daemon, found.ask("GET_PERCENTAGE"))


def set_default_device_pinned_mem_limit(daemon: Daemon, words: list[str]) -> None:
    device, value = _number(words, 1), words[2] if len(words) > 2 else ""
    daemon.log.write(f"set_default_device_pinned_mem_limit {device} {value}.")
    daemon.default_limits[device] = limits.memory(value)  # 0 for none; the device keeps its place


def get_default_device_pinned_mem_limit(daemon: Daemon, words: list[str]) -> None:
    value = daemon.default_limits.get(_number(words, 1))
    if not value:
        daemon.log.write(texts.NO_DEFAULT_LIMIT)
    else:
        daemon.say(limits.shown(value))


def set_device_pinned_mem_limit(daemon: Daemon, words: list[str]) -> None:
    if found := _find(daemon, words):
        mebibytes = limits.memory(words[3] if len(words) > 3 else "")
        found.ask(f"SET_LIMIT {_number(words, 2)} {mebibytes}")


def get_device_pinned_mem_limit(daemon: Daemon, words: list[str]) -> None:
    if found := _find(daemon, words):
        mebibytes = int(found.ask(f"GET_LIMIT {_number(words, 2)}") or 0)
        if mebibytes:
            daemon.say(limits.shown(mebibytes))


def set_default_client_priority(daemon: Daemon, words: list[str]) -> None:
    daemon.default_priority = _number(words, 1)
    for one in daemon.servers.values():
        one.ask(f"PRIORITY {daemon.default_priority}")


def get_default_client_priority(daemon: Daemon, words: list[str]) -> None:
    daemon.say(str(daemon.default_priority))


def device_query(daemon: Daemon, words: list[str]) -> None:
    rows = _device_rows(daemon, "--csv" in words)
    daemon.say("Default", *rows)
    for one in daemon.servers.values():
        if one.ask("DEVICE_QUERY") is not None:
            daemon.say(f"\nServer {one.pid}", *rows)


def start_server(daemon: Daemon, words: list[str]) -> None:
    if len(words) < 3 or words[1] != "-uid" or not words[2].isdigit():
        daemon.say(texts.UID_REQUIRED)
        return
    uid = 0 if daemon.multiuser else int(words[2])
    daemon.follow(daemon.turns.start_request(uid))


def shutdown_server(daemon: Daemon, words: list[str]) -> None:
    found = _find(daemon, words)
    if found is not None and not found.dismissed and found.lines is not None:
        daemon.try_shutdown(found, force="-f" in words)


def terminate_client(daemon: Daemon, words: list[str]) -> None:
    found = _find(daemon, words)
    if found is None:
        daemon.say(f"Server {_number(words, 1)} not found!", "1")
        return
    daemon.say(found.ask(f"TERMINATE {_number(words, 2)}") or "1")


def leave(daemon: Daemon, words: list[str]) -> None:
    timeout = None
    if "-t" in words:
        timeout = float(_number(words, words.index("-t") + 1))
        daemon.log.write(texts.QUIT_TIMEOUT.format(seconds=int(timeout)))
    daemon.quit(timeout)


_COMMANDS = {
    "get_server_list": get_server_list,
    "get_server_status": get_server_status,
    "get_client_list": get_client_list,
    "get_device_client_list": get_device_client_list,
    "ps": ps,
    "set_default_active_thread_percentage": set_default_active_thread_percentage,
    "get_default_active_thread_percentage": get_default_active_thread_percentage,
    "set_active_thread_percentage": set_active_thread_percentage,
    "get_active_thread_percentage": get_active_thread_percentage,
    "set_default_device_pinned_mem_limit": set_default_device_pinned_mem_limit,
    "get_default_device_pinned_mem_limit": get_default_device_pinned_mem_limit,
    "set_device_pinned_mem_limit": set_device_pinned_mem_limit,
    "get_device_pinned_mem_limit": get_device_pinned_mem_limit,
    "set_default_client_priority": set_default_client_priority,
    "get_default_client_priority": get_default_client_priority,
    "device_query": device_query,
    "start_server": start_server,
    "shutdown_server": shutdown_server,
    "terminate_client": terminate_client,
    "quit": leave,
}
