"""Events on the command line: printed as they come, across restarts of the agent."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import click

from mpsagent.cli import answer_text, client, options
from mpsagent.cli.ask import (
    FINE,
    UNHEALTHY,
    Json,
    asked,
    complain,
    iso,
    now,
    refused_and_exit,
    target,
    unreachable,
    width,
)  # fmt: skip
from mpsagent.linux.backoff import Backoff

PAGE, MOST_PAGES = 1000, 5
"""Records that are asked for at a time, and how often, to find those that people are told."""
END_DEADLINE = 120.0
"""Seconds for which the end of a client is waited for: the ladder takes less, unless the policy says otherwise."""


class Events:
    """Prints events: as JSON all of them, as text an action and its outcome in one line."""

    def __init__(self, as_json: bool) -> None:
        self.as_json, self._pairs = as_json, answer_text.Pairs()

    def show(self, event: Json) -> None:
        if self.as_json:
            click.echo(json.dumps(event))
        else:
            self.write(self._pairs.take(event))

    def settle(self) -> None:
        """No more comes for now: actions whose outcome is not known are shown as they are."""
        self.write(self._pairs.rest())

    def write(self, events: list[Json]) -> None:
        for one in events:
            click.echo("\n".join(answer_text.event(one, now(), width())))


def beginning(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int | None, float | None]:
    """After which cursor, or from which time on."""
    if value is None:
        return None, None
    if value.isascii() and value.isdecimal() and len(value) <= 18:
        return int(value), None
    return None, options.moment(ctx, param, value)


def events(
    path: str, cursor: int | None, since: float | None, only: Json, lines: int | None, shown: Events, *, followed: bool
) -> None:
    """Those there are, ``only`` those that are asked for, and where they are ``followed``, those that come."""
    some = since is not None or any(one is not None for one in only.values())
    limit = lines or (1000 if some or cursor is not None else 20)
    if not some and cursor is None and not shown.as_json:
        try:
            found, cursor = _latest(path, limit)
            shown.write(found)
            if followed:
                follow(path, cursor, 1000, shown)
        except KeyboardInterrupt:
            if not followed:
                raise
        return
    if followed and since is None:
        follow(path, cursor, limit, shown)
        return
    body, _ = asked(path, target("/v1/events", {**only, "since": iso(since), "cursor": cursor, "limit": limit}))
    for event in body["events"] if shown.as_json else in_order(body["events"]):
        shown.show(event)
    if followed:
        follow(path, body["cursor"], 1000, shown)
        return
    shown.settle()
    if not body["events"] and some and not shown.as_json:
        click.echo("nothing on record")


def in_order(found: list[Json]) -> list[Json]:
    """Return these events in the order of time: a later agent writes down what happened before it started."""
    return sorted(found, key=lambda one: str(one["at"]))


def _latest(path: str, limit: int) -> tuple[list[Json], int]:
    """The last ones that people are told, and the newest cursor. While a user waits there are two records every few
    seconds that are no news (seen: of 20 nothing was left to print), so older ones are read until there are enough."""
    body, _ = asked(path, f"/v1/events?limit={min(PAGE, 3 * limit)}")
    found = body["events"]
    for _ in range(MOST_PAGES):
        told = _told(found)
        if len(told) >= limit or not found:
            break
        last = found[0]["cursor"] - 1
        first = max(last - PAGE, asked(path, "/v1/status")[0]["history"]["oldest"])
        if first >= last:
            break
        older, _ = asked(path, f"/v1/events?cursor={first}&limit={last - first}")
        found = older["events"] + found
    return in_order(_told(found)[-limit:]), body["cursor"]


def _told(found: list[Json]) -> list[Json]:
    pairs = answer_text.Pairs()
    return [*(one for event in found for one in pairs.take(event)), *pairs.rest()]


def follow(path: str, cursor: int | None, limit: int, shown: Events) -> None:
    """Events as they come, for ever. A lost connection is taken up where it ended."""
    reached, again = False, Backoff(0.5, 5.0)
    while True:
        try:
            for line in client.lines(path, target("/v1/events", {"follow": 1, "limit": limit, "cursor": cursor})):
                reached = True
                again.reset()
                event = json.loads(line)
                if "cursor" not in event:
                    raise client.RequestRefused(410, event)
                cursor = event["cursor"]
                if "heartbeat" in event:
                    shown.settle()
                else:
                    shown.show(event)
        except KeyboardInterrupt:
            return
        except client.RequestRefused as refused:
            if refused.status == 429 and reached:
                pass  # for a moment this user has too many connections
            elif refused.status != 410 or "oldest" not in refused.error:
                refused_and_exit(refused)
            else:
                complain(refused.error)
                cursor = int(refused.error["oldest"])
        except client.Unreachable as gone:
            if not reached:
                unreachable(gone)
        limit = 1000
        try:
            time.sleep(again.pause())
        except KeyboardInterrupt:
            return


def until_ended(path: str, cursor: int, pids: list[int], seconds: float | None = None) -> int:
    """Say what is done to clients until they have ended, at most for ``seconds``; the exit status."""
    there, unkillable = set(pids), False

    def mine(event: Json) -> bool:
        return event.get("pid") in there

    def over(event: Json) -> int | None:
        nonlocal unkillable
        if event["kind"] in ("client.ended", "client.unkillable"):
            there.discard(event["pid"])
            unkillable |= event["kind"] == "client.unkillable"
        return None if there else UNHEALTHY if unkillable else FINE

    if not there:
        click.echo("no client: nothing is to be ended")
        return FINE
    seconds = END_DEADLINE if seconds is None else seconds
    which = f"client {', '.join(map(str, pids))}" if len(pids) < 4 else f"{len(pids)} clients"
    return _until(path, cursor, seconds, mine, over, f"{which}: not ended so far")


def until_restarted(path: str, before: Json, names: list[str], seconds: float) -> int:
    """Say what becomes of a restart of the control daemons of these instances, which may take so long, until each of
    them runs again; the exit status. ``before``: the status when it was ordered."""
    several = [one for one in before["instances"] if one["name"] in names]
    if len(before["instances"]) < 2:  # then no record names one
        several = []
    awaited = {one["name"] for one in several if one["mode"]["sharing"] != "per-user"} or {None}

    def mine(event: Json) -> bool:
        if several and event.get("instance") not in names:
            return False
        told = event["kind"].startswith(("control.", "drain."))
        return told or event.get("action") in ("QuitControl", "StartControl")

    def over(event: Json) -> int | None:
        if event["kind"] in ("action.failed", "control.failed"):
            return UNHEALTHY
        if event["kind"] != "action.done" or event["action"] != "StartControl":
            return None
        awaited.discard(event.get("instance"))
        return None if awaited - {None} else FINE

    newest = before["history"]["newest"]
    return _until(path, newest, seconds + END_DEADLINE, mine, over, "the control daemon does not run so far")


def _until(
    path: str,
    cursor: int,
    seconds: float,
    mine: Callable[[Json], bool],
    over: Callable[[Json], int | None],
    missing: str,
) -> int:
    """Show the events after ``cursor`` that are ``mine`` until one is the last; the exit status that ``over`` gives."""
    shown = Events(as_json=False)
    latest = time.monotonic() + seconds
    try:
        for line in client.lines(path, f"/v1/events?follow=1&limit=1000&cursor={cursor}", min(60.0, seconds)):
            event = json.loads(line)
            if "kind" in event and mine(event):
                shown.show(event)
                if (status := over(event)) is not None:
                    return status
            if time.monotonic() > latest:
                break
    except KeyboardInterrupt:
        pass
    except (client.Unreachable, client.RequestRefused) as gone:
        if time.monotonic() < latest:
            click.echo(f"mpsagent-cli: {gone}", err=True)
    click.echo(f"mpsagent-cli: {missing}; see mpsagent-cli events -f", err=True)
    return UNHEALTHY
