"""What both banks share as implementations of the plugin's hooks: keeping banks, and taking part in a step."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from sglang_dsv4_graphs.bank.bank import Bank
from sglang_dsv4_graphs.bank.decide import NOTHING_CAPTURED, RETIRED, TOO_FEW_REQUESTS, rows_reason
from sglang_dsv4_graphs.bank.layer_range import RangeInputs, RangeOutputs
from sglang_dsv4_graphs.bank.served import ServedModel, Step
from sglang_dsv4_graphs.bank.shadow import Shadow
from sglang_dsv4_graphs.bank.views import Takeover
from sglang_dsv4_graphs.extend import hookimpl


class RangeBank:
    """One bank per served model; subclasses say which layers and which rows.

    What is kept must not lead back to the served model or its model: both would live as long as the plugin.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._banks: WeakKeyDictionary[ServedModel, Bank] = WeakKeyDictionary()
        self._shadows: WeakKeyDictionary[ServedModel, Shadow] = WeakKeyDictionary()
        self._overrides: WeakKeyDictionary[ServedModel, dict[str, Any]] = WeakKeyDictionary()

    def bank(self, served: ServedModel) -> Bank | None:
        """The captured bank of ``served``, or None."""
        return self._banks.get(served)

    def keep(self, served: ServedModel, bank: Bank, overrides: dict[str, Any]) -> None:
        """Serve steps of ``served`` from ``bank``; ``overrides`` is what it replaces beside its layers."""
        self._banks[served] = bank
        steps = served.settings.shadow
        if steps and not repeatable(served.model, bank):
            served.log.info("shadow", bank=bank.name, skipped="its layers read a selection that a second run lacks")
            steps = 0
        self._shadows[served] = Shadow(steps, served)
        self._overrides[served] = overrides

    def usable_bucket(self, served: ServedModel, bank: Bank, rows: int, requests: int = 1) -> int | None:
        """The bucket that ``rows`` of ``requests`` replay in, or None with the reason counted."""
        bucket = bank.bucket_for(rows)
        if bucket is None:
            served.count_fallback(self.name, _no_bucket_reason(bank, rows), rows)
            return None
        if not bank.pays(bucket, requests):
            served.count_fallback(self.name, TOO_FEW_REQUESTS, rows)
            return None
        moved = bank.moved(bucket)
        # An address may stay by chance on one rank where it moves on another, so each step asks all of them.
        rank = served.ranks.who(moved is not None)
        if rank is not None:
            served.retire(bank, moved, rank)
            served.count_fallback(self.name, RETIRED, rows)
            return None
        return bucket

    def takeover(self, step: Step, bank: Bank, bucket: int) -> Takeover:
        """This bank's part in ``step``."""

        def run(state: Any, positions: Any, input_ids: Any, batch: Any) -> Any:
            live = step.inputs(bank.layers.first, bank.layers.last, state, positions, input_ids)
            outputs = self.replay(step.served, bank, bucket, live, batch)
            state.release()
            return self.leave(step, bank, outputs)

        return Takeover(bank.layers.first, bank.layers.last, run, self._overrides[step.served])

    def replay(self, served: ServedModel, bank: Bank, bucket: int, live: RangeInputs, batch: Any) -> RangeOutputs:
        """Replay and count; compared with an eager run while shadow mode lasts."""
        outputs = bank.replay(bucket, live, batch)
        if served.rehearsing:
            return outputs
        shadow = self._shadows[served]
        if shadow.wanted(batch) and not _takes_its_history(served, batch):
            outputs = shadow.compare(bank, bucket, live, batch, outputs)
        served.replays[self.name, bucket] += 1
        return outputs

    def leave(self, step: Step, bank: Bank, outputs: RangeOutputs) -> Any:
        """The state after the range; its captured layers' hidden states go to the step's packer."""
        if outputs.aux is not None and step.capture_dspark:
            tail = self.narrows_to(step)
            step.served.engine.collect_aux(step.packer, outputs.aux, len(bank.captured_layers), tail)
        return step.served.engine.HcState(outputs.residual, outputs.pre)

    def narrows_to(self, step: Step) -> Any:
        """The tail whose rows the step keeps of this range's hidden states, or None."""
        return None

    def weights_changed(self) -> None:
        """The engine has changed weights: the next check of every bank compares everything."""
        for bank in list(self._banks.values()):
            bank.guard.weights_changed()

    @hookimpl
    def dsv4_graphs_shutdown(self) -> None:
        for bank in self._banks.values():
            bank.retire("shut down")
        self._banks.clear()


def _no_bucket_reason(bank: Bank, rows: int) -> str:
    if bank.retired:
        return RETIRED
    return rows_reason(rows) if bank.buckets else NOTHING_CAPTURED


def _takes_its_history(served: ServedModel, batch: Any) -> bool:
    """Whether the rows of this step lie where it has read its history from, so that a second run would read them."""
    return any(batch.extend_prefix_lens_cpu or ()) and served.engine.has_request_window()


def repeatable(model: Any, bank: Bank) -> bool:
    """Whether a second run of the range reads what the first read.

    0.5.22's late range starts behind its index source: later sources in the range overwrite the selection that its
    first layers read.
    """
    first = bank.layers.first
    return first == model.start_layer or first in (model.config.index_source_layer_ids or ())
