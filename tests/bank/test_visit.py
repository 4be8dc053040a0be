"""Dummy steps that visit a range: what was captured equals eager, what lies before the range replays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.bank import Bank  # noqa: E402
from sglang_dsv4_graphs.bank.guard import MovedBufferError  # noqa: E402
from sglang_dsv4_graphs.bank.visit import replays_before  # noqa: E402
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


def some_bank(first: int, last: int, buckets: tuple[int, ...] = BUCKETS) -> Any:
    return SimpleNamespace(
        layers=SimpleNamespace(first=first, last=last),
        bucket_for=lambda rows: min((b for b in buckets if b >= rows), default=None),
    )


def test_banks_that_replay_before_a_range_share_no_layer_with_it_or_each_other() -> None:
    a, b, c, d = some_bank(0, 2), some_bank(0, 4), some_bank(2, 4), some_bank(4, 6)
    late = some_bank(4, 6)
    assert replays_before(late, [a, b, c, d], 5) == [(a, 8), (c, 8)]
    assert replays_before(late, [b, a, c], 4) == [(b, 4)]
    assert replays_before(c, [a, b, c, d], 16) == [(a, 16)]
    assert replays_before(late, [some_bank(0, 4, (4,))], 5) == []
    assert replays_before(a, [a, b, c, d], 5) == []


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("here", [False, True])
def test_no_rank_replays_before_a_range_where_a_buffer_moved_on_one(here: bool, there: bool) -> None:
    s = Sweep(World(late=True))
    early, late = s.captured(), s.captured(first=LATE, last=LAYERS)
    asked: list[bool] = []

    def who(problem: bool) -> int | None:
        asked.append(problem)
        return 1 if problem or there else None

    def check(bucket: int, **options: Any) -> None:
        if here:
            raise MovedBufferError("full-layer", bucket, "a workspace", 1, 2)

    s.ranks.who = who  # type: ignore[method-assign]
    early.check = check  # type: ignore[method-assign]
    calls = s.world.model.layers[0].calls
    batch = s.dummies.batch(8, TAIL_ROWS)
    s.startup.visit(late, batch, lambda live, b: late.replay(8, live, b))
    assert asked == [here]
    assert s.world.model.layers[0].calls - calls == (here or there)


def test_a_visit_of_the_first_layers_replays_nothing_else() -> None:
    """With DSpark it runs the rest of the model, whose bank has a bucket too."""
    s = Sweep(World(late=True))
    s.world.model.dspark_layers_to_capture = [1, 5]
    early, late = s.captured(), s.captured(first=LATE, last=LAYERS)
    late.replay = lambda *args: pytest.fail("replayed")  # type: ignore[method-assign]
    calls = [layer.calls for layer in s.world.model.layers]
    s.startup.visit(early, s.dummies.batch(8, TAIL_ROWS), lambda live, b: early.replay(8, live, b))
    assert [a.calls - b for a, b in zip(s.world.model.layers, calls, strict=True)] == [0] * LATE + [1] * (LAYERS - LATE)


def test_hidden_states_of_every_range_before_the_tail_are_narrowed() -> None:
    s = Sweep(World(late=True))
    s.world.model.dspark_layers_to_capture = [1, 3, 5]
    s.startup.grow()
    collected: list[tuple[int, ...]] = []
    collect = s.world.engine.collect_aux

    def collect_aux(packer: Any, aux: Any, captures: int, tail: Any) -> None:
        collect(packer, aux, captures, tail)
        collected.append(tuple(packer[-1].shape))

    s.world.engine.collect_aux = collect_aux  # type: ignore[method-assign]
    middle = s.startup.make_bank("middle", 2, LATE, BUCKETS)
    s.startup.capture_all(middle, s.dummies.batch)
    collected.clear()
    # One request of eight rows has a tail of two.
    s.startup.visit(middle, s.dummies.batch(8), lambda live, b: middle.replay(8, live, b))
    assert [shape[0] for shape in collected] == [TAIL_ROWS]
