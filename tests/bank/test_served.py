"""One served model: which steps are ours, the facts of a step, what is counted and logged once."""

from __future__ import annotations

import gc
import logging
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.decide import StepFacts  # noqa: E402
from sglang_dsv4_graphs.bank.guard import MovedBufferError  # noqa: E402
from sglang_dsv4_graphs.bank.served import Step  # noqa: E402
from sglang_dsv4_graphs.bank.views import Takeover  # noqa: E402
from sglang_dsv4_graphs.extend import hookimpl  # noqa: E402
from tests.bank.small_model import LATE, LAYERS, Mode, State, World  # noqa: E402


class Part:
    """A bank's part: notes steps, and takes layers ``[first, last)`` over if it is given any."""

    def __init__(self, first: int = 0, last: int = 0) -> None:
        self.first, self.last = first, last
        self.steps: list[Step] = []

    @hookimpl
    def dsv4_graphs_step(self, step: Step) -> Takeover | None:
        self.steps.append(step)
        return Takeover(self.first, self.last, self.run) if self.last else None

    def run(self, state: Any, positions: Any, input_ids: Any, batch: Any) -> Any:
        residual = state.residual
        state.release()
        return State(residual * 2, residual.mean(-1))


@pytest.fixture
def world() -> World:
    torch.manual_seed(5)
    made = World()
    made.served.ready = True
    return made


@pytest.fixture
def part(world: World) -> Part:
    made = Part()
    world.manager.register(made)
    return made


def calls(world: World) -> list[int]:
    return [layer.calls for layer in world.model.layers]


def test_a_step_in_which_nobody_takes_part_is_the_engines(world: World, part: Part) -> None:
    batch = world.batch([5, 3])
    before = world.caches()
    ours = world.run(batch)
    world.set_caches(before)
    plain = world.run(batch, plain=True)
    assert all(torch.equal(a, b) for a, b in zip(ours[:2], plain[:2], strict=True))
    assert len(part.steps) == 1
    assert not world.served.fallbacks


def test_what_a_bank_sees_of_a_step(world: World, part: Part) -> None:
    world.model.dspark_layers_to_capture = []
    batch = world.batch([5, 3], dspark=True)
    world.run(batch)
    (step,) = part.steps
    assert (step.served, step.batch, step.capture_dspark) == (world.served, batch, True)
    assert step.packer == []
    assert step.facts == StepFacts(rows=8, requests=2)


def test_a_takeover_replaces_its_layers(world: World) -> None:
    world.manager.register(Part(0, LATE))
    residual, _, _ = world.run(world.batch([4]))
    assert calls(world) == [0] * LATE + [1] * (LAYERS - LATE)
    assert residual.shape[0] == 4


def test_all_parts_of_a_step(world: World) -> None:
    world.manager.register(Part(0, 2))
    world.manager.register(Part(3, LAYERS))
    world.run(world.batch([4]))
    assert calls(world) == [0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("why", ["not ready", "stand down", "decode", "engine captures"])
def test_steps_that_are_none_of_ours(world: World, part: Part, why: str) -> None:
    batch = world.batch([4])
    if why == "not ready":
        world.served.ready = False
    elif why == "stand down":
        world.served.stand_down = "LoRA"
    elif why == "decode":
        batch.forward_mode = Mode(extend=False)
    else:
        world.engine.capturing_engine = True
    world.run(batch)
    assert part.steps == []
    assert calls(world) == [1] * LAYERS
    assert not world.served.fallbacks  # an eager decode step is nothing that fell back


def fallback(world: World, batch: Any) -> str:
    world.run(batch)
    ((bank, reason),) = world.served.fallbacks
    assert bank == "all"
    return reason


def test_speculative_steps_fall_back(world: World, part: Part) -> None:
    batch = world.batch([4])
    batch.forward_mode = Mode(speculative=True)
    assert fallback(world, batch) == "speculative verify or draft"
    assert part.steps == []


def test_multimodal_steps_fall_back(world: World) -> None:
    batch = world.batch([4])
    batch.contains_mm_inputs = lambda: True
    assert fallback(world, batch) == "multimodal input"


def test_steps_while_experts_are_recorded_fall_back(world: World) -> None:
    world.engine.recording_experts = True
    assert fallback(world, world.batch([4])) == "expert recorder active"


def test_context_parallel_steps_fall_back(world: World) -> None:
    batch = world.batch([4])
    batch.attn_cp_metadata = object()
    assert fallback(world, batch) == "context-parallel step"


def test_steps_with_other_global_ids_fall_back(world: World) -> None:
    from tests.bank.small_model import loop

    batch = world.batch([4])
    world.served.run_loop(
        loop,
        batch.positions,
        world.embedding[batch.input_ids],
        batch,
        batch.input_ids,
        batch.input_ids.clone(),
        False,
        None,
    )
    assert list(world.served.fallbacks) == [("all", "global token ids differ from local ones")]


@pytest.mark.parametrize("which", range(3), ids=["positions", "hidden states", "ids"])
def test_steps_with_rows_of_another_type_than_captured_fall_back(world: World, part: Part, which: int) -> None:
    with world.served.forced(lambda step: []):  # as captures run
        world.run(world.batch([8]))
    world.run(world.batch([4]))
    assert (len(part.steps), dict(world.served.fallbacks)) == (1, {})
    batch, seen = world.batch([4]), []
    rows = [batch.positions, world.embedding[batch.input_ids], batch.input_ids]
    rows[which] = rows[which].half()
    positions, hidden, ids = rows
    world.served.run_loop(lambda model, *args: seen.append(model), positions, hidden, batch, ids, ids, False, None)
    assert seen == [world.model]
    assert list(world.served.fallbacks) == [("all", "rows of another type than the captured ones")]
    assert len(part.steps) == 1


@pytest.mark.parametrize(
    ("bound", "sharded", "owned"),
    [
        (None, False, True),
        ("local", False, True),
        ("global", True, True),
        ("global", False, False),
        ("own", True, False),
    ],
)
def test_a_moe_count_must_be_one_that_the_bank_replaces(
    world: World, bound: str | None, sharded: bool, owned: bool
) -> None:
    batch = world.batch([4])
    batch.global_num_token_non_padded = torch.tensor(4, dtype=torch.int32)
    counts = {
        None: None,
        "local": batch.num_token_non_padded,
        "global": batch.global_num_token_non_padded,
        "own": torch.tensor(4, dtype=torch.int32),
    }
    batch.attn_tp_sequence_sharded = sharded
    batch.moe_num_token_non_padded = lambda: counts[bound]
    world.run(batch)
    reasons = [reason for _, reason in world.served.fallbacks]
    assert reasons == ([] if owned else ["MoE row count that a graph cannot own"])


def test_fallbacks_are_counted_and_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sglang_dsv4_graphs")
    for rows in (9000, 9001):
        world.served.count_fallback("full-layer", "more rows than the largest bucket", rows)
    world.served.count_fallback("decoder-replay", "more rows than the largest bucket", 3000)
    assert dict(world.served.fallbacks) == {
        ("full-layer", "more rows than the largest bucket"): 2,
        ("decoder-replay", "more rows than the largest bucket"): 1,
    }
    assert caplog.messages == [
        'dsv4-graphs: fallback bank=full-layer reason="more rows than the largest bucket" rows=9000',
        'dsv4-graphs: fallback bank=decoder-replay reason="more rows than the largest bucket" rows=3000',
    ]


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("strict", [False, True])
def test_a_moved_buffer_retires_the_bank_or_ends_a_strict_server(
    strict: bool, here: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(strict=strict)
    retired: list[str] = []
    bank: Any = SimpleNamespace(name="full-layer", retire=retired.append)
    error = MovedBufferError("full-layer", 256, "workspace", 16, None) if here else None
    if strict and here:
        with pytest.raises(MovedBufferError):
            world.served.retire(bank, error, 3)
    else:
        world.served.retire(bank, error, 3)
    assert retired == [str(error) if here else "a guarded buffer moved on rank 3"]
    (message,) = caplog.messages
    assert message.startswith("dsv4-graphs: moved-buffer rank=0 bank=full-layer reason=")
    assert ("workspace moved: captured at 0x10, now at nowhere" in message) is here


def test_a_model_that_the_engine_dropped_is_named() -> None:
    served = World().served
    gc.collect()
    with pytest.raises(ReferenceError, match="the engine has dropped this model"):
        served.model  # noqa: B018


def test_forced_steps_nest_and_end(world: World, part: Part) -> None:
    world.served.ready = False
    seen: list[str] = []

    def force(name: str) -> Any:
        return lambda step: seen.append(name) or []

    with world.served.forced(force("outer")):
        world.run(world.batch([1]))
        with suppress(ZeroDivisionError), world.served.forced(force("inner")):
            world.run(world.batch([1]))
            raise ZeroDivisionError
        world.run(world.batch([1]))
    world.run(world.batch([1]))
    assert seen == ["outer", "inner", "outer"]
    assert part.steps == []


def test_forced_steps_ask_no_reason(world: World) -> None:
    world.engine.recording_experts = True
    with world.served.forced(lambda step: [Takeover(0, LAYERS, Part().run)]):
        world.run(world.batch([4]))
    assert calls(world) == [0] * LAYERS
    assert not world.served.fallbacks


def test_the_loop_is_kept_as_the_engine_calls_it(world: World) -> None:
    from tests.bank.small_model import loop

    world.served.ready = False
    assert world.served.plain_loop is None
    world.run(world.batch([1]))
    assert world.served.plain_loop is loop


def test_a_loop_that_the_engine_captures_is_left_alone(world: World, part: Part) -> None:
    """Its mark says so: a prefill graph is captured, also by a server that serves already."""
    batch = world.batch([5, 3])
    world.engine.breakable = True
    world.run(batch)
    assert (part.steps, calls(world)) == ([], [1] * LAYERS)
    world.engine.breakable = False
    world.run(batch)
    assert len(part.steps) == 1


@pytest.mark.parametrize("ready", [True, False])
def test_who_has_a_part_in_a_prefill_graph_is_asked_while_it_is_captured(world: World, part: Part, ready: bool) -> None:
    asked: list[Step] = []

    def block(step: Step) -> list[Takeover]:
        asked.append(step)
        return [Takeover(LATE, LAYERS, part.run)]

    world.served.in_prefill_graph, world.served.ready = block, ready
    world.engine.breakable = True
    world.run(world.batch([4]))
    assert (len(asked), part.steps) == (1, [])
    assert calls(world) == [1] * LATE + [0] * (LAYERS - LATE)
    world.engine.breakable = False
    world.run(world.batch([4]))
    assert len(asked) == 1  # an eager step is the banks'
    assert len(part.steps) == ready
    world.engine.breakable = True
    with world.served.forced(lambda step: []):
        world.run(world.batch([4]))
    assert len(asked) == 1  # nor has it a part in our own captures


@pytest.mark.parametrize(
    ("multimodal", "recording", "reason"),
    [(False, False, None), (True, False, "multimodal input"), (False, True, "expert recorder active")],
)
def test_late_layers_of_a_prefill_graph_step(world: World, multimodal: bool, recording: bool, reason: str) -> None:
    batch = SimpleNamespace(contains_mm_inputs=lambda: multimodal)
    world.engine.recording_experts = recording
    assert world.served.reason_inside_prefill_graph(batch, 3) == reason


@pytest.mark.parametrize(("rows", "may"), [(0, False), (127, False), (128, True)])
def test_a_cap_below_the_smallest_bucket_replays_no_tail(rows: int, may: bool) -> None:
    """No shape of the engine's prefill graph may break out for a bank that will have no graph."""
    world = World(late=True, decoder_replay_max_rows=rows)
    world.engine.get_parallel = lambda: SimpleNamespace(attn_dp_size=1, attn_cp_size=1)  # type: ignore[attr-defined]
    assert world.served.may_replay_tails is may
