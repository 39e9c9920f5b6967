"""The order of service as real MPS kept it, and that a daemon with another one would be found out."""

from __future__ import annotations

from tests.conformance import report, rules

KNOCK = "Control D1: NEW CLIENT {} from user {}: Server is not ready, push client to pending list"
START = "Control S{0}: Starting new server S{0} for user {1}"
READY = "Control D1: NEW SERVER S{}: Ready"
GONE = "Control D1: Server S{} exited with status 0"


def test_real_mps_always_served_its_leaving_servers_own_user_first_and_then_in_order_of_arrival() -> None:
    found = []
    for path in sorted(report.REAL.glob("*/raw*.txt")):
        for section in report.wholes(path.read_text(errors="replace")).values():
            assert rules.broken(section.logs.get("control", [])) == [], (path.name, section.name)
            found += rules.choices(section.logs.get("control", []))
    assert len(found) > 12
    assert any(one.user != one.waiting[0] for one in found), "a client that came later was served first"


def test_each_wrong_choice_is_found() -> None:
    served = [KNOCK.format("c1", "A"), START.format(1, "A"), READY.format(1)]
    waiting = [KNOCK.format("c2", "B"), KNOCK.format("c3", "C"), KNOCK.format("c4", "A"), GONE.format(1)]
    assert rules.broken([*served, *waiting, START.format(2, "A")]) == []
    assert rules.broken([*served, *waiting, START.format(2, "B")]) == ["S2 is for B, not for A, while B C A wait"]
    assert rules.broken([*served, *waiting[:2], GONE.format(1), START.format(2, "C")]) == [
        "S2 is for C, not for B, while B C wait"
    ]


def test_who_was_served_waits_no_longer() -> None:
    log = [KNOCK.format("c1", "A"), START.format(1, "A"), KNOCK.format("c2", "B"), KNOCK.format("c3", "A")]
    log += [READY.format(1), KNOCK.format("c4", "C"), GONE.format(1), START.format(2, "B")]
    assert rules.broken(log) == []
