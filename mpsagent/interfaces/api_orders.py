"""What the API is asked to do: who may is asked first, the body checked, and the rest is one call of the backend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from aiohttp import web

from mpsagent.interfaces.backend import Backend, Json, Problem, no_client
from mpsagent.interfaces.http import json_answer
from mpsagent.interfaces.lease_body import KEYS
from mpsagent.interfaces.peers import Bounds
from mpsagent.interfaces.rights import Rights
from mpsagent.mps.units import parse_duration

_Keys = Mapping[str, type | tuple[type, ...]]
_TIMEOUT: _Keys = {"timeout": (str, int, float, type(None))}
_INSTANCE: _Keys = {"instance": (str, type(None))}


class Orders:
    def __init__(self, backend: Backend, rights: Rights, bounds: Bounds) -> None:
        self._backend, self._rights, self._bounds = backend, rights, bounds

    async def terminate(self, request: web.Request) -> web.Response:
        pid = _pid(request)
        body = await self._body(request, {"now": bool, "dry_run": bool})
        owner = self._backend.owner(pid)
        if owner is None:
            raise no_client(pid, held=self._backend.waits(pid))
        peer = await self._rights.acting(request, f"end client {pid}", owner)
        now, dry_run = bool(body.get("now")), bool(body.get("dry_run"))
        return json_answer(await self._backend.terminate(pid, now=now, dry_run=dry_run, by=peer.uid))

    async def shutdown_server(self, request: web.Request) -> web.Response:
        pid = _pid(request)
        peer = await self._rights.acting(request, f"end server {pid}")
        body = await self._body(request, {**_TIMEOUT, "force": bool, "dry_run": bool})
        timeout, force, dry_run = _seconds(body), bool(body.get("force")), bool(body.get("dry_run"))
        if force and timeout is not None:
            raise Problem(400, "by force nobody is waited for", "timeout", "leave out timeout, or force")
        found = await self._backend.shutdown_server(pid, timeout, force=force, dry_run=dry_run, by=peer.uid)
        return json_answer(found)

    async def drain(self, request: web.Request) -> web.Response:
        peer = await self._rights.acting(request, "drain")
        timeout, instance = await self._order(request)
        return json_answer(await self._backend.drain(timeout, peer.uid, instance))

    async def resume(self, request: web.Request) -> web.Response:
        peer = await self._rights.acting(request, "resume")
        _, instance = await self._order(request, timed=False)
        return json_answer(await self._backend.resume(peer.uid, instance))

    async def restart(self, request: web.Request) -> web.Response:
        peer = await self._rights.acting(request, "restart MPS")
        body = await self._body(request, {**_TIMEOUT, **_INSTANCE, "dry_run": bool})
        timeout, dry_run = _seconds(body), bool(body.get("dry_run"))
        return json_answer(await self._backend.restart(timeout, peer.uid, body.get("instance"), dry_run=dry_run))

    async def reload(self, request: web.Request) -> web.Response:
        peer = await self._rights.acting(request, "reload the policy")
        await self._body(request, {})
        return json_answer(await self._backend.reload(peer.uid))

    async def give_lease(self, request: web.Request) -> web.Response:
        peer = await self._rights.acting(request, "give a lease")
        return json_answer(await self._backend.give_lease(await self._body(request, KEYS), peer.uid), 201)

    async def end_lease(self, request: web.Request) -> web.Response:
        peer, text = await self._rights.acting(request, "end a lease"), request.match_info["id"]
        known = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else -1
        return json_answer(await self._backend.end_lease(known, peer.uid))

    # --- bodies

    async def _order(self, request: web.Request, *, timed: bool = True) -> tuple[float | None, str | None]:
        """Seconds and the name of an instance, from a body with at most ``timeout`` and ``instance`` in it."""
        body = await self._body(request, {**(_TIMEOUT if timed else {}), **_INSTANCE})
        return _seconds(body), body.get("instance")

    async def _body(self, request: web.Request, allowed: _Keys) -> Json:
        """The JSON object in the body, each key checked; an empty body is an empty object."""
        async with asyncio.timeout(self._bounds.body_time):
            raw = await request.read()
        if not raw.strip():
            return {}
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise Problem(400, f"the body is not JSON: {error}", "body", 'send an object, like {"now": true}') from None
        if not isinstance(body, dict):
            raise Problem(400, "the body is not a JSON object", "body", 'send an object, like {"now": true}')
        for key, value in body.items():
            if key not in allowed:
                raise Problem(400, f"unknown key {key[:50]!r}", "body", f"known: {', '.join(allowed) or 'none'}")
            if not isinstance(value, allowed[key]) or (isinstance(value, bool) and bool not in _types(allowed[key])):
                names = " or ".join(kind.__name__ for kind in _types(allowed[key]))
                raise Problem(400, f"{key!r} is not of type {names}", "body")
        return body


def _pid(request: web.Request) -> int:
    text = request.match_info["pid"]
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise Problem(400, "not a process id", "pid", "a number, as `mpsagent-cli clients` and `servers` show it")
    return int(text)


def _seconds(body: Json) -> float | None:
    """Its ``timeout``."""
    timeout = body.get("timeout")
    try:
        seconds = parse_duration(timeout) if isinstance(timeout, str) else timeout
        if seconds is not None and not 0 <= seconds <= 366 * 86400:
            raise ValueError("it is negative, or longer than a year")
    except ValueError as error:
        raise Problem(400, f"timeout: {error}", "timeout", "as JSON also a number of seconds") from None
    return None if seconds is None else float(seconds)


def _types(kind: type | tuple[type, ...]) -> tuple[type, ...]:
    return kind if isinstance(kind, tuple) else (kind,)
