"""Who a uid is, asked of a name service (files, LDAP, SSSD) that may hang, and remembered.

An answer that has grown old is used while a new one is fetched: a name service that is down must not turn a user with
limits of their own into one without. That it is down neither Python tells from a user who does not exist, nor glibc,
when another service is asked after it: so each one of nsswitch.conf is asked, too.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import grp
import os
import pwd
import re
import time
from contextlib import suppress
from pathlib import Path

from mpsagent.linux.threads import Slots, in_thread
from mpsagent.policy.identity import Identity

CAPACITY = 10_000
BY_UID, BY_NAME = Slots(24), Slots(4)
"""Questions at a time. Any user may ask the API about names: where the name service hangs, those must not take the
threads of all else, nor of those who come to the gate."""
GIVE_UP = 120.0
"""Seconds after which a hanging question is asked again; its answer counts whenever it comes before."""
AGAIN = 5.0
"""Seconds until a service that is down is asked again about who is known, or about one of those who were looked up
without it."""
NSSWITCH = "/etc/nsswitch.conf"
FILES, LOOK = ("/etc/passwd", "/etc/group"), 1.0
"""A change of these makes every answer old; seconds between two looks at them."""
_FUNCTIONS = {"passwd": "getpwuid_r", "group": "getgrgid_r"}
_UNAVAIL, _TRYAGAIN = -1, -2  # enum nss_status
_heard: set[tuple[str, str]] = set()
"""Database and service: those that have answered in this process. One that never did is installed and not in use, as
``sss`` on many machines; no caller is to wait for it."""
_silent: dict[tuple[str, str], float] = {}
"""When each of those that never had was last asked."""


class Names:
    """``deadline`` seconds for each caller, ``age`` seconds until an answer is fetched anew."""

    def __init__(self, *, deadline: float = 2.0, age: float = 300.0) -> None:
        self.deadline = deadline
        self.age = age
        self._known: dict[int, tuple[float, Identity]] = {}
        self._asking: dict[int, asyncio.Task[Identity | None]] = {}
        self._unsure: set[int] = set()
        """Who was looked up while a service was silent: all are asked about again as soon as it answers."""
        self._next_try = 0.0
        self._files, self._looked = _changed(), time.monotonic()
        self._forgot = float("-inf")

    def known(self, uid: int) -> Identity | None:
        """What is known now, without waiting; an old answer is renewed behind the scenes."""
        entry = self._known.get(uid)
        if entry is None:
            return None
        if self._is_old(uid, entry):
            self.ask(uid)
        return entry[1]

    def awaited(self, uid: int) -> asyncio.Task[Identity | None] | None:
        """The first answer about a user, while it is awaited."""
        return None if uid in self._known else self._asking.get(uid)

    async def look_up(self, uid: int) -> Identity:
        """Within the deadline: the answer, else what was known before, else the bare uid (which is not remembered)."""
        entry = self._known.get(uid)
        if entry is None or self._is_old(uid, entry):
            with suppress(TimeoutError):
                async with asyncio.timeout(self.deadline):
                    found = await asyncio.shield(self.ask(uid))
                    if found is not None:
                        return found
            entry = self._known.get(uid)
        return entry[1] if entry is not None else Identity(uid)

    async def uid_of(self, name: str) -> int | None:
        """The uid of a user name; None when there is no such user. Raises TimeoutError when there is no answer."""
        return await in_thread(_uid_of, name, deadline=self.deadline, slots=BY_NAME)

    def forget(self) -> None:
        """Everything is asked anew (after a change of users or groups); until then the old answers count."""
        self._known = {uid: (float("-inf"), identity) for uid, (_, identity) in self._known.items()}
        self._forgot = time.monotonic()

    def _is_old(self, uid: int, entry: tuple[float, Identity]) -> bool:
        now = time.monotonic()
        if now > self._looked + LOOK:
            before, self._files, self._looked = self._files, _changed(), now
            if self._files != before:
                self.forget()
                return True
        if uid in self._unsure and now >= self._next_try:
            self._next_try = now + AGAIN
            return True
        return now - entry[0] > self.age

    def ask(self, uid: int) -> asyncio.Task[Identity | None]:
        """Return the answer to come: there is one question for each uid at a time."""
        task = self._asking.get(uid)
        if task is None:
            task = self._asking[uid] = asyncio.create_task(self._fetch(uid))
        return task

    async def _fetch(self, uid: int) -> Identity | None:
        began = time.monotonic()
        try:
            identity = await in_thread(identity_of, uid, deadline=GIVE_UP, slots=BY_UID)
        except (TimeoutError, OSError):
            if uid in self._known:
                self._known[uid] = time.monotonic() - self.age + AGAIN, self._known[uid][1]
            return None
        finally:
            self._asking.pop(uid, None)
        self._known.pop(uid, None)
        self._known[uid] = (time.monotonic() if began > self._forgot else float("-inf"), identity)
        if len(self._known) > CAPACITY:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._unsure.discard(oldest)
        if any(at >= began for at in _silent.values()):
            self._unsure.add(uid)
        else:
            self._unsure.discard(uid)
            for one in self._unsure:
                self._known[one] = float("-inf"), self._known[one][1]
            self._unsure.clear()
        return identity


def _changed() -> list[int]:
    found = []
    for path in FILES:
        with suppress(OSError):
            found.append(Path(path).stat().st_mtime_ns)
    return found


def identity_of(uid: int) -> Identity:
    """Raises OSError while a service is down, which may be the one that knows this user, or a group of the user's."""
    _check_services(uid)
    identity = _entries(uid)
    _check_services(uid)  # it may have gone down meanwhile
    return identity


def _check_services(uid: int) -> None:
    try:
        with open(NSSWITCH, encoding="utf-8", errors="replace") as file:
            lines = file.read(1 << 16).splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        database, _, services = line.partition("#")[0].partition(":")
        for service in re.sub(r"\[.*?\]", " ", services).split() if database.strip() in _FUNCTIONS else ():
            _check_service(database.strip(), service, uid)


def _check_service(database: str, service: str, number: int) -> None:
    """As glibc asks it. The entry itself is not wanted, so that there is too little room for it is an answer, too."""
    try:
        function = getattr(ctypes.CDLL(f"libnss_{service}.so.2"), f"_nss_{service}_{_FUNCTIONS[database]}")
    except (OSError, AttributeError):  # not installed
        return
    entry, space, error = ctypes.create_string_buffer(256), ctypes.create_string_buffer(1024), ctypes.c_int()
    status = function(ctypes.c_uint(number), entry, space, ctypes.c_size_t(len(space)), ctypes.byref(error))
    if status == _UNAVAIL or (status == _TRYAGAIN and error.value != errno.ERANGE):
        if (database, service) in _heard:
            raise OSError(error.value, f"the name service {service} does not answer")
        _silent[database, service] = time.monotonic()
    else:
        _heard.add((database, service))


def _entries(uid: int) -> Identity:
    try:
        entry = pwd.getpwuid(uid)
    except (KeyError, OverflowError):  # a log may say any number
        return Identity(uid)
    groups = []
    for gid in dict.fromkeys([entry.pw_gid, *os.getgrouplist(entry.pw_name, entry.pw_gid)]):
        with suppress(KeyError):
            groups.append(grp.getgrgid(gid).gr_name)
    return Identity(uid, entry.pw_name, tuple(groups))


def _uid_of(name: str) -> int | None:
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return None
