"""A layer range: the loop on a cut view, and the contexts of capture and replay, which must differ."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.layer_range import LayerRange, RangeInputs, multi_stream_off  # noqa: E402
from sglang_dsv4_graphs.breaks.shared import StepShared  # noqa: E402
from sglang_dsv4_graphs.engine.facts import MULTI_STREAM_ENV  # noqa: E402
from tests.bank.small_model import LATE, LAYERS, World, loop  # noqa: E402


@pytest.fixture
def world() -> World:
    torch.manual_seed(2)
    return World()


def make_range(world: World, first: int, last: int) -> LayerRange:
    return LayerRange(world.engine, world.model, loop, first, last)  # type: ignore[arg-type]


def test_a_model_in_two_ranges_equals_the_whole(world: World) -> None:
    batch = world.batch([5, 3])
    before = world.caches()
    residual, pre, _ = world.run(batch, plain=True)
    world.set_caches(before)
    full, late = make_range(world, 0, LATE), make_range(world, LATE, LAYERS)
    entering = RangeInputs(world.embedding[batch.input_ids], None, batch.positions, batch.input_ids)
    with full.capture_scope(batch):
        middle = full.body(entering, batch)
    assert len(middle) == 2
    with late.capture_scope(batch):
        result = late.body(RangeInputs(middle[0], middle[1], batch.positions, batch.input_ids), batch)  # type: ignore[arg-type]
    assert torch.equal(result[0], residual)
    assert torch.equal(result[1], pre)
    assert [layer.calls for layer in world.model.layers] == [2] * LAYERS


def test_captured_layers_of_a_range_come_packed(world: World) -> None:
    world.model.dspark_layers_to_capture = [0, 2, 5]  # the range is told its own
    batch = world.batch([4])
    layers = make_range(world, 0, LATE)
    entering = RangeInputs(world.embedding[batch.input_ids], None, batch.positions, batch.input_ids)
    before = world.caches()
    with layers.capture_scope(batch):
        *_, aux = layers.body(entering, batch, (0, 2))
    world.set_caches(before)
    batch.dspark = True
    _, _, packer = world.run(batch, plain=True)
    assert torch.equal(aux, torch.cat(packer[:2], dim=-1))


def test_the_body_leaves_the_model_alone(world: World) -> None:
    world.model.late_layer_start, world.model.decoder_replay_tail = LATE, object()
    before = (list(world.model.layers), dict(vars(world.model)))
    batch = world.batch([2, 2])  # requests that are all tail
    layers = make_range(world, LATE, LAYERS)
    inputs = RangeInputs(torch.randn(4, 2, 3), torch.rand(4, 2), batch.positions, batch.input_ids)
    with layers.capture_scope(batch):
        layers.body(inputs, batch)
    assert (list(world.model.layers), dict(vars(world.model))) == before
    assert world.model.seen_tails == [None]  # the engine's own tail graphs have no part in ours


def test_what_breaks_share_and_where_stores_go_is_the_engines_to_know(world: World) -> None:
    """The break functions ask the engine; the step's batch says which slots are its own."""
    engine, layers, shared, slots = world.engine, make_range(world, 0, LATE), StepShared(), torch.arange(4)
    with layers.sharing(shared), layers.storing_into(slots):
        assert engine.step_shared is shared
        assert engine.static_slots is slots
    assert engine.step_shared is engine.static_slots is None
    batch = world.batch([4])
    engine.window_slots = lambda given: slots if given is batch else None  # type: ignore[attr-defined]
    assert layers.window_slots(batch) is slots


def test_a_capture_marks_itself_and_a_replay_does_not(world: World) -> None:
    """Some breaks check the mark: in a replay they are plain calls and must see none."""
    engine, layers, batch = world.engine, make_range(world, 0, LATE), world.batch([4])
    with layers.capture_scope(batch):
        assert (engine.breakable, engine.capturing_range, torch.is_grad_enabled()) == (True, True, False)
        assert engine.break_context.forward_batch is batch
    with layers.replay_scope(batch):
        assert (engine.breakable, engine.capturing_range) == (False, False)
        assert engine.break_context.forward_batch is batch
        assert engine.break_context.layers == {
            "attention_layers": ["attention_layers"],
            "quant_config": None,
            "moe_layers": ["moe_layers"],
            "moe_fusions": ["moe_fusions"],
            "dsa_indexers": ["dsa_indexers"],
            "mha_companion_layers": ["mha_companion_layers"],
        }
    assert engine.break_context is None


@pytest.mark.parametrize("scope", ["capture_scope", "replay_scope"])
def test_inside_somebody_elses_break_its_context_stays(world: World, scope: str) -> None:
    """A prefill graph's break has set the mark and a context: leaving ours must clear neither."""
    engine, layers = world.engine, make_range(world, 0, LATE)
    theirs, ours = world.batch([8]), world.batch([4])
    with engine.set_break_context(theirs, **dict.fromkeys(_CONTEXT)):
        outer, engine.breakable = engine.break_context, True
        with getattr(layers, scope)(ours):
            assert engine.break_context is outer
            assert outer.forward_batch is ours
            # A replay's breaks are an eager step's calls, in there too.
            assert engine.breakable is (scope == "capture_scope")
        assert engine.break_context is outer
        assert outer.forward_batch is theirs
        assert engine.breakable


_CONTEXT = ("attention_layers", "quant_config", "moe_layers", "moe_fusions", "dsa_indexers", "mha_companion_layers")


@pytest.mark.parametrize("scope", ["capture_scope", "replay_scope"])
def test_contexts_end_after_an_error(world: World, scope: str) -> None:
    engine, layers, batch = world.engine, make_range(world, 0, LATE), world.batch([4])
    with pytest.raises(ZeroDivisionError), getattr(layers, scope)(batch):
        raise ZeroDivisionError
    assert (engine.breakable, engine.capturing_range, engine.break_context) == (False, False, None)
    assert torch.is_grad_enabled()
    assert MULTI_STREAM_ENV not in os.environ


@pytest.mark.parametrize("before", [None, "1", "0"])
def test_multi_stream_is_off_inside_a_capture(
    world: World, before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(MULTI_STREAM_ENV, raising=False)
    if before is not None:
        monkeypatch.setenv(MULTI_STREAM_ENV, before)
    layers, batch = make_range(world, 0, LATE), world.batch([4])
    with layers.capture_scope(batch):
        assert os.environ[MULTI_STREAM_ENV] == "0"
        with multi_stream_off():
            assert os.environ[MULTI_STREAM_ENV] == "0"
        assert os.environ[MULTI_STREAM_ENV] == "0"
    assert os.environ.get(MULTI_STREAM_ENV) == before
    with layers.replay_scope(batch):
        assert os.environ.get(MULTI_STREAM_ENV) == before


def test_inputs_keep_their_structure() -> None:
    tensors = [torch.zeros(3, 2), torch.ones(3), torch.arange(3), torch.arange(3) + 1]
    with_pre = RangeInputs(*tensors)
    without = RangeInputs(tensors[0], None, tensors[2], tensors[3])
    assert with_pre.tensors() == tensors
    assert without.tensors() == [tensors[0], *tensors[2:]]
    assert with_pre.rows == without.rows == 3
    for inputs in (with_pre, without):
        other = inputs.like([t + 1 for t in inputs.tensors()])
        assert (other.pre is None) == (inputs.pre is None)
        assert torch.equal(other.positions, inputs.positions + 1)
        assert torch.equal(other.residual, inputs.residual + 1)
    with pytest.raises(ValueError, match="unpack"):
        with_pre.like(tensors[:3])


def test_what_fails_in_a_capture_does_not_pass_the_engines_mark(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark logs advice for the engine's own prefill graph about every error that passes it."""
    passed: list[BaseException] = []
    left: list[str] = []

    @contextmanager
    def enable_breakable() -> Iterator[None]:
        try:
            yield
        except BaseException as e:
            passed.append(e)
            raise
        finally:
            left.append("mark")

    monkeypatch.setattr(world.engine, "enable_breakable", enable_breakable)
    with pytest.raises(ValueError, match="no room"), make_range(world, 0, LATE).capture_scope(world.batch([2])):
        raise ValueError("no room")
    assert (passed, left) == ([], ["mark"])
