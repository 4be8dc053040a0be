"""A small model with the engine's layer loop in outline, and an engine of ours that the loop and the bank meet.

Layers store to a cache and attend over it in breaks that read the live batch; late layers run on a tail of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch

from sglang_dsv4_graphs.bank.served import ServedModel
from sglang_dsv4_graphs.engine.api import Engine
from sglang_dsv4_graphs.extend import make_manager
from sglang_dsv4_graphs.log import RankLog
from sglang_dsv4_graphs.settings import Settings
from tests.bank.small_range import HIDDEN, SLOTS, STREAMS, breaking

LAYERS, LATE, TAIL_ROWS = 6, 4, 2
# Layers that select what the ones behind them read.
LAYER_SOURCES: list[int] | None = [0, LATE]


class State:
    """Residual streams and pre-mix; ``release`` empties it, as the engine's does for a consumed one."""

    def __init__(self, residual: Any, pre: Any = None) -> None:
        self.residual, self.pre = residual, pre

    def release(self) -> None:
        self.residual = self.pre = None


class SmallEngine:
    """What banks ask of the engine; ``log`` notes scopes and contexts as they are entered."""

    version = "small"
    HcState = State
    # Scopes that touch nothing of the engine are the real ones.
    sharing = Engine.sharing
    storing_into = Engine.storing_into

    def __init__(self) -> None:
        self.capture_var: ContextVar[Any] = ContextVar("capture", default=None)
        self.break_context: Any = None
        self.breakable = self.capturing_range = self.capturing_engine = self.recording_experts = False
        self.prefill_graph = False
        self.step_shared: Any = None
        self.static_slots: Any = None
        self.backend = SimpleNamespace(forward_metadata=SimpleNamespace(), tail_forward_metadata=None)

    def get_break_context(self) -> Any:
        return self.break_context

    @contextmanager
    def set_break_context(self, batch: Any, **layers: Any) -> Iterator[None]:
        assert set(layers) == {
            "attention_layers",
            "quant_config",
            "moe_layers",
            "moe_fusions",
            "dsa_indexers",
            "mha_companion_layers",
        }
        self.break_context = SimpleNamespace(forward_batch=batch, layers=layers)
        try:
            yield
        finally:
            self.break_context = None

    def graph_layers(self, model: Any) -> Any:
        names = ("attention_layers", "moe_layers", "moe_fusions", "dsa_indexers", "mha_companion_layers")
        return SimpleNamespace(**{name: [name] for name in names})

    def in_breakable(self) -> bool:
        return self.breakable

    @contextmanager
    def enable_breakable(self) -> Iterator[None]:
        # Not nestable, as the engine's.
        self.breakable = True
        try:
            yield
        finally:
            self.breakable = False

    @contextmanager
    def unmarked(self) -> Iterator[None]:
        saved, self.breakable = self.breakable, False
        try:
            yield
        finally:
            self.breakable = saved

    def captures_prefill(self) -> bool:
        return self.prefill_graph

    @contextmanager
    def range_capture_scope(self) -> Iterator[None]:
        saved, self.capturing_range = self.capturing_range, True
        try:
            yield
        finally:
            self.capturing_range = saved

    def step_context(self, batch: Any) -> Any:
        return nullcontext()

    def in_capture_mode(self) -> bool:
        return self.capturing_engine

    def expert_recorder(self) -> Any:
        return SimpleNamespace(recording=self.recording_experts)

    def get_attn_backend(self) -> Any:
        return self.backend

    def local_rows(self, rows: int, bucket: int, sharded: bool) -> int:
        return rows

    def hand_over(self, state: Any, batch: Any) -> Any:
        return state

    def new_packer(self, captures: int) -> list[torch.Tensor]:
        return []

    def packed(self, packer: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(packer, dim=-1)

    def collect_aux(self, packer: list[torch.Tensor], aux: torch.Tensor, captures: int, tail: Any) -> None:
        packer.extend((aux if tail is None else tail.rows(aux)).chunk(captures, dim=-1))


class Layer:
    engram = None

    def __init__(self, number: int, engine: SmallEngine) -> None:
        self.number, self.engine = number, engine
        self.weight = torch.randn(HIDDEN, HIDDEN) / 2
        self.cache = torch.zeros(SLOTS, HIDDEN)
        self.calls = 0
        self._attend = breaking(engine.capture_var, self._attend_live_rows)

    def __call__(self, *, positions: Any, hidden_states: Any, input_ids: Any, forward_batch: Any) -> State:
        self.calls += 1
        state, residual = hidden_states, hidden_states.residual
        x = residual.sum(1) @ self.weight + positions[:, None] * 0.1 + input_ids[:, None] * 0.01
        if state.pre is not None:
            x = x * state.pre.sum(1, keepdim=True)
        out = torch.zeros_like(x)
        self._attend(x, out, forward_batch)
        state.release()
        residual = residual + torch.tanh(x + out)[:, None, :]
        return State(residual, torch.sigmoid(residual.mean(-1)))

    def _attend_live_rows(self, x: torch.Tensor, out: torch.Tensor, batch: Any) -> None:
        """Store and attend; inside a range the batch is the break context's, as in the engine's breaks."""
        context = self.engine.break_context
        batch = batch if context is None else context.forward_batch
        rows = batch.global_num_token_non_padded_cpu
        tail = batch.tail_of_step
        slots = (batch.out_cache_loc if tail is None or self.number < LATE else tail.rows(batch.out_cache_loc))[:rows]
        self.cache[slots] = x[:rows]
        out.zero_()
        out[:rows] = self.cache[slots].cumsum(0) / 4


class Tail:
    """The rows that late layers keep: each request's last ones."""

    def __init__(self, lengths: list[int]) -> None:
        ends = torch.tensor(lengths).cumsum(0).tolist()
        kept = [range(max(end - n, end - TAIL_ROWS), end) for end, n in zip(ends, lengths, strict=True)]
        self.index = torch.tensor([i for part in kept for i in part])
        self.positions = self.index

    def rows(self, t: torch.Tensor) -> torch.Tensor:
        return t[self.index]


class SmallModel:
    start_layer, end_layer = 0, LAYERS
    hc_pre_from_prev_sublayer = True

    def __init__(self, engine: SmallEngine, late: int | None = None) -> None:
        self.engine = engine
        self.layers = [Layer(i, engine) for i in range(LAYERS)]
        self.late_layer_start = late
        self.config = SimpleNamespace(index_source_layer_ids=LAYER_SOURCES)
        self.dspark_layers_to_capture: list[int] | None = None
        self.decoder_replay_tail: Any = None
        self.engram_hasher: Any = None
        self.seen_tails: list[Any] = []


def loop(
    model: Any, positions: Any, hidden: Any, batch: Any, input_ids: Any, ids_global: Any, capture: Any, packer: Any
) -> tuple[Any, Any, Any]:
    """The engine's loop in outline."""
    state = State(hidden)
    model.seen_tails.append(model.decoder_replay_tail)
    narrowed = batch.tail_of_step if model.late_layer_start is not None else None
    for i in range(model.start_layer, model.end_layer):
        if i == model.late_layer_start:
            tail = batch.tail_of_step
            state = State(tail.rows(state.residual), tail.rows(state.pre))
            positions, input_ids = tail.rows(positions), tail.rows(input_ids)
            batch = _narrowed(batch, tail)
        if capture and i in model.dspark_layers_to_capture:
            # What enters the layer, on the rows that the step keeps.
            aux = state.residual.mean(1)
            packer.append(narrowed.rows(aux) if narrowed is not None and i < model.late_layer_start else aux)
        state = model.layers[i](positions=positions, hidden_states=state, input_ids=input_ids, forward_batch=batch)
    return state.residual, state.pre, packer


def _narrowed(batch: Any, tail: Tail) -> Any:
    return SimpleNamespace(**{**vars(batch), "global_num_token_non_padded_cpu": tail.index.shape[0]})


class Mode:
    def __init__(self, extend: bool = True, speculative: bool = False) -> None:
        self.extend, self.speculative = extend, speculative

    def is_extend(self) -> bool:
        return self.extend

    def is_extend_without_speculative(self) -> bool:
        return self.extend and not self.speculative


def extend_batch(lengths: list[int], *, late: bool = False, dspark: bool = False) -> Any:
    """A step of requests of these lengths, at random slots with random tokens."""
    rows = sum(lengths)
    count = torch.tensor(rows, dtype=torch.int32)
    return SimpleNamespace(
        forward_mode=Mode(),
        batch_size=len(lengths),
        input_ids=torch.randint(100, (rows,)),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        out_cache_loc=torch.randperm(SLOTS)[:rows],
        num_token_non_padded=count,
        global_num_token_non_padded=count,
        global_num_token_non_padded_cpu=rows,
        attn_tp_sequence_sharded=False,
        attn_cp_metadata=None,
        extend_prefix_lens_cpu=[0] * len(lengths),
        contains_mm_inputs=lambda: False,
        moe_num_token_non_padded=lambda: None,
        tail_of_step=Tail(lengths) if late else None,
        dspark=dspark,
    )


class World:
    """A served small model; ``run`` is one step through the path that the engine's step takes."""

    def __init__(self, *, late: bool = False, **settings: Any) -> None:
        self.engine = SmallEngine()
        self.model = SmallModel(self.engine, LATE if late else None)
        self.manager = make_manager(third_parties=False)
        self.served = ServedModel(
            self.engine,  # type: ignore[arg-type]
            self.model,
            Settings(**settings),
            self.manager,
            RankLog(),
        )
        self.embedding = torch.randn(100, STREAMS, HIDDEN)

    def batch(self, lengths: list[int], *, dspark: bool = False) -> Any:
        return extend_batch(lengths, late=self.model.late_layer_start is not None, dspark=dspark)

    def run(self, batch: Any, *, plain: bool = False) -> tuple[Any, Any, Any]:
        """Residual, pre-mix and packed hidden states; ``plain`` calls the loop as without a plugin."""
        tail = batch.tail_of_step
        self.engine.backend.tail_forward_metadata = tail and SimpleNamespace(late_layer_tail=tail)
        hidden, packer = self.embedding[batch.input_ids], [] if batch.dspark else None
        args = (batch.positions, hidden, batch, batch.input_ids, batch.input_ids, batch.dspark, packer)
        with torch.no_grad():
            return loop(self.model, *args) if plain else self.served.run_loop(loop, *args)

    def caches(self) -> list[torch.Tensor]:
        return [layer.cache.clone() for layer in self.model.layers]

    def set_caches(self, caches: list[torch.Tensor]) -> None:
        for layer, cache in zip(self.model.layers, caches, strict=True):
            layer.cache.copy_(cache)


class SmallDummies:
    """Dummy steps of the world's model."""

    most_requests = 8

    def __init__(self, world: World, most_rows: int = 1000) -> None:
        self.world, self.most_rows = world, most_rows
        self.runs: list[tuple[str, int]] = []

    def batch(self, rows: int, request_length: int | None = None) -> Any:
        longest = request_length or rows
        lengths = [longest] * (rows // longest) + ([rows % longest] if rows % longest else [])
        return self.world.batch(lengths, dspark=bool(self.world.model.dspark_layers_to_capture))

    def run(self, batch: Any) -> None:
        self.runs.append(("layers", batch.input_ids.shape[0]))
        self.world.run(batch)

    def run_whole(self, batch: Any) -> None:
        self.runs.append(("whole", batch.input_ids.shape[0]))
        self.world.run(batch)
