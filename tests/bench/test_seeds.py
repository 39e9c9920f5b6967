"""The seeds of the field: the page says what was measured and nothing else; the script runs to its end on the
simulator, where nothing is computed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.seeds import published, table

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_page_is_that_of_the_run_which_it_names() -> None:
    """Nothing in the tables is written by hand: they are made of the results that lie in docs/measured."""
    text = table.PAGE.read_text(encoding="utf-8")
    written = text.partition(table.BEGIN)[2].partition(table.END)[0].strip()
    picture = re.search(r"\(([^)]+)/seeds\.svg\)", written)
    if picture is None:
        assert written == table.page(None).strip()
        assert written.count(table.NOT_YET) > 50
        return
    results = json.loads((table.PAGE.parent / picture.group(1) / "seeds.json").read_text(encoding="utf-8"))
    assert written == table.page(results, f"{picture.group(1)}/seeds.svg").strip()
    assert not results["simulated"]


def test_every_published_number_of_processes_is_measured() -> None:
    for seed in published.SEEDS:
        counts = {count for start in seed.starts for count in start.counts}
        assert set(seed.rows) <= counts, seed.name
        assert len(seed.why) > 40, seed.name
    assert published.with_needed(["inference"]) == ["resnet", "inference"]


def test_files_are_those_of_mnist(tmp_path: Path) -> None:
    """Magic numbers and sizes as in the real ones, so that these can take the place of the made ones."""
    pytest.importorskip("numpy")
    from benchmarks.seeds import mnist

    mnist.make(tmp_path, 500)
    assert (tmp_path / mnist.IMAGES).read_bytes()[:16].hex() == "00000803" + "000001f4" + "0000001c" * 2
    assert (tmp_path / mnist.LABELS).read_bytes()[:8].hex() == "00000801" + "000001f4"
    images, labels = mnist.load(tmp_path)
    assert (images.shape, labels.min(), labels.max()) == ((500, 1, 28, 28), 0, 9)
    (tmp_path / mnist.IMAGES).write_bytes(b"\x1f\x8b\x08\0\0\0")
    with pytest.raises(ValueError, match="still packed"):
        mnist.load(tmp_path)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="starts an MPS of its own: root and namespaces")
def test_it_runs_on_the_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agent, gate and clients are real processes; MPS is simulated, and nothing is computed."""
    out = tmp_path / "out"
    command = [
        sys.executable,
        "benchmarks/seeds/run.py",
        "--sim",
        "--out",
        str(out),
        "--seconds",
        "0.2",
        "--only",
        "nbody",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is computed" in done.stdout
    results = json.loads((out / "results.json").read_text())
    assert [(one["mode"], one["processes"], one.get("problem")) for one in results["figures"]] == [
        ("off", 1, None), ("off", 4, None), ("on", 1, None), ("on", 4, None),
    ]  # fmt: skip
    assert all(one["rate"] > 0 and one["multiprocessors"] == [132] * 4 for one in results["figures"])
    assert (out / "seeds.md").read_text().startswith("**Simulated")

    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    monkeypatch.setattr(sys, "argv", ["table.py", str(out)])
    assert table.main() == 1, "simulated figures do not go into docs/"
    monkeypatch.setattr(sys, "argv", ["table.py", str(out), str(out), "--page", str(page)])
    assert table.main() == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert len(list(tmp_path.glob("*/seeds.json"))) == 1
