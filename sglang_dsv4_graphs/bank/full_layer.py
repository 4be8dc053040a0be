"""The full-layer bank: every layer before the tail, at the step's full width.

Without decoder SWA bounded replay there is no tail and the bank spans every layer.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from sglang_dsv4_graphs.bank.bank import Bank, RangeOutputs
from sglang_dsv4_graphs.bank.buckets import full_layer_buckets
from sglang_dsv4_graphs.bank.decide import RETIRED, rows_reason
from sglang_dsv4_graphs.bank.guard import MovedBufferError
from sglang_dsv4_graphs.bank.layer_range import RangeInputs
from sglang_dsv4_graphs.bank.served import ServedModel, Step
from sglang_dsv4_graphs.bank.shadow import Shadow
from sglang_dsv4_graphs.bank.sweep import Startup
from sglang_dsv4_graphs.bank.views import Takeover
from sglang_dsv4_graphs.extend import hookimpl

NAME = "full-layer"


class FullLayerBank:
    """Registered with the plugin manager; keeps one bank per served model."""

    def __init__(self) -> None:
        self._banks: WeakKeyDictionary[ServedModel, Bank] = WeakKeyDictionary()
        self._shadows: WeakKeyDictionary[ServedModel, Shadow] = WeakKeyDictionary()
        self._overrides: WeakKeyDictionary[ServedModel, dict[str, Any]] = WeakKeyDictionary()

    def bank(self, served: ServedModel) -> Bank | None:
        """The captured bank of ``served``, or None."""
        return self._banks.get(served)

    @hookimpl
    def dsv4_graphs_startup(self, startup: Startup) -> None:
        served = startup.served
        buckets = full_layer_buckets(
            served.settings.full_layer_max_tokens, startup.chunk_size, startup.dummies.most_rows
        )
        if not buckets:
            return
        model = served.model
        last = model.end_layer if model.late_layer_start is None else model.late_layer_start
        captured = tuple(i for i in startup.captured_layers if i < last)
        bank = startup.make_bank(NAME, model.start_layer, last, buckets, captured)
        self._banks[served] = bank
        self._shadows[served] = Shadow(served.settings.shadow, served)
        self._overrides[served] = range_overrides(model, bank)
        startup.capture_all(bank, lambda rows: startup.dummies.batch(rows))

    @hookimpl
    def dsv4_graphs_step(self, step: Step) -> Takeover | None:
        served = step.served
        bank = self._banks.get(served)
        if bank is None:
            return None
        rows = step.facts.rows
        bucket = bank.bucket_for(rows)
        if bucket is None:
            served.count_fallback(NAME, RETIRED if bank.retired else rows_reason(rows), rows)
            return None
        try:
            bank.check(bucket)
        except MovedBufferError as moved:
            served.moved(bank, moved)
            served.count_fallback(NAME, RETIRED, rows)
            return None
        return self._takeover(step, bank, bucket)

    def _takeover(self, step: Step, bank: Bank, bucket: int) -> Takeover:
        served, shadow = step.served, self._shadows[step.served]
        first, last = bank.layers.first, bank.layers.last

        def run(state: Any, positions: Any, input_ids: Any, batch: Any) -> Any:
            live = RangeInputs(state.residual, None, positions, input_ids)
            outputs = bank.replay(bucket, live, batch)
            if shadow.wanted(batch):
                outputs = shadow.compare(bank, bucket, live, batch, outputs)
            served.replays[NAME, bucket] += 1
            state.release()
            return leave_range(step, bank, outputs)

        return Takeover(first, last, run, self._overrides[served])

    @hookimpl
    def dsv4_graphs_shutdown(self) -> None:
        for bank in self._banks.values():
            bank.retire("shut down")
        self._banks.clear()


def range_overrides(model: Any, bank: Bank) -> dict[str, Any]:
    """What of the model a bank replaces in a step beside its layers."""
    first, last = bank.layers.first, bank.layers.last
    overrides: dict[str, Any] = {}
    hashed = [i for i, layer in enumerate(model.layers) if getattr(layer, "engram", None) is not None]
    if hashed and all(first <= i < last for i in hashed):
        # The graph's own break hashes; hashing before it too would commit the history twice.
        overrides["engram_hasher"] = None
    if model.dspark_layers_to_capture is not None:
        overrides["dspark_layers_to_capture"] = [
            i for i in model.dspark_layers_to_capture if not first <= i < last
        ]
    return overrides


def leave_range(step: Step, bank: Bank, outputs: RangeOutputs) -> Any:
    """The state after a range, its captured layers' hidden states handed to the step's packer."""
    if outputs.aux is not None and step.capture_dspark:
        step.served.engine.collect_aux(
            step.packer, outputs.aux, len(bank.captured_layers), tail_of(step) if bank.name == NAME else None
        )
    if bank.layers.last == step.served.model.end_layer and tail_of(step) is None:
        # These rows leave the step: the next replay must not write over them.
        outputs = outputs.cloned()
    return step.served.engine.HcState(outputs.residual, outputs.pre)


def tail_of(step: Step) -> Any:
    """The step's late-layer tail, or None without bounded replay."""
    if step.served.model.late_layer_start is None:
        return None
    return step.served.engine.get_attn_backend().tail_forward_metadata.late_layer_tail
