"""`mpsagent-cli bench`: what sharing the GPU is worth on this node."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from mpsagent.cli import ask, client, options

_file = click.Path(dir_okay=False, path_type=Path)


def _names(_: click.Context, option: click.Parameter, text: str | None) -> list[str] | None:
    return None if text is None else [one.strip() for one in text.split(",") if one.strip()]


def _counts(_: click.Context, option: click.Parameter, text: str) -> list[int]:
    try:
        counts = [int(one) for one in text.split(",")]
    except ValueError:
        raise click.BadParameter("numbers with commas between them, as 1,2,4") from None
    if not all(1 <= one <= 48 for one in counts):
        raise click.BadParameter("1 to 48 processes: MPS has room for no more")
    return counts


@click.command()
@click.option("--modes", callback=_names, metavar="LIST", help="Measure some of: off, turns, one-server, per-user, "
              "node.  [default: all except node as root, else off,node]")  # fmt: skip
@click.option(
    "--workloads", callback=_names, metavar="LIST", help="Run these workloads. --list shows them.  [default: all]"
)
@click.option("--processes", callback=_counts, default="1,2,4,8,16", show_default=True, metavar="LIST",
              help="Run each workload with each of these numbers of processes.")  # fmt: skip
@click.option(
    "--users", type=options.Whole(1, 48), default=2, show_default=True, help="Start the processes as this many users."
)
@click.option(
    "--seconds",
    type=options.Number(0.2, 3600),
    default=5.0,
    show_default=True,
    help="Measure for this long in each run.",
)
@click.option("--gpu", type=options.Whole(min=0), metavar="N", help="Use the GPU with this index.  [default: 0]")
@click.option("--provision", metavar="MIX", help="Compare rules for cutting the GPU for these workloads at once, each "
              "with its weight: launches=2,train=1; train*3=1 for three of one")  # fmt: skip
@click.option(
    "--python", metavar="FILE", help="Use this Python, which has PyTorch.  [default: the first python3 on PATH]"
)
@click.option("--svg", type=_file, metavar="FILE", help="Write the figures as an SVG picture.")
@click.option("--png", type=_file, metavar="FILE", help="Write the figures as a PNG picture.")
@click.option("--html", type=_file, metavar="FILE", help="Write the figures as one HTML page.")
@options.json
@click.option("--list", "only_list", is_flag=True, help="List the workloads. Do not measure.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--anyway", is_flag=True, help="Measure while other programs use the GPU, which slows them down.")
@click.option("--simulated", type=click.Path(exists=True, file_okay=False, path_type=Path), hidden=True)
@click.pass_obj
def bench(
    path: str,
    /,
    modes: list[str] | None,
    workloads: list[str] | None,
    processes: list[int],
    users: int,
    seconds: float,
    gpu: int | None,
    provision: str | None,
    python: str | None,
    as_json: bool,
    only_list: bool,
    yes: bool,
    anyway: bool,
    simulated: Path | None,
    **pictures: Path | None,
) -> None:
    """Measure the throughput of each way of sharing on this node.

    Small programs of common kinds run at the same time, without MPS and with each way of sharing, on a separate MPS in
    its own namespaces. The node's MPS and policy do not change. Ctrl-C stops it and shows the results so far.

    Exit status: 0 measured, 1 interrupted or the GPU is in use, 2 wrong usage or no GPU.
    """
    from mpsagent_bench import plan, results
    from mpsagent_bench import provision as provisioning
    from mpsagent_bench.inside import FIRST_USER
    from mpsagent_bench.torch_workloads import TORCH

    words, units = _workloads()
    if only_list:
        listed = "\n".join(f"{name:14}{text}" for name, text in words.items())
        click.echo(json.dumps({"workloads": words}) if as_json else listed)
        return
    root = os.getuid() == 0
    modes = modes or ([plan.OFF, *plan.SHARING] if root else [plan.OFF, plan.NODE])
    _known(modes, plan.MODES, "--modes")
    _known(workloads or [], words, "--workloads")
    if not root and (provision or set(modes) & set(plan.SHARING)):
        raise click.UsageError("an MPS of its own needs root; without: --modes off,node")
    multiprocessors, uuid = _gpu(gpu or 0, simulated)
    chosen = uuid if gpu is not None or plan.NODE not in modes else None  # the node's MPS may serve another
    programs, weights = ([], []) if provision is None else _mix(provision, words)
    asked = programs or workloads or []
    torch = "" if simulated else _torch(python, asked, modes)
    usual = [name for name in words if torch or name not in TORCH]
    rules = provisioning.rules(weights, multiprocessors) if programs else []
    if programs:
        whose = [str(FIRST_USER + number) for number in range(len(programs))]
        runs = provisioning.plan(programs, rules, whose, seconds)
    else:
        runs = plan.plan(modes, asked or usual, processes, users, seconds)
    if not simulated and not anyway:
        _nobody_works(path)
    _announce(len(runs), plan.takes(runs), yes, simulated is not None)
    figures, broken_off = _measured(runs, chosen, simulated, torch)
    rows, found = results.rows(figures), provisioning.verdicts(programs, rules, figures)
    if as_json:
        body: dict[str, Any] = {"gpu": _about(simulated), "runs": results.as_json(rows)}
        if programs:
            body["rules"] = provisioning.as_json(found)
        click.echo(json.dumps(body, indent=1))
    else:
        click.echo("\n".join(provisioning.table(programs, found) if programs else results.table(rows, units)))
    _draw(rows, units, _about(simulated), pictures)
    if broken_off:
        click.echo(f"mpsagent-cli: {broken_off}", err=True)
    if broken_off or any(one.problem for one in figures):
        sys.exit(ask.UNHEALTHY)


def _workloads() -> tuple[dict[str, str], dict[str, str]]:
    """Return the description of each workload and the unit of its steps."""
    from mpsagent_bench.torch_workloads import TORCH
    from mpsagent_bench.workloads import WORKLOADS

    words = {name: one.words for name, one in WORKLOADS.items()} | {name: text for name, (_, text) in TORCH.items()}
    units = {name: one.unit for name, one in WORKLOADS.items()} | {name: unit for name, (unit, _) in TORCH.items()}
    return words, units


def _torch(python: str | None, asked: Sequence[str], modes: Sequence[str]) -> str:
    """A Python with PyTorch; empty when there is none and none is needed."""
    from mpsagent_bench.inside import user
    from mpsagent_bench.programs import python_with_torch
    from mpsagent_bench.torch_workloads import TORCH

    if asked and not set(asked) & TORCH.keys():
        return ""
    found, problem = python_with_torch(python, next((uid for mode in modes if (uid := user(mode)) is not None), None))
    if problem and (python or asked):
        needs = f"{', '.join(name for name in asked if name in TORCH)}: " if asked else ""
        raise click.UsageError(f"{needs}{problem}; --python names one that does")
    without = f"without {', '.join(TORCH)}: {problem} (--python names one that does)"
    click.echo(click.wrap_text(without, 79) if problem else f"PyTorch: {found}", err=True)
    return "" if problem else found


def _known(asked: Sequence[str], known: Any, option: str) -> None:
    for one in asked:
        if one not in known:
            raise click.UsageError(f"{option}: there is no {one!r}; there are {', '.join(known)}")


def _gpu(number: int, simulated: Path | None) -> tuple[int, str | None]:
    """Return the GPU's multiprocessors and its UUID, which a control daemon needs. Exit if there is no GPU."""
    import asyncio

    from mpsagent.system import devices
    from mpsagent_bench import driver

    if simulated:
        one = devices.from_file(str(simulated / "devices.json"))[0]
        return one.multiprocessors, one.uuid
    try:
        driver.version()
        found = asyncio.run(devices.probe(os.environ))
    except driver.CudaError as error:
        found = str(error)
    if isinstance(found, str):
        click.echo(f"mpsagent-cli: there is no GPU that could be measured: {found}", err=True)
        sys.exit(ask.USAGE)
    if number >= len(found):
        raise click.UsageError(f"--gpu: this node has the GPUs 0 to {len(found) - 1}")
    return found[number].multiprocessors, found[number].uuid or None


def _about(simulated: Path | None) -> str:
    return "simulated: nothing is computed" if simulated else "real"


def _nobody_works(path: str) -> None:
    """Ends here when a process computes on a GPU, or waits for it, that is not ours."""
    import asyncio

    from mpsagent.cli.checkup import is_mps
    from mpsagent.system.nvml import Nvml

    async def ask_nvml() -> int:
        nvml = Nvml(lambda: os.environ, time.time)
        try:
            found = await nvml.processes()
        finally:
            nvml.close()
        return 0 if isinstance(found, str) else len({one.pid for one in found if not is_mps(one.pid)})

    count = asyncio.run(ask_nvml())
    with suppress(client.Unreachable, client.RequestRefused):
        count = max(count, len(client.ask(path, "/v1/clients", 5.0)[0]["clients"]))
    if count:
        who = "1 process works" if count == 1 else f"{count} processes work"
        click.echo(f"mpsagent-cli: {who} on this node's GPUs, or wait for them (mpsagent-cli clients); --anyway "
                   "measures beside them, and slows them down", err=True)  # fmt: skip
        sys.exit(ask.UNHEALTHY)


def _announce(count: int, seconds: float, yes: bool, simulated: bool) -> None:
    what = (
        f"{count} runs, about {max(1, round(seconds / 60))} min"
        if seconds > 90
        else f"{count} runs, about {seconds:.0f} s"
    )
    click.echo(what + (", simulated: nothing is computed, the figures say nothing" if simulated else ""), err=True)
    if not yes and sys.stdin.isatty() and not click.confirm("Begin?", default=True, err=True):
        sys.exit(ask.UNHEALTHY)


def _measured(runs: Sequence[Any], gpu: str | None, simulated: Path | None, torch: str) -> tuple[list[Any], str]:
    """The figures, and why there are not all of them."""
    from mpsagent_bench import outside, results

    figures: list[Any] = []
    began = time.monotonic()
    on_screen = sys.stderr.isatty()
    try:
        with outside.going(runs, gpu, simulated, torch) as said:
            for one in said:
                if isinstance(one, results.Figure):
                    figures.append(one)
                    continue
                line = f"{len(figures) + 1}/{len(runs)}  {one.mode}, {one.workload}, {one.processes} at once"
                click.echo(f"\r\033[K{line[:76]}" if on_screen else line, nl=not on_screen, err=True)
    except KeyboardInterrupt:
        return figures, f"stopped after {time.monotonic() - began:.0f} s, {len(figures)} of {len(runs)} runs"
    except (outside.BenchError, OSError) as error:
        return figures, f"{len(figures)} of {len(runs)} runs, then: {error}"
    finally:
        if on_screen:
            click.echo("\r\033[K", nl=False, err=True)
    return figures, ""


def _mix(text: str, words: dict[str, str]) -> tuple[list[str], list[float]]:
    """The programs of ``--provision``, and the weight of each."""
    programs: list[str] = []
    weights: list[float] = []
    for part in map(str.strip, text.split(",")):
        name = re.split(r"[*=]", part)[0]
        _known([name], words, "--provision")
        found = re.fullmatch(r"(?:\*([1-9]\d?))?(?:=(\d{1,6}(?:\.\d{1,6})?))?", part[len(name) :])
        weight = float(found[2] or 1) if found else 0.0
        if found is None or not weight:
            raise click.UsageError(f"--provision: {part!r}: NAME*N is so many of it, 1 to 48; =WEIGHT a number above 0")
        times = int(found[1] or 1)
        programs += [name] * times
        weights += [weight] * times
    if not 2 <= len(programs) <= 48:
        raise click.UsageError("--provision: 2 to 48 workloads with commas between them")
    return programs, weights


def _draw(rows: Sequence[Any], units: dict[str, str], about: str, files: dict[str, Path | None]) -> None:
    """``files``: by form."""
    from mpsagent_bench import picture

    title = f"{os.uname().nodename}, {time.strftime('%Y-%m-%d')}" + (f" ({about})" if about != "real" else "")
    units = {row.figure.workload: units.get(row.figure.workload, "steps") for row in rows}
    try:
        for form, file in files.items():
            if file is not None:
                file.write_bytes(
                    picture.page(rows, units, title) if form == "html" else picture.drawn(rows, units, title, form)
                )
    except ImportError:
        click.echo("mpsagent-cli: pictures need matplotlib: apt install python3-matplotlib", err=True)
        sys.exit(ask.USAGE)
    except OSError as error:
        click.echo(f"mpsagent-cli: {error.filename}: {error.strerror}", err=True)
        sys.exit(ask.USAGE)
