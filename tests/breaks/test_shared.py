"""What the breaks of one replay share."""

from __future__ import annotations

from sglang_dsv4_graphs.breaks.shared import StepShared


def test_made_once_per_key_and_object():
    made = []
    shared = StepShared()
    for key in ("a", "a", "b"):
        assert shared.get(key, lambda key=key: made.append(key) or key) == key
    assert made == ["a", "b"]
    StepShared().get("a", lambda: made.append("again"))
    assert made == ["a", "b", "again"]


def test_none_is_a_value():
    shared = StepShared()
    assert shared.get("x", lambda: None) is None
    assert shared.get("x", lambda: 1) is None
