"""Orders, on sockets of the agent's own: one message and one answer for each connection.

Who asks is what the kernel says of the connection that the agent itself has accepted. There are two sockets: one that
root and the admin group alone can connect to, and everybody's, for users who end what is their own. However many come
by everybody's, the other has its own places, and accepting takes a small part of the agent's time.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from mpsagent.agent.acting import Acting, Those, no_client
from mpsagent.linux.descriptors import SO_PASSCRED
from mpsagent.linux.peers import peer
from mpsagent.linux.sent_descriptors import accept_descriptors, let_go, look_when_readable, no_room
from mpsagent.mps.units import parse_duration
from mpsagent.policy import parse
from mpsagent.policy.keys import OLD_KEYS
from mpsagent.snapshot import lease_body
from mpsagent.snapshot.problem import Json, Problem

LONGEST, LONGEST_ANSWER = 16 << 10, 128 << 10
"""Bytes of a message; of an answer, which has to fit into the socket's buffer."""
EACH, MOST = 4, 64
"""Connections of a user, and of all, on each of the sockets."""
ACCEPTED, PAUSE = 8, 0.01
"""So many connections are accepted at a time, and so many seconds apart."""
PATIENCE = 5.0
"""Seconds for a message, and for a name service to say whether somebody is an administrator."""
_Keys = Mapping[str, type | tuple[type, ...]]
_PID: _Keys = {"pid": int}
_SPAN = (str, int, float, type(None))
_TIMEOUT: _Keys = {"timeout": _SPAN}
_INSTANCE: _Keys = {"instance": (str, type(None))}
IsAdmin = Callable[[int], Awaitable[bool]]


class _Places:
    """Connections to one socket, by user. ``silent``: those that have not sent their order yet, the oldest first."""

    def __init__(self) -> None:
        self._of: Counter[int] = Counter()
        self.silent: dict[asyncio.Timeout, int] = {}

    def take(self, uid: int) -> bool:
        """Take a place if this user may have one more. If there is none left, the user with most gives one up."""
        if self._of[uid] >= EACH or (self._of.total() >= MOST and not self._gives_way(uid)):
            return False
        self._of[uid] += 1
        return True

    def leave(self, uid: int) -> None:
        self._of[uid] -= 1
        if not self._of[uid]:
            del self._of[uid]

    def _gives_way(self, uid: int) -> bool:
        most = max(self.silent.values(), key=lambda one: self._of[one], default=uid)
        if self._of[most] <= self._of[uid]:
            return False
        oldest = next(patience for patience, one in self.silent.items() if one == most)
        del self.silent[oldest]
        self.leave(most)
        with suppress(RuntimeError):  # its time is over already
            oldest.reschedule(asyncio.get_running_loop().time())
        return True


class Orders:
    """``failed`` is told of a mistake of ours."""

    def __init__(self, takes: Acting, is_admin: IsAdmin, failed: Callable[[BaseException], None]) -> None:
        self._takes, self._is_admin, self._failed = takes, is_admin, failed
        self._listening: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, sock: socket.socket) -> None:
        """On a listening socket whose messages are whole (SOCK_SEQPACKET)."""
        accept_descriptors(sock, yes=False)
        sock.setsockopt(socket.SOL_SOCKET, SO_PASSCRED, 1)  # look_first() wants it
        sock.setblocking(False)
        self._listening.append(sock)
        asyncio.get_running_loop().add_reader(sock, self._accept, sock, _Places())

    def close(self) -> None:
        for sock in self._listening:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()
        self._listening.clear()
        for task in self._tasks:
            task.cancel()

    def _accept(self, sock: socket.socket, places: _Places) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(sock)
        for _ in range(ACCEPTED):
            if no_room():
                break
            try:
                taken, _ = sock.accept()
                who = peer(taken)
            except OSError:  # there is no other one, or no descriptor for it
                break
            taken.setblocking(False)
            if not places.take(who.uid):
                self._answer(taken, Problem(429, "too many orders at a time", f"uid {who.uid}", "one after the other"))
                continue
            task = loop.create_task(self._serve(taken, who.pid, who.uid, places))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        loop.call_later(PAUSE, lambda: sock in self._listening and loop.add_reader(sock, self._accept, sock, places))

    async def _serve(self, taken: socket.socket, pid: int, uid: int, places: _Places) -> None:
        answer: Json | Problem
        has_place = True
        try:
            async with asyncio.timeout(PATIENCE) as patience:
                places.silent[patience] = uid
                try:
                    await look_when_readable(taken)
                    message = await asyncio.get_running_loop().sock_recv(taken, LONGEST + 1)
                finally:
                    has_place = places.silent.pop(patience, None) is not None
            answer = await self._carry_out(message, pid, uid)
        except Problem as problem:
            answer = problem
        except TimeoutError:
            answer = Problem(503, "the answer took too long", "order", "try again")
        except OSError:  # who asked has gone
            answer = {}
        except Exception as error:
            self._failed(error)
            answer = Problem(500, f"a fault in mpsagent: {type(error).__name__}", "order", "see the journal")
        finally:
            if has_place:
                places.leave(uid)
        self._answer(taken, answer)

    def _answer(self, taken: socket.socket, answer: Json | Problem) -> None:
        status, body = (answer.status, answer.body()) if isinstance(answer, Problem) else (200, answer)
        data = json.dumps({"status": status, "answer": body}, separators=(",", ":")).encode()
        if len(data) > LONGEST_ANSWER:
            body = Problem(500, "the answer is too long", "order", "it was carried out; see status").body()
            data = json.dumps({"status": 500, "answer": body}).encode()
        with suppress(OSError):
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST_ANSWER)
            taken.send(data)
        let_go(taken)

    # --- one order

    async def _carry_out(self, message: bytes, pid: int, by: int) -> Json:
        body = _body(message)
        name = body.pop("order", None)
        if not isinstance(name, str) or name not in ORDERS:
            raise Problem(400, f"unknown order {str(name)[:50]!r}", "order", f"known: {', '.join(ORDERS)}")
        what, keys, carry_out = ORDERS[name]
        for key, value in body.items():
            if key not in keys:
                new = OLD_KEYS["limits"].get(key)
                known = f"known: {', '.join(keys) or 'none'}"
                hint = f'it is called "{new}" now' if new in keys else known
                raise Problem(400, f"unknown key {key[:50]!r}", "order", hint)
            if not isinstance(value, keys[key]) or (isinstance(value, bool) and bool not in _types(keys[key])):
                names = " or ".join(kind.__name__ for kind in _types(keys[key]))
                raise Problem(400, f"{key!r} is not of type {names}", "order")
        if keys.get("pid") is int and name != "lease" and not 0 < body.get("pid", 0) < 1 << 32:
            raise Problem(400, "not a process id", "pid", "a number, as `mpsagent-cli clients` and `servers` show it")
        if name == "terminate-each":
            body["those"] = await self._those(body, pid, by)
        else:
            await self._may(by, what.format(pid=body.get("pid")), body["pid"] if name == "terminate" else None)
        return await carry_out(self._takes, body, by)

    async def _those(self, body: Json, pid: int, by: int) -> Those:
        """Whose clients they are is not asked: who is no administrator ends the own ones among them."""
        if sum(bool(body.get(key)) for key in ("job", "cgroup", "mine", "below")) != 1:
            raise Problem(400, "which clients?", "order", 'one of "job", "cgroup", "mine" and "below"')
        cgroup = body.get("cgroup") or None
        try:
            if cgroup not in (None, "/"):
                parse.cgroup(cgroup)
        except parse.Wrong as error:
            raise Problem(400, error.faults[0].problem, "cgroup", error.faults[0].hint) from None
        own = bool(body.get("mine") or body.get("below")) or not await self._all_may(by)
        return Those(by if own else None, body.get("job") or None, cgroup, pid if body.get("below") else None)

    async def _all_may(self, uid: int) -> bool:
        """Root and the admin group may do everything."""
        async with asyncio.timeout(PATIENCE):
            return uid == 0 or await self._is_admin(uid)

    async def _may(self, uid: int, what: str, client: int | None) -> None:
        """Root, the admin group, and a user what is the user's own."""
        owner = None if client is None else self._takes.owner(client)
        if client is not None and owner is None:
            raise no_client(client, held=self._takes.waits(client))
        if uid == owner or await self._all_may(uid):
            return
        hint = "root or a member of the admin group (mpsagent-admin) may do this"
        who = self._takes.name(uid) or f"user {uid}"
        raise Problem(403, f"Permission denied: {who} may not {what}", "order", hint)


def _body(message: bytes) -> Json:
    hint = 'send an object, like {"order": "resume"}'
    if len(message) > LONGEST:
        raise Problem(413, "the message is too long", "order", f"at most {LONGEST} bytes")
    try:
        body = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"the message is not JSON: {error}", "order", hint) from None
    if not isinstance(body, dict):
        raise Problem(400, "the message is not a JSON object", "order", hint)
    return body


def _seconds(body: Json, key: str = "timeout") -> float | None:
    timeout = body.get(key)
    try:
        seconds = parse_duration(timeout) if isinstance(timeout, str) else timeout
        if seconds is not None and not 0 <= seconds <= 366 * 86400:
            raise ValueError("it is negative, or longer than a year")
    except ValueError as error:
        raise Problem(400, f"{key}: {error}", key, "as JSON also a number of seconds") from None
    return None if seconds is None else float(seconds)


def _types(kind: type | tuple[type, ...]) -> tuple[type, ...]:
    return kind if isinstance(kind, tuple) else (kind,)


def _given(body: Json, *keys: str) -> dict[str, bool]:
    return {key: bool(body.get(key)) for key in keys}


ORDERS: dict[str, tuple[str, _Keys, Callable[[Acting, Json, int], Coroutine[Any, Any, Json]]]] = {
    "terminate": ("end client {pid}", {**_PID, "now": bool, "dry_run": bool}, lambda takes, body, by:
                  takes.terminate(body["pid"], by=by, **_given(body, "now", "dry_run"))),
    "terminate-each": ("end clients", {"job": str, "cgroup": str, "mine": bool, "below": bool, "now": bool,
                                       "dry_run": bool}, lambda takes, body, by:
                       takes.terminate_each(body["those"], by=by, **_given(body, "now", "dry_run"))),
    "drain": ("drain", {**_TIMEOUT, **_INSTANCE},
              lambda takes, body, by: takes.drain(_seconds(body), by, body.get("instance"))),
    "resume": ("resume", _INSTANCE, lambda takes, body, by: takes.resume(by, body.get("instance"))),
    "restart-mps": ("restart MPS", {**_TIMEOUT, **_INSTANCE, "dry_run": bool}, lambda takes, body, by:
                takes.restart(_seconds(body), by, body.get("instance"), **_given(body, "dry_run"))),
    "extend-turn": ("extend a turn", {"uid": int, "by": _SPAN}, lambda takes, body, by:
                    takes.extend_turn(body.get("uid"), _seconds(body, "by"), by)),
    "reload": ("reload the policy", {}, lambda takes, body, by: takes.reload(by)),
    "diff": ("compare the policy files", {},
             lambda takes, body, by: takes.policy_diff()),
    "lease": ("give a lease", lease_body.KEYS, lambda takes, body, by: takes.give_lease(body, by)),
    "delete-lease": ("end a lease", {"number": int},
                     lambda takes, body, by: takes.end_lease(body.get("number", -1), by)),
}  # fmt: skip
"""What it is in words, its keys, and how it is carried out."""
