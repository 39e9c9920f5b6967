"""The text of a condition: the instance leads a problem of one instance."""

from __future__ import annotations

import pytest

from mpsagent.snapshot.condition import Condition


@pytest.mark.parametrize(("where", "bad", "text"), [
    ((), "problem", "of alice"), (("gpu1",), "problem", "gpu1: of alice"),
    (("gpu1", "gpu2"), "problem", "of alice"), (("gpu1",), "not sure", "of alice"),
])  # fmt: skip
def test_a_problem_of_one_instance_names_it(where: tuple[str, ...], bad: str, text: str) -> None:
    one = Condition("of user 7", bad=bad, where=where)  # type: ignore[arg-type]
    assert one.text({7: "alice"}.get) == text
