"""Hash ids of a step: hashed once by the loop, given to ranges, never hashed in one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.engram import (  # noqa: E402
    GivenHashes,
    StepHasher,
    around_hash_break,
    has_engram,
    staged_by_scheduler,
)
from sglang_dsv4_graphs.bank.layer_range import RangeInputs  # noqa: E402
from sglang_dsv4_graphs.bank.served import Step  # noqa: E402
from tests.bank.small_model import LATE, LAYERS, Tail, World  # noqa: E402


class Hasher:
    """The engine's: commits at every call."""

    pad_row = 17

    def __init__(self) -> None:
        self.commits = 0

    def __call__(self, input_ids: Any, batch: Any) -> Any:
        self.commits += 1
        return input_ids.view(-1, 1, 1) * 10 + self.commits


def no_break(*args: Any) -> None:
    raise AssertionError("hashed in a range")


def test_a_step_keeps_what_its_loop_hashed() -> None:
    engines = Hasher()
    hasher = StepHasher(engines)
    assert hasher.ids is None
    ids = hasher(torch.tensor([4, 5]), "batch")
    assert hasher.ids is ids
    assert (ids.flatten().tolist(), engines.commits) == ([41, 51], 1)
    assert hasher.pad_row == 17
    with pytest.raises(AttributeError):
        _ = hasher.nothing


def test_given_ids_are_not_hashed() -> None:
    """0.5.23 fills a buffer that the hasher makes, in a break; 0.5.22's break returns the ids."""
    ids = torch.arange(6).view(3, 1, 2)
    given, tokens = GivenHashes(ids), torch.tensor([7, 8, 9])
    assert given(tokens, "batch") is ids
    buffer = given.new_hash_ids(tokens)
    assert around_hash_break(no_break, given, tokens, buffer) is ids
    assert around_hash_break(no_break, given, tokens) is ids
    assert buffer is ids


def test_ids_of_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="3 rows of hash ids were given, 4 rows need them"):
        GivenHashes(torch.zeros(3, 1, 2))(torch.zeros(4))


def test_the_engines_own_hash_still_breaks() -> None:
    seen: list[Any] = []
    around_hash_break(lambda *args: seen.append(args), Hasher(), "ids", "out")
    assert seen[0][1:] == ("ids", "out")


@pytest.fixture
def world() -> World:
    world = World(late=True)
    for i in (1, LATE + 1):
        world.model.layers[i].engram = SimpleNamespace(embed=SimpleNamespace(staged_by_scheduler=False))
    return world


def step(world: World, lengths: list[int]) -> Step:
    batch = world.batch(lengths)
    tail = batch.tail_of_step
    world.engine.backend.tail_forward_metadata = SimpleNamespace(late_layer_tail=tail)
    hasher = StepHasher(Hasher())
    hasher(batch.input_ids, batch)
    return Step(world.served, None, batch, False, None, None, hasher)  # type: ignore[arg-type]


def test_ranges_get_the_ids_of_their_rows(world: World) -> None:
    of = step(world, [9, 3])
    state = SimpleNamespace(residual=torch.zeros(12, 2, 3), pre=torch.zeros(12, 2))
    full = of.inputs(0, LATE, state, of.batch.positions, of.batch.input_ids)
    assert full.pre is None
    assert torch.equal(full.hash_ids.flatten(), of.batch.input_ids * 10 + 1)
    tail = Tail([9, 3])
    late = of.inputs(LATE, LAYERS, state, of.batch.positions, of.batch.input_ids)
    assert late.pre is state.pre
    assert torch.equal(late.hash_ids.flatten(), tail.rows(of.batch.input_ids) * 10 + 1)
    assert late.hash_ids.shape[0] < full.hash_ids.shape[0]


def test_a_range_without_engram_gets_none(world: World) -> None:
    world.model.layers[1].engram = None
    of = step(world, [5])
    state = SimpleNamespace(residual=torch.zeros(5, 2, 3), pre=None)
    assert of.inputs(0, LATE, state, of.batch.positions, of.batch.input_ids).hash_ids is None
    assert (has_engram(world.model, 0, LATE), has_engram(world.model, LATE, LAYERS)) == (False, True)


def test_rows_that_the_scheduler_stages(world: World) -> None:
    assert not staged_by_scheduler(world.model, 0, LAYERS)
    world.model.layers[LATE + 1].engram.embed.staged_by_scheduler = True
    assert (staged_by_scheduler(world.model, 0, LATE), staged_by_scheduler(world.model, LATE, LAYERS)) == (False, True)


@pytest.mark.parametrize("pre", [True, False])
@pytest.mark.parametrize("hashed", [True, False])
def test_inputs_keep_their_structure(pre: bool, hashed: bool) -> None:
    rows = RangeInputs(
        torch.zeros(2, 2, 3),
        torch.zeros(2, 2) if pre else None,
        torch.zeros(2),
        torch.ones(2),
        torch.zeros(2, 1, 4) if hashed else None,
    )
    tensors = rows.tensors()
    assert len(tensors) == 3 + pre + hashed
    others = [t + 1 for t in tensors]
    again = rows.like(others)
    assert all(a is b for a, b in zip(again.tensors(), others, strict=True))
    assert ((again.pre is None), (again.hash_ids is None)) == (not pre, not hashed)
    assert torch.equal(again.input_ids, rows.input_ids + 1)
    with pytest.raises(ValueError, match=r"tensors for the rows|unpack"):
        rows.like([*others, torch.zeros(2)])
