"""Dummy steps that reach a bank's range with real rows; what happens to them there is the caller's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from sglang_dsv4_graphs.bank.bank import Bank
from sglang_dsv4_graphs.bank.layer_range import RangeInputs, RangeOutputs
from sglang_dsv4_graphs.bank.served import ServedModel, Step
from sglang_dsv4_graphs.bank.views import Takeover

# What happens to a bank's rows in a dummy step: (live rows, batch) -> outputs.
Visit = Callable[[RangeInputs, Any], RangeOutputs]


def replays_before(bank: Bank, banks: Iterable[Bank], rows: int) -> list[tuple[Bank, int]]:
    """Which of ``banks`` can replay ``rows`` rows of a step that is to reach ``bank``'s range, and in which bucket.

    No two of them share a layer.
    """
    found: list[tuple[Bank, int]] = []
    for b in banks:
        bucket = b.bucket_for(rows)
        apart = all(b.layers.last <= t.layers.first or t.layers.last <= b.layers.first for t, _ in found)
        if bucket is not None and b.layers.last <= bank.layers.first and apart:
            found.append((b, bucket))
    return found


def visitor(
    served: ServedModel, bank: Bank, visit: Visit, replayed: Iterable[tuple[Bank, int]] = ()
) -> Callable[[Step], list[Takeover]]:
    """Takeovers of a step that runs ``visit`` in place of ``bank``'s range, and little after it.

    Layers of the banks in ``replayed`` replay in the bucket given there.
    """
    model = served.model
    overrides: dict[str, Any] = {"decoder_replay_tail": None}
    if bank.layers.last < model.end_layer and not model.dspark_layers_to_capture:
        # Nobody needs the rest of the model; with DSpark the step must collect every layer it promised.
        overrides |= {"end_layer": bank.layers.last, "late_layer_start": None}

    def takeovers(step: Step) -> list[Takeover]:
        replays = [_takeover(step, b, partial(b.replay, bucket), {}) for b, bucket in replayed]
        return [*replays, _takeover(step, bank, visit, overrides)]

    return takeovers


def _takeover(step: Step, bank: Bank, visit: Visit, overrides: dict[str, Any]) -> Takeover:
    """``visit`` in place of ``bank``'s range of ``step``."""
    served, first, last = step.served, bank.layers.first, bank.layers.last

    def run(state: Any, positions: Any, input_ids: Any, step_batch: Any) -> Any:
        outputs = visit(step.inputs(first, last, state, positions, input_ids), step_batch)
        if outputs.aux is not None:
            # Only rows of the tail go on to the draft; a late range has no others.
            late = served.model.late_layer_start
            tail = step.tail if late is not None and first < late else None
            served.engine.collect_aux(step.packer, outputs.aux, len(bank.captured_layers), tail)
        return served.engine.HcState(outputs.residual, outputs.pre)

    return Takeover(first, last, run, overrides)
