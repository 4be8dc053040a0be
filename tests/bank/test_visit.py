"""Dummy steps that visit a range: what was captured equals eager, what lies before the range replays."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.bank import Bank  # noqa: E402
from tests.bank.small_model import LATE, LAYERS, TAIL_ROWS, World  # noqa: E402
from tests.bank.small_sweep import BUCKETS, Sweep  # noqa: E402


@pytest.mark.parametrize("late", [False, True])
def test_what_was_captured_equals_eager(late: bool) -> None:
    s = Sweep(World(late=late))
    world, bank = s.world, s.captured()
    for rows in (1, 4, 5, 16):
        batch = world.batch([rows])
        before = world.caches()
        calls = [layer.calls for layer in world.model.layers]
        outputs: list[Any] = []

        def replay(live: Any, batch: Any, bank: Bank = bank, outputs: list[Any] = outputs) -> Any:
            bucket = bank.bucket_for(live.rows)
            assert bucket is not None
            outputs.append(bank.replay(bucket, live, batch).cloned())
            return outputs[-1]

        s.startup.visit(bank, batch, replay)
        assert [layer.calls for layer in world.model.layers] == calls  # no layer ran as Python
        world.set_caches(before)
        world.model.end_layer, world.model.late_layer_start = LATE, None
        residual, pre, _ = world.run(batch, plain=True)
        world.model.end_layer, world.model.late_layer_start = LAYERS, LATE if late else None
        assert torch.allclose(outputs[0].residual, residual, atol=1e-6)
        assert torch.allclose(outputs[0].pre, pre, atol=1e-6)


def test_dspark_collects_every_layer_it_promised() -> None:
    s = Sweep(World())
    s.world.model.dspark_layers_to_capture = [1, 3, 5]
    bank = s.captured()
    assert bank.captured_layers == (1, 3)
    assert bank.buckets == BUCKETS
    calls = [layer.calls for layer in s.world.model.layers]
    s.startup.visit(bank, s.dummies.batch(4), lambda live, batch: bank.replay(4, live, batch))
    # The rest of the model ran too: the step needs layer 5's hidden states.
    assert [a.calls - b for a, b in zip(s.world.model.layers, calls, strict=True)] == [0] * LATE + [1, 1]


@pytest.mark.parametrize("dspark", [False, True])
def test_layers_before_a_range_replay_where_they_have_a_bucket(dspark: bool) -> None:
    s = Sweep(World(late=True))
    world = s.world
    if dspark:
        world.model.dspark_layers_to_capture = [1, 5]
    early, late = s.captured(), s.captured(first=LATE, last=LAYERS)
    early.drop(16)
    found: dict[str, list[Any]] = {"eagerly": [], "replayed": []}
    batches = {rows: s.dummies.batch(rows, TAIL_ROWS) for rows in (3, 8, 10)}
    for way, others in (("eagerly", []), ("replayed", [early])):
        s.startup.banks = [*others, late]
        for rows, batch in batches.items():
            caches, calls = world.caches(), world.model.layers[0].calls

            def visit(live: Any, batch: Any, way: str = way) -> Any:
                found[way] += [live.residual.clone(), live.pre.clone()]
                return late.replay(late.bucket_for(live.rows) or 0, live, batch)

            s.startup.visit(late, batch, visit)
            ran = world.model.layers[0].calls - calls
            assert ran == (way == "eagerly" or rows == 10)
            world.set_caches(caches)
    assert len(found["eagerly"]) == len(found["replayed"]) == 6
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found.values(), strict=True))
