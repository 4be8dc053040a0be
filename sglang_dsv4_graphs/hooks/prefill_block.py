"""Late layers of 0.5.22's prefill-graph steps: one eager break that this module puts into the engine's capture.

0.5.22 captures the late layers of such a step on a block of rows, one per token of the shape (up to 128 per request
that the server may hold), whatever the step's tail is. Here the captured loop meets a break where they begin. It
switches the attention backend from the block onto the live tail's exact rows, replays the decoder-replay bank (or runs
the layers eagerly, while the engine captures and where there is no bucket), and hands the rows back first in the block;
the rest of it keeps what an earlier step left, and the engine drops it.

0.5.23 has such a break (``prefill_graph``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from sglang_dsv4_graphs.bank.engram import has_engram
from sglang_dsv4_graphs.bank.layer_range import LayerRange, RangeInputs
from sglang_dsv4_graphs.bank.served import ServedModel, Step
from sglang_dsv4_graphs.bank.views import Takeover
from sglang_dsv4_graphs.engine import Engine

Rows = list[Any]


class TailBank(Protocol):
    """What the break needs of the decoder-replay bank."""

    def in_charge(self, served: ServedModel) -> bool: ...

    def run_tail(
        self, served: ServedModel, state: Any, positions: Any, input_ids: Any, batch: Any
    ) -> tuple[Any, Any, list[Any]] | None: ...


class PrefillGraphBlock:
    """Takes the late layers over in the loop that the engine captures."""

    def __init__(self, engine: Engine, bank: TailBank) -> None:
        self._engine = engine
        self._bank = bank
        self._break: Callable[..., Any] | None = None
        # Per number of collected layers, newest first: what captured graphs read after the break. Older, smaller sets
        # stay for the graphs that hold their addresses.
        self._bridges: dict[int, list[Rows]] = {}

    def takeovers(self, step: Step) -> list[Takeover]:
        """The late layers of ``step``, if the loop runs inside a prefill graph's capture (or its warm-up)."""
        served, model = step.served, step.served.model
        if not self._engine.in_breakable() or model.late_layer_start is None or not served.may_replay_tails:
            return []
        if not step.batch.forward_mode.is_extend_without_speculative():
            return []
        first, last = model.late_layer_start, model.end_layer
        if step.tail.scatter_indices is None or has_engram(model, first, last):
            return []
        wanted = model.dspark_layers_to_capture if step.capture_dspark else ()
        captured = tuple(i for i in wanted or () if first <= i < last)

        def run(state: Any, positions: Any, input_ids: Any, batch: Any) -> Any:
            bridge = self._run_break(served, captured, state, positions, input_ids)
            state.release()
            if captured:
                self._engine.collect_aux(step.packer, bridge[2], len(captured), None)
            return self._engine.HcState(bridge[0], bridge[1])

        return [Takeover(first, last, run)]

    def _run_break(self, served: ServedModel, captured: tuple[int, ...], state: Any, positions: Any, ids: Any) -> Rows:
        if self._break is None:
            self._break = self._engine.eager_on_graph(self._late_layers)
        block = positions.shape[0]
        bridge = self._bridge(len(captured), block)
        # A capture holds the bridge that it is given: the warm-up before it has made one of this size.
        self._break(served, captured, block, bridge, state.residual, state.pre, positions, ids)
        return bridge or self._bridge(len(captured), block) or []

    def _bridge(self, captures: int, block: int) -> Rows | None:
        sets = self._bridges.get(captures)
        if not sets or sets[0][0].shape[0] < block:
            return None
        return [t[:block] for t in sets[0]]

    def _late_layers(
        self,
        served: ServedModel,
        captured: tuple[int, ...],
        block: int,
        bridge: Rows | None,
        residual: Any,
        pre: Any,
        positions: Any,
        input_ids: Any,
    ) -> None:
        """The break: tail rows of the live step, first in ``residual`` and its like, through the late layers."""
        engine = self._engine
        late = list(served.model.layers)[served.model.late_layer_start :]
        with (
            _no_capture(engine),
            every_block_a_candidate(engine.get_attn_backend(), late),
            _live_tail(engine, engine.get_break_context().forward_batch) as (batch, tail),
        ):
            rows = tail.token_indices.shape[0]
            live = RangeInputs(residual[:rows], pre[:rows], positions[:rows], input_ids[:rows])
            outputs = self._run(served, captured, live, batch)
        if bridge is None:
            bridge = [t.new_zeros((block, *t.shape[1:])) for t in outputs]
            self._bridges.setdefault(len(captured), []).insert(0, bridge)
        for buffer, t in zip(bridge, outputs, strict=True):
            buffer[:rows].copy_(t)

    def _run(self, served: ServedModel, captured: tuple[int, ...], live: RangeInputs, batch: Any) -> Rows:
        """Residual streams, pre-mix and, with ``captured``, their packed hidden states."""
        engine, model = self._engine, served.model
        if served.ready and self._bank.in_charge(served):
            state = engine.HcState(live.residual, live.pre)
            done = self._bank.run_tail(served, state, live.positions, live.input_ids, batch)
            if done is not None:
                out, out_pre, aux = done
                packer = engine.new_packer(len(captured))
                packer.extend(aux)
                return [out, out_pre, *([engine.packed(packer)] if captured else [])]
        layers = LayerRange(engine, model, served.plain_loop, model.late_layer_start, model.end_layer)  # type: ignore[arg-type]
        with layers.replay_scope(batch):
            return layers.body(live, batch, captured)


@contextmanager
def _no_capture(engine: Engine) -> Iterator[None]:
    """Breaks in here are plain calls, also while the engine captures around us."""
    token = engine.current_capture_var.set(None)
    try:
        yield
    finally:
        engine.current_capture_var.reset(token)


@contextmanager
def every_block_a_candidate(backend: Any, layers: list[Any]) -> Iterator[None]:
    """Let the indexers of ``layers`` score every block, where the sources before them published no candidates.

    On Blackwell those run inside the captured segments, for contexts so short that every block is a candidate; an
    indexer that looks for a published selection would find none, or an older step's.
    """
    found = [getattr(getattr(layer, "self_attn", None), "indexer", None) for layer in layers]
    captured = bool(getattr(backend, "low_ratio_prefill_graph", False))
    indexers = [i for i in found if i is not None] if captured else []
    saved = [(i.uses_candidates, i.is_candidate_source) for i in indexers]
    for indexer in indexers:
        indexer.uses_candidates = indexer.is_candidate_source = False
    try:
        yield
    finally:
        for indexer, (uses, source) in zip(indexers, saved, strict=True):
            indexer.uses_candidates, indexer.is_candidate_source = uses, source


@contextmanager
def _live_tail(engine: Engine, graph_batch: Any) -> Iterator[tuple[Any, Any]]:
    """The attention backend on the exact rows of the step's tail; gives the batch cut to them, and the tail.

    The engine's own break before this one has switched onto the block: what it saved is the whole step's metadata.
    """
    backend = engine.get_attn_backend()
    block, held = backend.forward_metadata, backend.tail_forward_metadata
    whole = backend.prefill_graph_late_layer_saved[0]
    batch = _unpadded(graph_batch)
    exact = backend._build_late_layer_tail_metadata(batch)
    # The whole step's selections are padded to the shape: a slice to its end would take the padding along.
    exact.late_layer_tail = engine.replace_fields(exact.late_layer_tail, contiguous_start=None)
    # What candidate sources before the tail published of these rows is on the block.
    exact.candidate_metadata = block.candidate_metadata
    backend.forward_metadata, backend.tail_forward_metadata = whole, exact
    saved = backend.enter_late_layer_tail(batch)
    batch.global_num_token_non_padded_cpu = exact.late_layer_tail.token_indices.shape[0]
    try:
        yield batch, exact.late_layer_tail
    finally:
        backend.exit_late_layer_tail(saved, batch)
        backend.forward_metadata, backend.tail_forward_metadata = block, held


def _unpadded(graph_batch: Any) -> Any:
    """A copy of the batch with its token rows cut to the live ones; its requests are not padded."""
    batch = copy.copy(graph_batch)
    tokens = int(sum(batch.extend_seq_lens_cpu))
    for name in ("positions", "out_cache_loc", "input_ids"):
        setattr(batch, name, getattr(batch, name)[:tokens])
    return batch
