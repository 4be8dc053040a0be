"""Weight updates: the banks hear of each, whatever comes of it, and after it."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dsv4_graphs.hooks.weight_updates import WeightUpdates


class Banks:
    def __init__(self, events: list[str], name: str) -> None:
        self.events, self.name = events, name

    def weights_changed(self) -> None:
        self.events.append(self.name)


@pytest.mark.parametrize("fails", [False, True])
def test_banks_are_told_after_an_update(fails: bool) -> None:
    events: list[str] = []

    def update(updater: str, *, path: str) -> tuple[bool, str]:
        events.append(f"{updater} {path}")
        if fails:
            raise OSError("half of the weights are new")
        return True, "done"

    updates = WeightUpdates([Banks(events, "full-layer"), Banks(events, "decoder-replay")])
    result: Any = None
    try:
        result = updates.around(update, "updater", path="/new")
    except OSError:
        assert fails
    assert result == (None if fails else (True, "done"))
    assert events == ["updater /new", "full-layer", "decoder-replay"]
