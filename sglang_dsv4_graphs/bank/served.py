"""One served model: its step path, its counters, and who takes part in a step.

The engine's layer loop is wrapped; every prefill step of the model comes through here. A step in which no bank
takes part calls the engine's loop on the model itself, untouched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import pluggy
import torch

from sglang_dsv4_graphs.bank.bank import Bank
from sglang_dsv4_graphs.bank.decide import StepFacts, step_reason
from sglang_dsv4_graphs.bank.engram import StepHasher, has_engram
from sglang_dsv4_graphs.bank.guard import MovedBufferError
from sglang_dsv4_graphs.bank.layer_range import RangeInputs
from sglang_dsv4_graphs.bank.ranks import Ranks
from sglang_dsv4_graphs.bank.views import Takeover, step_view
from sglang_dsv4_graphs.engine import Engine
from sglang_dsv4_graphs.engine.facts import TAIL_ROWS_PER_REQUEST
from sglang_dsv4_graphs.log import RankLog
from sglang_dsv4_graphs.settings import Settings

Loop = Callable[..., Any]
RowTypes = tuple[tuple[torch.dtype, torch.Size] | None, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One extend step as banks see it: facts all ranks know, and the engine's batch."""

    served: ServedModel
    facts: StepFacts
    batch: Any
    capture_dspark: bool
    packer: Any
    loop: Loop
    # Of a model with Engram: has the ids once the loop has hashed, which is before the first layer.
    hasher: StepHasher | None = None

    @property
    def tail(self) -> Any:
        """The step's late-layer tail, or None without bounded replay."""
        if self.served.model.late_layer_start is None:
            return None
        return self.served.engine.get_attn_backend().tail_forward_metadata.late_layer_tail

    def inputs(self, first: int, last: int, state: Any, positions: Any, input_ids: Any) -> RangeInputs:
        """What enters layers ``[first, last)``, from what the loop gives the first of them."""
        model = self.served.model
        hash_ids = None
        if self.hasher is not None and has_engram(model, first, last):
            hash_ids = self.hasher.ids
            if first == model.late_layer_start:
                # The loop has narrowed everything else.
                hash_ids = self.tail.rows(hash_ids)
        pre = state.pre if first > model.start_layer else None
        return RangeInputs(state.residual, pre, positions, input_ids, hash_ids)


class ServedModel:
    """A ``DeepseekV4Model`` with its banks.

    ``stand_down`` is why every step runs eagerly, or None. ``fallbacks`` counts eager extend steps by (bank,
    reason), ``replays`` replayed ranges by (bank, bucket).
    """

    def __init__(
        self, engine: Engine, model: Any, settings: Settings, manager: pluggy.PluginManager, log: RankLog
    ) -> None:
        self.engine = engine
        # The engine's to keep: a model that it drops is freed, and with it this and its banks.
        self._model = ref(model)
        self.settings = settings
        self.log = log
        self.stand_down: str | None = None
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        self.replays: Counter[tuple[str, int]] = Counter()
        self.ready = False
        self._manager = manager
        self.plain_loop: Loop | None = None
        self.ranks = Ranks(0, 1)
        # A rehearsal is no request: it is not counted, compared or logged.
        self.rehearsing = False
        self._forced: Callable[[Step], list[Takeover]] | None = None
        # Type and shape of each row of the first dummy step, hence of every capture; None before.
        self._row_types: RowTypes | None = None
        # Who takes layers over in the loop that the engine captures for its prefill graph (0.5.22), or None.
        self.in_prefill_graph: Callable[[Step], list[Takeover]] | None = None

    @property
    def model(self) -> Any:
        """The model.

        Raises:
            ReferenceError: if the engine has dropped it.
        """
        model = self._model()
        if model is None:
            raise ReferenceError("the engine has dropped this model; nothing can run in its banks")
        return model

    @property
    def may_replay_tails(self) -> bool:
        """Whether the decoder-replay bank may come to serve this model; asked before startup decides."""
        parallel = self.engine.get_parallel()
        return (
            self.stand_down is None
            and self.settings.decoder_replay_max_rows >= TAIL_ROWS_PER_REQUEST
            and parallel.attn_dp_size == 1
            and parallel.attn_cp_size == 1
        )

    def run_loop(
        self,
        loop: Loop,
        positions: Any,
        hidden_states: Any,
        forward_batch: Any,
        input_ids: Any,
        input_ids_global: Any,
        capture_dspark: Any,
        packer: Any,
    ) -> Any:
        """The engine's layer loop, with whoever takes part in this step."""
        model = self.model
        self.plain_loop = loop
        args = (positions, hidden_states, forward_batch, input_ids, input_ids_global, capture_dspark, packer)
        # What passes is none of ours, unless the engine is capturing a prefill graph that we have a part in.
        capturing = self.in_prefill_graph
        if capturing is not None and (self._forced is not None or not self.engine.in_breakable()):
            capturing = None
        if capturing is None and self._passes(forward_batch):
            return loop(model, *args)
        row_types = tuple(None if t is None else (t.dtype, t.shape[1:]) for t in (hidden_states, positions, input_ids))
        if self._forced is not None and self._row_types is None:
            self._row_types = row_types
        # An input that the engine leaves out has no type to differ in.
        other_rows = any(now not in (None, was) for was, now in zip(self._row_types or (), row_types, strict=False))
        facts = self._facts(forward_batch, input_ids, input_ids_global, other_rows)
        hasher = None if capturing or model.engram_hasher is None else StepHasher(model.engram_hasher)
        step = Step(self, facts, forward_batch, bool(capture_dspark), packer, loop, hasher)
        takeovers = self.takeovers(step) if capturing is None else capturing(step)
        if takeovers:
            hashing = [] if hasher is None else [Takeover.of_nothing(engram_hasher=hasher)]
            model = step_view(model, list(model.layers), [*takeovers, *hashing], self.engine.hand_over)
        return loop(model, *args)

    def _passes(self, batch: Any) -> bool:
        """Steps that are none of ours: decode and idle steps, and everything while the engine captures."""
        if self._forced is not None:
            return False
        return (
            not self.ready
            or self.stand_down is not None
            or not batch.forward_mode.is_extend()
            or self.engine.in_capture_mode()
            or self.engine.in_breakable()
        )

    def takeovers(self, step: Step) -> list[Takeover]:
        """Who runs what in this step."""
        if self._forced is not None:
            return self._forced(step)
        reason = step_reason(step.facts)
        if reason is not None:
            self.count_fallback("all", reason, step.facts.rows)
            return []
        return self._manager.hook.dsv4_graphs_step(step=step)

    def _facts(self, batch: Any, input_ids: Any, input_ids_global: Any, other_rows: bool) -> StepFacts:
        bound = batch.moe_num_token_non_padded()
        sharded = getattr(batch, "attn_tp_sequence_sharded", False)
        owned_bound = (
            bound is None
            or bound is batch.num_token_non_padded
            or (sharded and bound is batch.global_num_token_non_padded)
        )
        return StepFacts(
            rows=input_ids.shape[0],
            requests=batch.batch_size,
            speculative=not batch.forward_mode.is_extend_without_speculative(),
            multimodal=batch.contains_mm_inputs(),
            recording_experts=bool(self.engine.expert_recorder().recording),
            context_parallel=batch.attn_cp_metadata is not None,
            separate_global_ids=input_ids_global is not input_ids,
            unbounded_moe_count=not owned_bound,
            other_rows=other_rows,
        )

    def reason_inside_prefill_graph(self, batch: Any, rows: int) -> str | None:
        """Why the late layers of a prefill-graph step run eagerly whatever their rows, or None."""
        recording = bool(self.engine.expert_recorder().recording)
        return step_reason(StepFacts(rows, multimodal=batch.contains_mm_inputs(), recording_experts=recording))

    def count_fallback(self, bank: str, reason: str, rows: int) -> None:
        """Count an eager step; the first of each reason is logged."""
        if self.rehearsing:
            return
        self.fallbacks[bank, reason] += 1
        self.log.once(("fallback", bank, reason), "fallback", bank=bank, reason=reason, rows=rows)

    def retire(self, bank: Bank, moved: MovedBufferError | None, rank: int) -> None:
        """A buffer that a bank's graphs read has moved, here or (None) on ``rank``: no rank replays it again.

        Raises:
            MovedBufferError: in strict mode, on the rank where it moved.
        """
        reason = f"a guarded buffer moved on rank {rank}" if moved is None else str(moved)
        self.log.error("moved-buffer", bank=bank.name, reason=reason)
        bank.retire(reason)
        if self.settings.strict and moved is not None:
            raise moved

    @contextmanager
    def forced(self, takeovers: Callable[[Step], list[Takeover]]) -> Iterator[None]:
        """Run steps with these takeovers whatever the banks say: captures and comparisons."""
        saved, self._forced = self._forced, takeovers
        try:
            yield
        finally:
            self._forced = saved
