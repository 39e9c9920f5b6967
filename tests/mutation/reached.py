"""A plugin of pytest that writes which functions of mpsagent/ the tests of each file call, and how long the file takes.

Run `python -m pytest -p tests.mistakes.reached`, which writes FOLDER/PROCESS.json for each process of pytest. FOLDER is
the environment variable REACHED_FOLDER. Calls in other processes are not seen.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_PRODUCT = f"{ROOT / 'mpsagent'}/"
_calls: dict[str, set[str]] = defaultdict(set)
_seconds: dict[str, float] = defaultdict(float)
_failed: set[str] = set()
_now = ""


def _call(frame: FrameType, _event: str, _: Any) -> None:
    code = frame.f_code
    if code.co_filename.startswith(_PRODUCT):
        _calls[_now].add(f"{code.co_filename.removeprefix(f'{ROOT}/')}:{code.co_firstlineno}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _now
    _now = item.nodeid.split("::")[0]
    sys.settrace(_call)
    threading.settrace(_call)
    try:
        return (yield)  # type: ignore[return-value]
    finally:
        sys.settrace(None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if hasattr(report, "node"):
        return  # the controller of pytest-xdist sees each report a second time
    _seconds[report.nodeid.split("::")[0]] += report.duration
    if report.failed:
        _failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    folder = os.environ.get("REACHED_FOLDER")
    if folder and _seconds:
        files = {
            name: {"seconds": round(seconds, 2), "calls": sorted(_calls[name])} for name, seconds in _seconds.items()
        }
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps({"files": files, "failed": sorted(_failed)}))
