"""The full-layer bank: every layer before the tail, at the step's full width.

Without decoder SWA bounded replay there is no tail and the bank spans every layer.
"""

from __future__ import annotations

from typing import Any

from sglang_dsv4_graphs.bank.bank import Bank
from sglang_dsv4_graphs.bank.buckets import full_layer_buckets
from sglang_dsv4_graphs.bank.layer_range import RangeOutputs
from sglang_dsv4_graphs.bank.range_bank import RangeBank
from sglang_dsv4_graphs.bank.served import Step
from sglang_dsv4_graphs.bank.sweep import Startup
from sglang_dsv4_graphs.bank.views import Takeover
from sglang_dsv4_graphs.extend import hookimpl

NAME = "full-layer"


class FullLayerBank(RangeBank):
    """Replays the full-width layers of ordinary extend steps."""

    name = NAME

    @hookimpl
    def dsv4_graphs_startup(self, startup: Startup) -> None:
        served, model = startup.served, startup.served.model
        cap = served.settings.full_layer_max_tokens
        # No bucket above the largest step: none would replay it, and no workspace has grown to it.
        limit = min(startup.dummies.most_rows, startup.largest_step)
        buckets = full_layer_buckets(cap, startup.chunk_size, limit)
        if not buckets:
            return
        last = model.end_layer if model.late_layer_start is None else model.late_layer_start
        bank = startup.make_bank(NAME, model.start_layer, last, buckets)
        startup.capture_all(bank, startup.dummies.batch, trim=cap < 0)
        self.keep(served, bank, {})

    @hookimpl
    def dsv4_graphs_step(self, step: Step) -> Takeover | None:
        bank = self.bank(step.served)
        if bank is None:
            return None
        bucket = self.usable_bucket(step.served, bank, step.facts.rows, step.facts.requests)
        return None if bucket is None else self.takeover(step, bank, bucket)

    def leave(self, step: Step, bank: Bank, outputs: RangeOutputs) -> Any:
        if bank.layers.last == step.served.model.end_layer:
            # These rows leave the step: the next replay must not write over them.
            outputs = outputs.cloned()
        return super().leave(step, bank, outputs)

    def narrows_to(self, step: Step) -> Any:
        return step.tail
