"""The seeds as a table and as pictures: `python benchmarks/seeds/table.py DIR …` puts a run's results into docs/.

DIR is what run.py was given as --out, or several of them. The part of docs/measured/seeds.md between its two marks is
written anew, and results and pictures go to a directory of that run beside it. Nothing in there is written by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from benchmarks.seeds.published import BY_NAME, OFF, ON, SEEDS, Seed, with_needed

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "measured" / "seeds.md"
BEGIN, END = "<!-- seeds: written by benchmarks/seeds/table.py -->", "<!-- end of seeds -->"
NOT_YET = "not yet run"
PER_WINDOW, PER_START, BEFORE = 1.1, 4.5, 25.0
"""Seconds, about: around each window, for each start, for PyTorch's import and the files."""
CLOCKS = 0.1
"""From here on it is said that two windows that are compared had different clocks."""

Found = dict[str, Any]


def takes(only: Sequence[str], seconds: float) -> float:
    """Seconds for all, about."""
    starts = [start for name in with_needed(only) for start in BY_NAME[name].starts]
    windows = sum(len(start.counts) * len(start.modes) for start in starts)
    return windows * (seconds + PER_WINDOW) + PER_START * sum(len(start.modes) for start in starts) + BEFORE


# --- figures in words -------------------------------------------------------------------------------------------------


def _find(results: Found | None, seed: Seed, program: str, mode: str, processes: int, percent: int = 0) -> Found | None:
    """The figure; None when it was not measured, whyever."""
    wanted = (seed.needs if program == "image" and seed.needs else seed.name, program, mode, processes, percent)
    for one in [] if results is None else results["figures"]:
        names = (one["seed"], one["program"], one["mode"], one["processes"], one.get("percent", 0))
        if names == wanted and "problem" not in one:
            return one
    return None


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _rate(results: Found | None, found: Found | None, seed: Seed) -> str:
    """As it was published: a rate, or the time for an amount of work at that rate."""
    if found is None:
        return NOT_YET if results is None else "-"
    if seed.amount is None or not found["rate"]:
        return f"{_number(found['rate'])}/s"
    return f"{_number(seed.amount[0] * found['processes'] / found['rate'])} s"


def _times(over: Found | None, under: Found | None) -> str:
    return f"{over['rate'] / under['rate']:.2f}" if over and under and under["rate"] else "-"


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _head(*cells: str) -> list[str]:
    return ["", _row(*cells), "|" + "---|" * len(cells)]


# --- all seeds, a row for each ----------------------------------------------------------------------------------------


def _overview(results: Found | None) -> Iterator[str]:
    yield from _head("seed", "published", "its GPU", "measured off", "measured on", "why they may differ")
    for seed in SEEDS:
        off, on = _cells(results, seed)
        yield _row(f"**{seed.title}**", seed.published, seed.gpu, off, on, seed.why)


def _cells(results: Found | None, seed: Seed) -> tuple[str, str]:
    """Off and on, at the largest number of processes."""
    if results is None:
        return NOT_YET, NOT_YET
    if seed.name == "threads":
        ends = [(percent, _find(results, seed, "thirty-two", ON, 1, percent)) for percent in (10, 50, 100)]
        return "-", "; ".join(f"{percent} %: {_rate(results, one, seed)}" for percent, one in ends)
    if seed.name == "inference":
        one, batch = _find(results, seed, "image", OFF, 1), _find(results, seed, "batch", OFF, 1)
        many = _find(results, seed, "image", ON, 16)
        return (
            f"one client {_rate(results, one, seed)}, with batches {_rate(results, batch, seed)}",
            f"16 clients {_rate(results, many, seed)}: {_times(many, one)} times one, "
            f"batching {_times(batch, many)} times that",
        )
    if seed.name == "layers":
        one, many = _find(results, seed, "layers", OFF, 1), _find(results, seed, "layers", ON, 8)
        return (
            f"one client {_rate(results, one, seed)}",
            f"8 clients {_rate(results, many, seed)}: {_times(many, one)} times one",
        )
    start = seed.starts[0]
    most = max([count for count in start.counts if count in seed.rows] or start.counts)
    off, on = (_find(results, seed, start.program, mode, most) for mode in (OFF, ON))
    if seed.name == "queue":
        return _waits(off), _waits(on)
    apart = f" (clock {_clock(off)} MHz off, {_clock(on)} on)" if _clocks_differ(off, on) else ""
    return (
        f"{most} processes {_rate(results, off, seed)}" if off else "-",
        f"{most} processes {_rate(results, on, seed)}: {_times(on, off)} times{apart}" if on else "-",
    )


def _clock(found: Found | None) -> str:
    return "-" if found is None or found["mhz"] is None else f"{found['mhz']:.0f}"


def _clocks_differ(one: Found | None, other: Found | None) -> bool:
    clocks = [found["mhz"] for found in (one, other) if found and found["mhz"]]
    return len(clocks) == 2 and max(clocks) > min(clocks) * (1 + CLOCKS)


def _waits(found: Found | None) -> str:
    if found is None:
        return "-"
    small, large = found["each"]
    return (
        f"small p50 {_ms(small['p50'])}, p99 {_ms(small['p99'])} ms; large {_number(large['rate'])} batches/s, "
        f"p50 {_ms(large['p50'])} ms"
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


# --- each seed, a row for each number of processes --------------------------------------------------------------------


def _detail(results: Found | None, seed: Seed) -> Iterator[str]:
    yield from ["", f"### {seed.title[0].upper()}{seed.title[1:]}"]
    own = {"threads": _threads, "queue": _queue, "inference": _clients}.get(seed.name)
    if own is not None:
        yield from own(results, seed)
        return
    words = (
        f"Times are for {seed.amount[1]}, at the rate of the window."
        if seed.amount
        else f"Rates are {seed.unit} a second."
    )
    yield from ["", words]
    names = (
        "processes, published off, on, times, measured off, on, times, times one process, p99 off ms, on, MHz off, on"
    )
    yield from _head(*names.split(", "))
    for start in seed.starts:
        one = _find(results, seed, start.program, ON, 1)
        for count in start.counts:
            off, on = (_find(results, seed, start.program, mode, count) for mode in (OFF, ON))
            told = [cell or "-" for cell in seed.rows.get(count, ("", "", ""))]
            p99 = [_ms(found and found["p99"]) for found in (off, on)]
            bold = "**" if _clocks_differ(off, on) else ""
            clocks = [f"{bold}{_clock(found)}{bold}" for found in (off, on)]
            cells = [_rate(results, found, seed) for found in (off, on)]
            yield _row(count, *told, *cells, _times(on, off), _times(on, one), *p99, *clocks)


def _clients(results: Found | None, seed: Seed) -> Iterator[str]:
    yield from _head("clients", "images/s", "times one client, off", "p99 ms", "MHz")
    one = _find(results, seed, "image", OFF, 1)
    for program, mode, count in (
        ("image", OFF, 1), ("image", ON, 1), ("image", OFF, 16), ("image", ON, 16), ("batch", OFF, 1),
    ):  # fmt: skip
        found = _find(results, seed, program, mode, count)
        words = f"{count}, {mode}{', batches of 128' if program == 'batch' else ''}"
        yield _row(words, _rate(results, found, seed), _times(found, one), _ms(found and found["p99"]), _clock(found))


def _queue(results: Found | None, seed: Seed) -> Iterator[str]:
    yield from _head("", "small: requests/s", "p50 ms", "p99 ms", "large: batches/s", "p50 ms", "p99 ms")
    for mode in (OFF, ON):
        for count in (1, 2):
            found = _find(results, seed, "queue", mode, count)
            cells = [""] * 6 if results else [NOT_YET] * 6
            for number, one in enumerate(found["each"] if found else []):
                cells[3 * number : 3 * number + 3] = _number(one["rate"]), _ms(one["p50"]), _ms(one["p99"])
            yield _row(f"{'both' if count == 2 else 'small alone'}, {mode}", *cells)


def _threads(results: Found | None, seed: Seed) -> Iterator[str]:
    names = "percent, multiprocessors, images/s, of 100 %, p99 ms, device memory MiB, utilisation %, MHz"
    yield from _head(*names.split(", "))
    whole = _find(results, seed, "thirty-two", ON, 1, 100)
    for start in sorted(seed.starts, key=lambda one: one.percent):
        found = _find(results, seed, "thirty-two", ON, 1, start.percent)
        if found is None:
            yield _row(start.percent, *([NOT_YET if results is None else "-"] * 7))
            continue
        use, memory = found["utilisation"], found["memory"]
        yield _row(
            start.percent, found["multiprocessors"][0], _number(found["rate"]), _times(found, whole), _ms(found["p99"]),
            "-" if memory is None else memory, "-" if use is None else f"{use:.0f}",
            _clock(found),
        )  # fmt: skip


def page(results: Found | None, picture: str = "seeds.svg") -> str:
    """What stands between the marks. ``results`` None: nothing was run yet."""
    lines = [_about(results), *_overview(results)]
    if results is not None:
        lines += ["", f"![Published and measured, by number of processes]({picture})"]
    for seed in SEEDS:
        lines += _detail(results, seed)
    missing = [] if results is None else [one for one in results["figures"] if "problem" in one]
    if missing:
        lines += ["", "### What has no figures", ""]
        lines += [
            f"- {one['seed']}, {one['program']}, {one['mode']}, {one['processes']} processes"
            f"{', {} %'.format(one['percent']) if 'percent' in one else ''}: {one['problem'][:300]}"
            for one in missing
        ]
    return "\n".join(lines) + "\n"


def _dates(results: Found) -> str:
    return str(results.get("dates", results["date"]))


def _about(results: Found | None) -> str:
    if results is None:
        return f"**{NOT_YET[0].upper()}{NOT_YET[1:]}** on a GPU: the measured columns are empty until then."
    about = results["about"]
    said = f"{results['gpu']}, driver {about.get('driver', 'unknown')}, {_dates(results)}, {results['cores']} cores"
    if loads := [one["load"] for one in results["figures"] if "load" in one]:
        said += f" with a load of {max(loads):.0f} at most"
    tools = [f"{name} {about[name]}" for name in ("torch", "torchvision") if name in about]
    tools += [f"JPEG: {about['decoder']}"] if "decoder" in about else []
    tools += [f"MNIST's images: {about['mnist']}"] if "mnist" in about else []
    said += (
        f"; {'; '.join(tools) or 'no PyTorch'}. Windows of {results['seconds']:g} s, {results['took']:.0f} s in all:"
    )
    lines = [said, "", f"    {results['command']}"]
    if results["simulated"]:
        lines = ["**Simulated: nothing was computed, and no figure here means anything.**", "", *lines]
    if "problem" in results:
        lines += ["", f"The run broke off: {results['problem'][:300]}"]
    return "\n".join(lines)


# --- pictures ---------------------------------------------------------------------------------------------------------


def draw(results: Found, place: Path) -> list[str]:
    """seeds.svg and seeds.png: for each seed throughput by number of processes. Says what is wrong."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return [f"no pictures: {error}"]
    figure = Figure(figsize=(12, 14))
    figure.subplots_adjust(left=0.07, right=0.98, bottom=0.06, top=0.93, wspace=0.28, hspace=0.38)
    title = f"Seeds of the field: {results['gpu']}, driver {results['about'].get('driver', '')}, {_dates(results)}"
    figure.suptitle("SIMULATED, nothing computed" if results["simulated"] else title, fontsize=11)
    drawn = [one for one in SEEDS if one.name not in ("inference", "queue", "threads")]
    fields = list(figure.subplots(4, 3).flat)
    for field, seed in zip(fields, drawn, strict=False):
        _by_processes(field, results, seed)
    for place_of, (of, name) in enumerate(((_inference, "inference"), (_latency, "queue"), (_percentages, "threads"))):
        of(fields[len(drawn) + place_of], results, BY_NAME[name])
    for field in fields[len(drawn) + 3 :]:
        field.set_visible(False)
    for form in ("svg", "png"):
        figure.savefig(place / f"seeds.{form}", dpi=120, metadata={"Date": None} if form == "svg" else {})
    return []


# Apart in print, and for eyes that do not tell red from green.
_LINES = {OFF: ("#000000", "s"), ON: ("#D55E00", "^")}


def _by_processes(field: Any, results: Found, seed: Seed) -> None:
    """Measured as speed-up over one process without MPS; published beside it where it can be put so."""
    start = seed.starts[0]
    one = _find(results, seed, start.program, OFF, 1)
    for mode, (colour, mark) in _LINES.items():
        found = [(count, _find(results, seed, start.program, mode, count)) for count in start.counts]
        points = [(count, each["rate"] / one["rate"]) for count, each in found if each and one and one["rate"]]
        if points:
            field.plot(*zip(*points, strict=True), color=colour, marker=mark, label=f"measured {mode}")
    for mode, colour, points in _published(seed):
        field.plot(*zip(*points, strict=True), color=colour, linestyle=":", marker="o", markersize=3,
                   label=f"published {mode}, {seed.gpu}")  # fmt: skip
    field.set(title=seed.title, xlabel="processes", ylabel="times one process, off", ylim=(0, None))
    field.set_xticks(start.counts)
    field.grid(alpha=0.3)
    if field.lines:
        field.legend(fontsize=7)


def _published(seed: Seed) -> Iterator[tuple[str, str, list[tuple[int, float]]]]:
    """Speed-up over one process without MPS; where only the ratio of on to off was published, none."""
    numbers = {count: [_value(cell) for cell in row[:2]] for count, row in seed.rows.items()}
    base = numbers.get(1, [None])[0]
    if base is None:
        return
    for place, mode in enumerate((OFF, ON)):
        points = [(n, row[place]) for n, row in sorted(numbers.items()) if row[place] is not None]
        # a time is for all trainings together: n of them in t is n * one's time / t
        yield mode, _LINES[mode][0], [(n, n * base / v if seed.amount else v / base) for n, v in points]  # type: ignore[operator]


def _value(cell: str) -> float | None:
    found = re.search(r"[\d.,]+", cell)
    return float(found.group().replace(",", "")) if found else None


def _inference(field: Any, results: Found, seed: Seed) -> None:
    wanted = (("one\nclient", "image", OFF, 1), ("16\noff", "image", OFF, 16), ("16\non", "image", ON, 16),
              ("one, with\nbatches", "batch", OFF, 1))  # fmt: skip
    bars = [(words, _find(results, seed, *names)) for words, *names in wanted]
    field.bar([name for name, _ in bars], [one["rate"] if one else 0 for _, one in bars], color="#0072B2")
    field.set(title="inference with and without batching", ylabel="images/s")
    field.grid(alpha=0.3, axis="y")


def _latency(field: Any, results: Found, seed: Seed) -> None:
    names, values = [], []
    for mode in (OFF, ON):
        for count, words in ((1, "alone"), (2, "beside")):
            found = _find(results, seed, "queue", mode, count)
            names.append(f"{words}\n{mode}")
            values.append((found["each"][0]["p99"] or 0) if found else 0)
    field.bar(names, values, color="#0072B2")
    field.set(title="queue: the small model's p99", ylabel="ms, waiting included")
    field.grid(alpha=0.3, axis="y")


def _percentages(field: Any, results: Found, seed: Seed) -> None:
    percents = sorted(start.percent for start in seed.starts)
    found = [(percent, _find(results, seed, "thirty-two", ON, 1, percent)) for percent in percents]
    points = [(percent, one["rate"], one["memory"]) for percent, one in found if one]
    if points:
        field.plot([one[0] for one in points], [one[1] for one in points], color="#D55E00", marker="^")
    field.set(title="active threads", xlabel="percent", ylabel="images/s", ylim=(0, None))
    field.grid(alpha=0.3)


# --- into docs/ -------------------------------------------------------------------------------------------------------


def together(runs: Sequence[Found]) -> Found:
    """Parts that ran on GPUs of the same kind, as one."""
    if len({one["gpu"] for one in runs}) > 1:
        raise SystemExit(f"these ran on different GPUs: {', '.join(sorted({one['gpu'] for one in runs}))}")
    problems = [one["problem"] for one in runs if "problem" in one]
    return {
        **runs[0],
        "command": "\n    ".join(one["command"] for one in runs),
        "took": sum(max(one["took"] for one in runs if one["date"] == date) for date in {one["date"] for one in runs}),
        "dates": " and ".join(sorted({one.get("dates", one["date"]) for one in runs})),
        "cores": " and ".join(sorted({str(one["cores"]) for one in runs})),
        "about": {key: value for one in runs for key, value in one["about"].items()},
        "figures": [figure for one in runs for figure in one["figures"]],
        **({"problem": "; ".join(problems)} if problems else {}),
    }


def put(results: Found, target: Path) -> Path:
    """The directory of this run. ``target``: the page."""
    words = re.sub(r"[^\w.]+", "-", results["gpu"].removeprefix("NVIDIA ").split(" ")[0])
    name = f"{results['date']}-{words}-{results['about'].get('driver', 'unknown')}"
    place = target.parent / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "seeds.json").write_text(json.dumps(results, indent=1) + "\n")
    for problem in draw(results, place):
        print(problem, file=sys.stderr)
    replace(target, page(results, f"{name}/seeds.svg"))
    return place


def replace(target: Path, text: str) -> None:
    before, _, rest = target.read_text().partition(BEGIN)
    target.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{rest.partition(END)[2]}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Put a run of the seeds into docs/measured.")
    parser.add_argument(
        "dirs", type=Path, nargs="*", help="what run.py had as --out; without: the page says not yet run"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="another page with the two marks")
    arguments = parser.parse_args()
    if not arguments.dirs:
        replace(arguments.page, page(None))
        return 0
    results = together([json.loads((place / "results.json").read_text()) for place in arguments.dirs])
    if results["simulated"] and arguments.page == PAGE:
        print("these results are simulated: they do not go into docs/", file=sys.stderr)
        return 1
    print(f"{arguments.page}, {put(results, arguments.page)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
