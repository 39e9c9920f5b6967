#!/usr/bin/env python3
"""The scene of disorder: `python -m tests.disorder.run --seconds 60 --clients 1000 --server own|shared --seed 1 --sim`.

    --sim | --real        the simulator, or the real MPS of this machine (root, an NVIDIA GPU)
    --sharing together    all users at once, on one server
    --sharing apart       all users at once, each on a control daemon of their own
    --action pause        turns end in a pause, and nobody is left frozen (with --server shared)
    --instances each      with --gpus N: an instance for each GPU, users placed by load
    --bare                without the product: MPS as it is, to see that this test can fail
    --busy N              N processes that keep the cores busy beside it
    --kills N --kill W    N SIGKILLs beside it of what W names: agent,gate,daemon,server
    --out DIR             verdict.json, records.json, the policy and the logs go there

Exit status 0: every client got exactly what the policy says; 1: not; 2: the run could not begin.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.conformance import rig as rigs
from tests.disorder import place as places
from tests.disorder.clients import Field
from tests.disorder.population import populate
from tests.disorder.verdict import SLACK, Verdict, judge
from tests.scenes.stage import Agent, Stage, look_at
from tests.scenes.stage import Machine as StageMachine

DRAIN = 180.0
"""Seconds after the last start in which everybody must have been served."""


@dataclass(frozen=True)
class Options:
    """What one run is."""

    kind: str = "sim"
    server: str = "own"
    sharing: str = "turns"
    action: str = "terminate"
    instances: str = "one"
    seed: int = 1
    seconds: float = 60.0
    clients: int = 1000
    gpus: int = 1
    busy: int = 0
    bare: bool = False
    kills: int = 0
    kill: str = "agent,gate,daemon,server"
    drain: float = DRAIN
    slack: float = SLACK
    out: Path | None = None
    echo: Callable[[str], None] | None = None


def run(options: Options) -> Verdict:
    """One run from beginning to end; nothing is left of it. Raises PlaceError, RigError, StageError."""
    base = Path(tempfile.mkdtemp(prefix="mpsd", dir="/tmp"))
    base.chmod(0o755)
    try:
        return _run(options, base)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _run(options: Options, base: Path) -> Verdict:
    say = options.echo or (lambda _: None)
    programs = base / "programs"
    programs.mkdir(mode=0o755)
    real = options.kind == "real"
    backend = rigs.real_backend(programs) if real else rigs.sim_backend(programs, options.gpus)
    machine = places.machine_of(options.kind, options.gpus)
    looked = look_at(backend, base / "look")[0] if real else StageMachine(machine.multiprocessors, machine.mebibytes)
    machine = replace(machine, multiprocessors=looked.multiprocessors)
    each = options.instances == "each"
    if each:  # its own GPU is all that a client sees
        machine = replace(machine, gpus=1)
    population = populate(
        options.seed, machine, clients=options.clients, seconds=options.seconds, server=options.server,
        sharing=options.sharing,
        action=options.action, guests=not options.bare,  # one that says nothing would hold up a bare MPS for good
    )  # fmt: skip
    if real:
        with Stage(backend, base / "m", looked) as stage:
            entitled = places.entitled_by_measuring(stage, population, machine)
    else:
        entitled = places.entitled_on_the_simulator(population, machine)
    say(f"entitled: {entitled}")
    driver = places.Driver()
    with Stage(backend, base / "s", looked) as stage, places.busy(options.busy), driver if real else nullcontext():
        extra = []
        if options.bare:
            extra = places.start_bare(stage, population, options.server)
        else:
            places.start_product(stage, population, backend.control, each=each)
        field = Field(
            backend.client,
            places.guest_command(base, population.users[0].uid),
            places.environment_of(stage),
            [str(stage.rig.pipe / "control"), backend.control],
        )
        killer = places.Killer(stage, field.now, field.at)
        for at, what in places.kills(options.seed, options.kills, options.kill, options.seconds):
            extra.append((at, lambda what=what: killer.kill(what)))  # type: ignore[misc]
        progress = [(float(n), lambda: say(_progress(field))) for n in range(5, int(options.seconds), 5)]
        try:
            field.play(population.deeds, [*extra, *progress])
            say(f"all started: {_progress(field)}")
            left = field.wait(options.drain)
            say(f"{len(left)} left after {field.now():.1f} s")
            frozen = places.frozen(stage, [one.pid for one in left])
            began = time.time() - field.now()
            logged, active = places.logged_faults(stage, began), places.logged_active(stage, began)
            verdict = judge(
                field.records, population, machine, entitled,
                turns=not options.bare and options.sharing == "turns", kills=killer.done, logged=logged, each=each,
                slack=options.slack,
                apart=options.sharing == "apart",
                pause=options.action == "pause", frozen=frozen, active=active, stalls=driver.stalls(began),
            )  # fmt: skip
        finally:
            if options.out is not None:
                _write(options.out, stage, field, population.policy, [*killer.agents, *stage.agents])
                (options.out / "driver.txt").write_text(driver.text())
            field.end()
        if options.out is not None:
            (options.out / "verdict.json").write_text(json.dumps(verdict.json(), indent=1))
    return verdict


def _progress(field: Field) -> str:
    served = sum(record.said("] sms ") for record in field.records)
    return f"{field.now():6.1f} s: {len(field.records)} started, {served} served, {len(field.living)} live"


def _write(out: Path, stage: Stage, field: Field, policy: str, agents: list[Agent]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "policy.toml").write_text(policy)
    (out / "agent.log").write_text("".join(agent.log() for agent in agents))
    with (out / "records.json").open("w") as file:
        for record in field.records:
            file.write(json.dumps(record.json()) + "\n")
    for place, _, names in os.walk(stage.place):  # glob raises where an instance is taken away meanwhile
        for path in (Path(place, name) for name in names if name.endswith(".log")):
            with suppress(FileNotFoundError):
                shutil.copyfile(path, out / "-".join(path.relative_to(stage.place).parts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--server", choices=("own", "shared"), default="own")
    parser.add_argument("--sharing", choices=("turns", "together", "apart"), default="turns")
    parser.add_argument("--action", choices=("terminate", "pause"), default="terminate")
    parser.add_argument("--instances", choices=("one", "each"), default="one")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100000)
    parser.add_argument("--gpus", type=int, default=1, help="of the simulated machine")
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--drain", type=float, default=DRAIN)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--kills", type=int, default=0, help="so many times something is killed")
    parser.add_argument("--kill", default="agent,gate,daemon,server", help="what may be killed")
    parser.add_argument("--out", type=Path, default=Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--sim", dest="kind", action="store_const", const="sim", default="sim")
    kind.add_argument("--real", dest="kind", action="store_const", const="real")
    given = vars(parser.parse_args())
    options = Options(**given, echo=lambda text: print(text, flush=True))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(
        f"seed {options.seed}, {options.sharing}, server {options.server}, {options.clients} clients "
        f"in {options.seconds:g} s",
        flush=True,
    )
    try:
        verdict = run(options)
    except (places.PlaceError, rigs.RigError) as error:
        print(f"the run could not begin: {error}", file=sys.stderr)
        return 2
    print(verdict.text())
    print("GOOD" if verdict.good else "NOT GOOD")
    return 0 if verdict.good else 1


if __name__ == "__main__":
    sys.exit(main())
