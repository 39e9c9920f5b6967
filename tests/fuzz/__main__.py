"""python -m tests.fuzz TARGET [--seconds 60] [--corpus DIRECTORY]: made-up words for what reads the words of others.

With Atheris, which looks for new ways through the code; elsewhere with Hypothesis, which does not. Ends with status 0
when nothing was found, else with the words that it was found with, to be kept in tests/fuzz/found.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

try:
    import atheris
except ImportError:
    atheris = None

LONGEST = 4096
MEMORY, EACH = 1024, 20
"""MiB for all of it, and seconds for one input, on a busy machine."""


def main() -> int:
    asked = argparse.ArgumentParser()
    asked.add_argument("target")
    asked.add_argument("--seconds", type=int, default=60)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--corpus", type=Path)
    asked.add_argument("--found", type=Path, default=Path.cwd())
    asked.add_argument("--without-coverage", action="store_true")
    wanted = asked.parse_args()
    if atheris is None or wanted.without_coverage:
        return _made_up(wanted)
    with tempfile.TemporaryDirectory() as directory:
        return _with_coverage(wanted, Path(directory))


def _with_coverage(wanted: argparse.Namespace, directory: Path) -> int:
    with atheris.instrument_imports(include=["mpsagent", "tomli"]):
        from tests.fuzz.targets import TARGETS
    from tests.fuzz.mutations import mutated

    target = TARGETS[wanted.target]
    seeds, words = directory / "seeds", directory / "words"
    seeds.mkdir()
    for number, seed in enumerate(target.seeds()):
        (seeds / f"{number:04}").write_bytes(seed[:LONGEST])
    words.write_text("".join('"%s"\n' % "".join(f"\\x{byte:02x}" for byte in word) for word in target.words))
    corpus = wanted.corpus or directory / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)

    def other(data: bytes, most: int, seed: int) -> bytes:
        made = mutated(data, seed) if seed % 4 else None
        return made if made is not None and len(made) <= most else atheris.Mutate(data, min(len(data) + 16, most))

    options = [
        sys.argv[0], f"-max_total_time={wanted.seconds}", f"-max_len={LONGEST}", f"-rss_limit_mb={MEMORY}",
        f"-timeout={EACH}", f"-artifact_prefix={wanted.found}/{wanted.target}-", "-print_final_stats=1", "-verbosity=1",
        *([f"-dict={words}"] if target.words else []), str(corpus), str(seeds),
    ]  # fmt: skip
    if wanted.seed:
        options.append(f"-seed={wanted.seed}")
    atheris.Setup(options, target.check, **({"custom_mutator": other} if target.json else {}))
    atheris.Fuzz()  # ends the process
    return 0


def _made_up(wanted: argparse.Namespace) -> int:
    from hypothesis import Phase, given, settings
    from hypothesis import strategies as st

    from tests.fuzz.mutations import mutated
    from tests.fuzz.targets import TARGETS

    target = TARGETS[wanted.target]
    seeds = [seed[:LONGEST] for seed in target.seeds()]

    @st.composite
    def words(draw: st.DrawFn) -> bytes:
        data = draw(st.sampled_from(seeds))
        made = mutated(data, draw(st.integers(0, 1 << 32))) if target.json else None
        if made is not None:
            return made
        at = draw(st.integers(0, len(data)))
        piece = draw(st.binary(max_size=20) | st.sampled_from(target.words or (b"",)))
        return data[:at] + piece + data[at + draw(st.integers(0, 20)) :]

    until, done = time.monotonic() + wanted.seconds, 0
    while time.monotonic() < until:
        settings(max_examples=200, database=None, deadline=None, phases=[Phase.generate, Phase.shrink])(
            given(words() | st.binary(max_size=200))(target.check)
        )()
        done += 200
    print(f"Done {done} runs, without coverage")
    return 0


if __name__ == "__main__":
    sys.exit(main())
