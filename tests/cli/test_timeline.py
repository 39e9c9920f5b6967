"""`mpsagent-cli timeline`: what it makes of events, and its picture in a real Chromium."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mpsagent.api import views
from mpsagent.core.sentences import sentence
from mpsagent.core.sessions import Session, Sessions
from mpsagent_tools import timeline, timeline_rows, timeline_svg
from tests.api.stand_in import serve
from tests.cli.browser import PROGRAM, Browser
from tests.cli.program import run

NAMES = {1001: "alice", 1002: "bob", 1003: "<script>alert(1)</script>"}
LIMITS = {"threads": 20.0, "memory": {"0": 1 << 30}}
T = 1795219200.0


def clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")


numbers = itertools.count(1)


def event(at: float, kind: str, **more: Any) -> dict[str, Any]:
    time = datetime.fromtimestamp(T + at, UTC).isoformat()
    text = sentence({"kind": kind, **more}, NAMES.get)
    return {"cursor": next(numbers), "at": time, "kind": kind, "sentence": text, **more}


def connected(at: float, pid: int, uid: int, waited: float = 0.0, **more: Any) -> dict[str, Any]:
    return event(at, "client.connected", pid=pid, uid=uid, waited=waited, limits=LIMITS, fail_safe=False, **more)


def ended(at: float, pid: int, uid: int, seconds: float, outcome: str = "ok") -> dict[str, Any]:
    more = {"server": 5, "outcome": outcome, "seconds": seconds, "waited": 0.0}
    return event(at, "client.ended", pid=pid, uid=uid, **more)


def of(events: list[dict[str, Any]], until: float) -> timeline_rows.Picture:
    """By the sessions that these events tell of, as the API shows them."""
    fold, found = Sessions(), dict[int, Session]()
    for one in events:
        at = datetime.fromisoformat(one["at"]).timestamp()
        found |= {changed.number: changed for changed in fold.take({**one, "seq": one["cursor"], "at": at})}
    rows = [views.session(one, T + until, NAMES.get) for one in found.values()]
    marks = [one for one in events if one["kind"].startswith(tuple(timeline_rows.KINDS.split(",")))]
    return timeline_rows.picture(rows, marks, T, T + until, clock)


def story() -> list[dict[str, Any]]:
    """Alice works with two processes, until her turn is ended; bob has waited; then two at once, and a fault."""
    return [
        ended(5, 9, 1002, 65.0),  # it began before
        connected(60, 10, 1001),
        connected(600, 11, 1001),
        ended(1900, 10, 1001, 1840.0),
        event(2400, "action.done", action="TerminateClient", pid=11, uid=1001, ok=True, text="",
              reason="the turn is over"),
        ended(2401, 11, 1001, 1801.0, "ended"),
        event(2401, "turn.ended", uid=1001, seconds=2400.0, forced=True),
        connected(2402, 20, 1002, 1200.0),
        connected(3000, 30, 1003),
        event(3600, "server.fault", server=6, uid=1002),
        ended(3660, 20, 1002, 1258.0, "faulted"),
        event(3661, "server.fault_over", server=6, seconds=61.0, recovered=True),
        event(4000, "policy.loaded", files=["policy.toml"], digest="abc"),
        event(4500, "client.refused", pid=77, uid=1002, why='access = "deny"'),
        ended(5000, 30, 1003, 2000.0),
    ]  # fmt: skip


def change(at: float, off: int, seconds: float, on: int | None, paused: float = 0.0) -> list[dict[str, Any]]:
    """A slice of ``seconds`` is over: one user is paused, another one goes on after a pause."""
    over = [event(at, "turn.ended", uid=off, seconds=seconds, forced=True),
            event(at, "user.paused", uid=off, clients=2 if off == 1001 else 1)]  # fmt: skip
    return over if on is None else [*over, event(at, "user.resumed", uid=on, seconds=paused)]


def slices() -> list[dict[str, Any]]:
    """Alice with two processes and bob with one have the GPU in turn, until bob's has ended; his job has a lease."""
    lease = event(50, "lease.given", number=7, by=0, until=T + 3600, uid=1002, job="4711")
    return [
        event(10, "user.resumed", uid=1001, seconds=100.0),  # it began before
        connected(20, 10, 1001),
        connected(30, 11, 1001),
        lease,
        {**lease, "at": datetime.fromtimestamp(T + 60, UTC).isoformat()},  # told again, to another agent
        *change(600, 1001, 580.0, None),
        connected(600, 20, 1002, 540.0, job="4711", lease=7),
        *change(1200, 1002, 600.0, 1001, 600.0),
        ended(1500, 11, 1001, 1470.0),
        *change(1800, 1001, 600.0, 1002, 600.0),
        ended(2400, 20, 1002, 1800.0),
        event(2400, "user.resumed", uid=1001, seconds=600.0),
        event(2401, "lease.ended", number=7, by=0, job="4711"),
        event(2500, "lease.given", number=8, by=0, until=T + 3600, cgroup="/slurm/job_4712", job="4712"),
        connected(3000, 30, 1003),
        *change(3000, 1001, 600.0, None),
    ]


def sliced() -> timeline_rows.Picture:
    return of(slices(), 3600)


def drawn() -> timeline_rows.Picture:
    waits = event(5400, "client.waiting", pid=40, uid=1002, connection=1)
    return of([*story(), waits], 6000)


def test_who_had_the_gpu_when_alone_and_together() -> None:
    """By the times of the events; what began before is there from the beginning, what goes on until the end."""
    picture = drawn()
    assert [(one.kind, one.start - T, one.end - T, one.text.split(" from ")[0]) for one in picture.gpus[0].spans] == [
        ("alone", 0, 5, "bob alone"),
        ("alone", 60, 2401, "alice alone"),
        ("alone", 2402, 3000, "bob alone"),
        ("together", 3000, 3660, "<script>alert(1)</script>, bob together"),
        ("alone", 3660, 5000, "<script>alert(1)</script> alone"),
    ]
    alice, bob, _ = picture.users
    assert [(one.kind, one.start - T, one.end - T) for one in bob.spans] == [
        ("work", 0, 5),
        ("work", 2402, 3660),
        ("wait", 1202, 2402),
        ("wait", 5400, 6000),
        ("fault", 3600, 3661),
    ]
    assert [one.goes_on for one in bob.spans] == [False, False, False, True, False]
    assert "20 %, 1G" in alice.spans[0].text
    assert [(one.kind, one.start - T) for one in alice.marks] == [("forced", 2401), ("turn", 2401)]
    assert "the turn is over" in alice.marks[0].text
    assert [one.kind for one in bob.marks] == ["faulted", "refused"]
    assert [one.kind for one in picture.node.marks] == ["policy"]


def test_who_loses_a_server_by_an_order_has_had_no_fault() -> None:
    """Root's restart was drawn as "ended in a fault"."""
    events = [
        connected(10, 10, 1001),
        ended(60, 10, 1001, 50.0, "lost"),
        connected(70, 11, 1001),
        event(100, "control.restart_ordered", by=0, timeout=None),
        ended(110, 11, 1001, 40.0, "lost"),
    ]
    (alice,) = of(events, 200).users
    assert [(one.kind, one.start - T) for one in alice.marks] == [("faulted", 60), ("forced", 110)]
    assert "ordered a restart" in alice.marks[1].text


def test_who_is_paused_has_no_time_with_the_gpu() -> None:
    """Pauses are spans of their own: what began before is there from the beginning, one that goes on until the end."""
    picture = sliced()
    alice, bob, _ = picture.users
    assert [(one.kind, one.start - T, one.end - T) for one in alice.spans] == [
        ("work", 20, 600),
        ("work", 1200, 1800),
        ("work", 2400, 3000),
        ("pause", 0, 10),
        ("pause", 600, 1200),
        ("pause", 1800, 2400),
        ("pause", 3000, 3600),
    ]
    assert [one.goes_on for one in alice.spans] == [False] * 6 + [True]
    assert [(one.kind, one.start - T, one.end - T) for one in bob.spans] == [
        ("work", 600, 1200),
        ("work", 1800, 2400),
        ("wait", 60, 600),
        ("pause", 1200, 1800),
    ]
    assert [(one.kind, one.start - T, one.text.split(" from ")[0]) for one in picture.gpus[0].spans] == [
        ("alone", 20, "alice alone"),
        ("alone", 600, "bob alone"),
        ("alone", 1200, "alice alone"),
        ("alone", 1800, "bob alone"),
        ("alone", 2400, "alice alone"),
        ("alone", 3000, "<script>alert(1)</script> alone"),
    ]
    assert alice.spans[4].text == "alice was paused from 00:10:00 until 00:20:00 (10m00s), 2 processes frozen"
    assert "2 processes frozen" in alice.spans[6].text
    assert alice.marks == [], "a pause says itself that the turn was over"


def test_leases_are_marks_and_name_the_job() -> None:
    """At the user whom one is for, else at the node; and the work says which job it was for."""
    picture = sliced()
    bob = picture.users[1]
    assert [(one.kind, one.start - T) for one in bob.marks] == [("lease", 50), ("lease", 2401)]
    assert "root gave job 4711 a share" in bob.marks[0].text
    assert [(one.kind, one.start - T) for one in picture.node.marks] == [("lease", 2500)]
    assert "20 (20 %, 1G, job 4711)" in bob.spans[0].text


def test_a_day_of_slices_is_drawn_in_less_detail() -> None:
    """Two users in slices of 10 s: the words say how often."""
    events = [connected(0, 10, 1001), *change(10, 1001, 10.0, None), connected(10, 20, 1002)]
    for number in range(2, 8640):
        off = 1001 + (number + 1) % 2
        events += change(number * 10, off, 10.0, 2003 - off, 10.0)
    picture = of(events, 86400)
    alice, bob = picture.users
    assert len(alice.entries) + len(bob.entries) < 100
    assert not alice.marks
    assert "1 process: 10" in alice.spans[0].text
    assert [one.text.split("), ")[1] for one in bob.spans if one.kind == "pause"] == ["4319 times, 11h59m in all"]


def test_very_much_is_drawn_in_less_detail() -> None:
    """A day of ten thousand short processes of two users, in turn; and an hour of both together."""
    first, second = story()[1], story()[0]

    def process(at: float, pid: int, uid: int, seconds: float) -> list[dict[str, Any]]:
        begun, over = (datetime.fromtimestamp(T + one, UTC).isoformat() for one in (at, at + seconds))
        first["cursor"], second["cursor"] = next(numbers), next(numbers)
        return [{**first, "at": begun, "pid": pid, "uid": uid},
                {**second, "at": over, "pid": pid, "uid": uid, "seconds": seconds}]  # fmt: skip

    events = [one for number in range(10_000) for one in process(number * 8, number + 10, 1001 + number % 2, 4.0)]
    events += [*process(82_000, 20_010, 1001, 3600), *process(82_000, 20_011, 1002, 3600)]
    events.sort(key=lambda one: str(one["at"]))
    refused = [{**story()[13], "cursor": next(numbers), "at": events[0]["at"]} for _ in range(5000)]
    picture = of([*refused, *events], 86400)
    assert sum(len(row.entries) for row in [*picture.gpus, *picture.users]) < 5000
    assert len(picture.users[1].marks) == timeline_rows.MARKS
    assert [one.kind for one in picture.gpus[0].spans] == ["alone", "together"]
    assert "alice, bob mostly alone" in picture.gpus[0].spans[0].text
    assert "are not drawn" in timeline_svg.svg(picture, clock, "UTC", 0.0)


def test_a_process_that_came_with_the_last_event_is_no_mistake() -> None:
    """Its work has no length so far."""
    picture = of(story()[1:2], 60)
    assert [(one.start - T, one.end - T) for one in picture.users[0].spans] == [(60, 60)]
    assert picture.gpus[0].spans == []


def test_each_instance_has_its_gpu_and_its_users() -> None:
    """Bob works at both, at one of them still."""
    events = [{**one, "instance": name} for one in story()[7:8] for name in ("left", "right")]
    events[1]["cursor"] = next(numbers)
    picture = of([*events, {**ended(5000, 20, 1002, 2598.0), "instance": "left"}], 6000)
    assert [row.label for row in picture.gpus] == ["GPU of left", "GPU of right"]
    work = {row.label: [one for one in row.spans if one.kind == "work"] for row in picture.users}
    assert {who: [one.goes_on for one in spans] for who, spans in work.items()} == {
        "bob at left": [False],
        "bob at right": [True],
    }


def test_users_with_control_daemons_of_their_own_share_a_gpu() -> None:
    """Each was drawn alone on a GPU of its own, at the same time."""
    alice, bob = (connected(0, uid, uid, instance=f"gpu-u{uid}") for uid in (1001, 1002))
    picture = of([alice, bob], 60)
    (gpu,) = picture.gpus
    assert gpu.label == "GPU"
    assert ["alice" in one.text and "bob" in one.text for one in gpu.spans] == [True]
    assert [one.label for one in picture.users] == ["alice", "bob"]


def test_an_end_that_no_agent_has_seen_is_said_as_that() -> None:
    """It is known until the last record before."""
    (span,) = of([*story()[1:2], ended(4000, 10, 1001, 3940.0, "unknown")], 6000).users[0].spans
    assert (span.end - T, "not on record" in span.text) == (4000, True)


def test_the_svg_is_xml_whatever_names_are_like() -> None:
    """And each drawn thing has its words."""
    root = ElementTree.fromstring(timeline_svg.svg(drawn(), clock, "UTC", 0.0))
    space = "{http://www.w3.org/2000/svg}"
    things = [one for one in root.iter() if one is not root and one.find(f"{space}title") is not None]
    assert len(things) == 5 + 3 + 7 + 1 + 1
    assert all((one.find(f"{space}title").text or "") for one in things)  # type: ignore[union-attr]
    ends = [float(one.attrib["x"]) + float(one.attrib["width"]) for one in things if "x" in one.attrib]
    assert max(ends) <= timeline_svg.WIDTH
    assert not list(root.iter(f"{space}script"))


def test_the_list_names_whom_a_wait_was_for_and_obeys_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait says who had the GPU meanwhile; a name that a terminal would obey is written out."""
    monkeypatch.setitem(NAMES, 1002, "bob\x1b[2J")
    picture = of([connected(0, 1, 1001), ended(9, 1, 1001, 9.0), connected(10, 2, 1002, waited=8.0)], 20)
    lines = timeline.page(picture, 300)
    assert any("bob\\x1b[2J waited" in line and line.endswith("alice had the GPU") for line in lines), lines
    assert "\x1b" not in "".join(lines)


def test_the_command_writes_a_picture(tmp_path: Path) -> None:
    """Through the API, with the clients that are there; mistakes are said."""
    with serve() as served:
        served.backend.history.rows = []
        begun = time.time()
        served.backend.happen("policy.loaded", files=["policy.toml"], digest="abc")
        served.backend.history.rows[0]["at"] = begun - 60
        picture = tmp_path / "picture.svg"
        done = run(served, "timeline", "--since", "2h", "--svg", str(picture))
        assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
        assert "the policy was loaded" in picture.read_text()
        assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")
        assert run(served, "timeline", "--since", "2h", "--svg", "-").stdout.startswith("<svg")
        assert "the policy was loaded" in run(served, "timeline", "--since", "2h").stdout
        assert run(served, "timeline", "--since", "never", "--svg", "-").returncode == 2
        failed = run(served, "timeline", "--svg", str(tmp_path / "no" / "picture.svg"))
        assert (failed.returncode, "No such file" in failed.stderr) == (2, True)
    assert not re.search(r"(?:src|href)=|url\((?!#)|https?://(?!www\.w3\.org/2000/svg)", picture.read_text())


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("chromium is not installed")
    with Browser() as one:
        yield one


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "picture.svg"
    path.write_text(timeline_svg.svg(drawn(), clock, "UTC", 0.0))
    return path


PHOTOGRAPHS = os.environ.get("MPSAGENT_PHOTOGRAPHS")
if PHOTOGRAPHS:
    Path(PHOTOGRAPHS).mkdir(parents=True, exist_ok=True)
"""Where the pictures go for a person to look at; else nowhere that lasts."""
BOX = "(({x, y, width, height}) => ({x, y, width, height}))(document.querySelector(%s).getBoundingClientRect())"


def box(browser: Browser, selector: str) -> dict[str, float]:
    found = browser.run(BOX % json.dumps(selector))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_is_whole_in_a_browser(browser: Browser, page: Path, tmp_path: Path, dark: bool) -> None:
    """Nothing is asked of the network, and what is drawn has its words."""
    browser.errors.clear()
    browser.open(page, 1300, 900, dark=dark)
    browser.photograph((Path(PHOTOGRAPHS) if PHOTOGRAPHS else tmp_path) / f"timeline-{dark}.png")
    ground = browser.run("getComputedStyle(document.querySelector('.ground')).fill")
    assert ground == ("rgb(22, 24, 27)" if dark else "rgb(255, 255, 255)")
    assert browser.run("performance.getEntriesByType('resource').length") == 0
    assert box(browser, "svg.timeline")["width"] == timeline_svg.WIDTH
    assert "at work from" in browser.run("document.querySelector('rect.work title').textContent"), "a browser's tip"
    assert browser.errors == []


def test_a_pause_is_a_band_of_its_own(browser: Browser, tmp_path: Path) -> None:
    """In the picture and the legend."""
    page = tmp_path / "slices.svg"
    page.write_text(timeline_svg.svg(sliced(), clock, "UTC", 0.0))
    browser.open(page, 1600, 900, dark=True)
    browser.photograph((Path(PHOTOGRAPHS) if PHOTOGRAPHS else tmp_path) / "timeline-pauses.png")
    pause, work = box(browser, "rect.pause:nth-of-type(5)"), box(browser, "rect.work")
    assert pause["x"] >= work["x"] + work["width"] - 1, "it begins when the work is over"
    assert 0 < pause["height"] < work["height"]
    assert "url" in browser.run("getComputedStyle(document.querySelector('rect.pause')).fill"), "not by colour alone"
    words = "alice was paused from 00:10:00 until 00:20:00 (10m00s), 2 processes frozen"
    assert browser.run("document.querySelector('rect.pause:nth-of-type(5) title').textContent") == words
    assert browser.run("document.documentElement.textContent").count("paused until its next turn") == 1


def test_on_paper_it_is_dark_on_light(browser: Browser, page: Path) -> None:
    browser.open(page, 1300, 800, dark=True)
    browser.ask("Emulation.setEmulatedMedia", media="print")
    assert browser.run("getComputedStyle(document.querySelector('.row text')).fill") == "rgb(0, 0, 0)"
