"""The engine's own graphs of the late layers are captured where they stay in charge."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.engine_tail import drive_engine_tail, open_engine_tail  # noqa: E402
from tests.bank.small_model import LATE, LAYERS, World  # noqa: E402
from tests.bank.small_sweep import Sweep  # noqa: E402


class EngineTail:
    """The engine's own tail runner: waits to be told that a full chunk has run."""

    def __init__(self) -> None:
        self.ready_rows: list[int] = []
        self.runner = SimpleNamespace(ready=self.ready_rows.append)


@pytest.mark.parametrize("ours", [True, False])
def test_the_engines_tail_is_driven_where_it_stays_in_charge(ours: bool) -> None:
    s = Sweep(World(late=True), chunk=24)
    s.world.model.decoder_replay_tail = tail = EngineTail()
    if ours:
        bank = s.captured(first=LATE, last=LAYERS)
        assert bank.layers.first == LATE
        assert bank.buckets
    else:
        s.captured(first=0, last=LATE)
    s.dummies.runs.clear()
    s.world.model.seen_tails.clear()
    drive_engine_tail(s.startup)
    assert tail.ready_rows == ([] if ours else [24])
    assert s.dummies.runs == ([] if ours else [("layers", 128)])
    assert s.world.model.seen_tails == ([] if ours else [tail])


def test_an_engines_tail_with_an_engram_is_told_nothing() -> None:
    """It asserts that late layers carry none; in early ones it is none of its business."""
    s = Sweep(World(late=True), chunk=24)
    s.world.model.decoder_replay_tail = tail = EngineTail()
    s.captured(first=0, last=LATE)
    s.dummies.runs.clear()
    s.world.model.layers[LATE].engram = object()
    open_engine_tail(s.startup)
    drive_engine_tail(s.startup)
    assert (tail.ready_rows, s.dummies.runs) == ([], [])
    s.world.model.layers[LATE].engram, s.world.model.layers[0].engram = None, object()
    open_engine_tail(s.startup)
    assert tail.ready_rows == [24]


def test_no_engine_tail_is_nothing_to_drive() -> None:
    s = Sweep(World(late=True))
    s.startup.grow()
    s.dummies.runs.clear()
    open_engine_tail(s.startup)
    drive_engine_tail(s.startup)
    del s.world.model.decoder_replay_tail  # 0.5.22
    drive_engine_tail(s.startup)
    assert s.dummies.runs == []
