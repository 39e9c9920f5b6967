"""What the scenarios are written with: their register, and the steps that many of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.conformance.rig import USERS, Rig

A, B, C, D = USERS


@dataclass(frozen=True)
class Scenario:
    name: str
    title: str
    play: Callable[[Rig], None]
    gpus: int
    before: bool  # starts with a part that is not in the recording


ALL: dict[str, Scenario] = {}


def scenario(
    name: str, title: str, *, gpus: int = 1, before: bool = False
) -> Callable[[Callable[[Rig], None]], Callable[[Rig], None]]:
    def register(play: Callable[[Rig], None]) -> Callable[[Rig], None]:
        ALL[name] = Scenario(name, title, play, gpus, before)
        return play

    return register


def play(chosen: Scenario, rig: Rig) -> None:
    rig.section(f"{chosen.name} before" if chosen.before else f"{chosen.name} {chosen.title}")
    chosen.play(rig)
    rig.drain()


def now_the_recorded_part(rig: Rig, name: str) -> None:
    rig.section(f"{name} {ALL[name].title}")


def query(rig: Rig, uid: int, **kwargs: dict[str, str]) -> str:
    """A client that looks and leaves."""
    client = rig.spawn(uid, "query", **kwargs)
    rig.wait(client)
    return client


def sleeper(rig: Rig, uid: int, seconds: float, **kwargs: dict[str, str]) -> str:
    """A client at work: it has its context when this returns."""
    client = rig.spawn(uid, "sleep", seconds, **kwargs)
    rig.working(client)
    return client


def spinner(rig: Rig, uid: int, seconds: float) -> str:
    """A client with a kernel in flight."""
    client = rig.spawn(uid, "spin", seconds)
    rig.wait_output(client, "launch")
    rig.pause(0.2)
    return client


def set_defaults(rig: Rig, threads: int | str, memory: str) -> None:
    rig.ctl(
        f"set_default_active_thread_percentage {threads}\nset_default_device_pinned_mem_limit 0 {memory}",
    )


def idle_server(rig: Rig, uid: int) -> int:
    """The server of `uid`, left behind by a client that has gone."""
    query(rig, uid)
    return rig.server()


def shut_down_until_gone(rig: Rig, server: int) -> None:
    """The first shutdown_server can come before the server has noticed that its client is gone, so it is repeated."""
    for _ in range(100):
        rig.ctl(f"shutdown_server {server}", quiet=True)
        if str(server) not in rig.ctl("get_server_list", quiet=True).out.split():
            return
        rig.pause(0.05)


def stop_all(rig: Rig) -> None:
    """The end of a scenario, with what the logs have by then."""
    rig.drain()
    rig.ctl("quit -t 1")
    rig.pause(0.1)
    rig.drain()
