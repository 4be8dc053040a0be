"""The decoder-replay bank: the late layers, on the rows of the tail.

Under decoder SWA bounded replay the layers from ``late_layer_start`` on run over each request's last 128 rows
only. The engine's loop writes the source KV of every row, switches the attention backend to the tail and narrows
the state before it reaches these layers; the bank then runs them on the tail's rows. Engine 0.5.23 has graphs of
its own for them, captured inside the first requests; with this bank they are never captured, because ours serve
the step from the first request on (compared in docs/performance.md).
"""

from __future__ import annotations

from typing import Any

from sglang_dsv4_graphs.bank.bank import Bank
from sglang_dsv4_graphs.bank.buckets import DECODER_REPLAY_STEP, decoder_replay_buckets
from sglang_dsv4_graphs.bank.decide import OTHER_ROWS
from sglang_dsv4_graphs.bank.engine_tail import open_engine_tail
from sglang_dsv4_graphs.bank.engram import has_engram, staged_by_scheduler
from sglang_dsv4_graphs.bank.layer_range import RangeInputs, RangeOutputs
from sglang_dsv4_graphs.bank.range_bank import RangeBank
from sglang_dsv4_graphs.bank.served import ServedModel, Step
from sglang_dsv4_graphs.bank.sweep import Startup
from sglang_dsv4_graphs.bank.views import Takeover
from sglang_dsv4_graphs.extend import hookimpl

NAME = "decoder-replay"
# The engine's own tail graphs stay out of a step that this bank could serve: nothing is captured twice.
_ENGINE_TAIL_OFF = {"decoder_replay_tail": None}


class DecoderReplayBank(RangeBank):
    """Replays the late layers of ordinary extend steps, and of prefill-graph steps from within their break."""

    name = NAME

    @hookimpl
    def dsv4_graphs_startup(self, startup: Startup) -> None:
        served, model = startup.served, startup.served.model
        if model.late_layer_start is None:
            return
        buckets = decoder_replay_buckets(served.settings.decoder_replay_max_rows, startup.largest_tail)
        if not buckets:
            return
        first, last = model.late_layer_start, model.end_layer
        if staged_by_scheduler(model, first, last):
            served.log.info("skipped", bank=NAME, reason="Engram rows of late layers are staged by the scheduler")
            return
        # A prefill graph that collects hidden states holds those of its early layers across the break in which this
        # bank replays; nothing else of it is alive there (docs/notes/prefill-graph.md).
        collects = any(i < first for i in model.dspark_layers_to_capture or ())
        apart = collects and served.engine.captures_prefill()
        bank = startup.make_bank(NAME, first, last, buckets, apart=apart)
        startup.capture_all(bank, lambda rows: startup.dummies.batch(rows, DECODER_REPLAY_STEP))
        if bank.buckets:
            open_engine_tail(startup)
        self.keep(served, bank, _ENGINE_TAIL_OFF)

    @hookimpl
    def dsv4_graphs_step(self, step: Step) -> Takeover | None:
        bank = self.bank(step.served)
        tail = None if bank is None else step.tail
        if bank is None or tail is None:
            return None
        bucket = self.usable_bucket(step.served, bank, tail.positions.shape[0])
        if bucket is not None:
            return self.takeover(step, bank, bucket)
        model = step.served.model
        # The engine's graphs serve where ours never will, unless they cannot: they take no Engram.
        if bank.buckets or has_engram(model, model.late_layer_start, model.end_layer):
            return Takeover.of_nothing(**_ENGINE_TAIL_OFF)
        return None

    def leave(self, step: Step, bank: Bank, outputs: RangeOutputs) -> Any:
        if step.capture_dspark:
            # With a DSpark draft the engine scatters nothing: these rows leave the step.
            outputs = outputs.cloned()
        return super().leave(step, bank, outputs)

    def in_charge(self, served: ServedModel) -> bool:
        """Whether late layers of ``served`` are this bank's, also where they have no bucket."""
        bank = self.bank(served)
        return bank is not None and bool(bank.buckets)

    def run_tail(
        self, served: ServedModel, state: Any, positions: Any, input_ids: Any, batch: Any
    ) -> tuple[Any, Any, list[Any]] | None:
        """Run the late layers inside a prefill-graph break; None if they have no bucket or must run eagerly.

        Returns residual streams, pre-mix and captured hidden states, one per captured layer; views valid until
        the next replay.
        """
        bank = self._banks[served]
        reason = served.reason_inside_prefill_graph(batch, positions.shape[0])
        if reason is not None:
            served.count_fallback(NAME, reason, positions.shape[0])
            return None
        bucket = self.usable_bucket(served, bank, positions.shape[0])
        if bucket is None:
            return None
        live = RangeInputs(state.residual, state.pre, positions, input_ids)
        if not bank.takes(live):
            served.count_fallback(NAME, OTHER_ROWS, live.rows)
            return None
        outputs = self.replay(served, bank, bucket, live, batch)
        aux = [] if outputs.aux is None else list(outputs.aux.chunk(len(bank.captured_layers), dim=-1))
        return outputs.residual, outputs.pre, aux
