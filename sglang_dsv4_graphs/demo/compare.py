"""Runs every replayed range of the demo a second time, eagerly, on the same padded rows.

An ordinary extension of the plugin: it supplies the graph backend, and wraps the hook in which banks take steps, so
that the decisions and the replays are the plugin's own. The eager run sees the memory that the replay saw: the KV
pool, what earlier layers published, and all that the bank owns, padding rows included, are put back before it. What
is compared is what the step goes on with, the whole KV pool, and what layers publish. The step then goes on with what
the replay left.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_dsv4_graphs.bank.backend import GraphBackend
from sglang_dsv4_graphs.bank.bank import Bank
from sglang_dsv4_graphs.bank.layer_range import RangeInputs, RangeOutputs
from sglang_dsv4_graphs.bank.served import Step
from sglang_dsv4_graphs.bank.shadow import largest_difference
from sglang_dsv4_graphs.bank.sweep import Startup
from sglang_dsv4_graphs.bank.views import Takeover
from sglang_dsv4_graphs.cpu_engine import CpuRunner
from sglang_dsv4_graphs.demo.layer_calls import LayerCalls
from sglang_dsv4_graphs.extend import hookimpl


@dataclass(frozen=True)
class Memory:
    """Clones of what a range reads and writes: the KV pool, what layers publish to later ones, the bank's own."""

    pool: dict[str, torch.Tensor]
    published: dict[str, torch.Tensor]
    owned: list[torch.Tensor]

    @property
    def kept(self) -> dict[str, torch.Tensor]:
        """What later steps may read: not the windows' padding slot 0, which takes the K of padding rows."""
        pool = {name: t[1:] if name.startswith("swa.") else t for name, t in self.pool.items()}
        return pool | self.published


class Referee:
    """Compares replays with eager runs once ``watching``; ``take()`` gives the differences since it was last called.

    Startup is not watched: its dummy rows all write to the padding slot and read it back, in whatever order.
    """

    def __init__(self, backend: GraphBackend, runner: CpuRunner, calls: LayerCalls) -> None:
        self.banks: list[Bank] = []
        self.watching = False
        self._backend = backend
        self._runner = runner
        self._calls = calls
        self._differences: dict[str, float] = {}

    def take(self) -> dict[str, float]:
        """The largest difference per bank, of those that replayed."""
        taken, self._differences = self._differences, {}
        return taken

    @hookimpl
    def dsv4_graphs_backend(self, device: str) -> GraphBackend | None:
        return self._backend if device == "cpu" else None

    @hookimpl
    def dsv4_graphs_startup(self, startup: Startup) -> None:
        # The list itself: banks join it while the sweep goes on.
        self.banks = startup.banks

    @hookimpl(wrapper=True)
    def dsv4_graphs_step(self, step: Step) -> Generator[None, list[Takeover | None], list[Takeover | None]]:
        takeovers = yield
        return [self._watched(t, step) for t in takeovers]

    def _watched(self, takeover: Takeover | None, step: Step) -> Takeover | None:
        if not self.watching or takeover is None or takeover.run is None:
            return takeover
        ranges = {(b.layers.first, b.layers.last): b for b in self.banks}
        bank = ranges.get((takeover.first, takeover.last))
        if bank is None:
            return takeover
        replay, has_pre = takeover.run, bank.layers.first > step.served.model.start_layer

        def run(state: Any, positions: Any, input_ids: Any, batch: Any) -> Any:
            # Clones: the replay releases the state, and its rows may lie where the replay writes.
            pre = state.pre.clone() if has_pre else None
            live = RangeInputs(state.residual.clone(), pre, positions, input_ids)
            before = self._memory(bank)
            left = replay(state, positions, input_ids, batch)
            replayed, after = RangeOutputs(left.residual, left.pre).cloned(), self._memory(bank)
            self._put_back(bank, before)
            with self._calls.paused():
                eager = bank.run_eagerly(bank.bucket_for(live.rows) or 0, live, batch)
            worst = max(largest_difference(replayed, eager), largest_of(after.kept, self._memory(bank).kept))
            self._differences[bank.name] = max(worst, self._differences.get(bank.name, 0.0))
            self._put_back(bank, after)
            return left

        return replace(takeover, run=run)

    def _memory(self, bank: Bank) -> Memory:
        return Memory(
            self._runner.token_to_kv_pool.state(),
            {f"ratio {ratio}": selected.clone() for ratio, selected in self._selections().items()},
            [t.clone() for t in bank.owned_tensors()],
        )

    def _put_back(self, bank: Bank, memory: Memory) -> None:
        self._runner.token_to_kv_pool.load_state(memory.pool)
        for ratio, selected in self._selections().items():
            selected.copy_(memory.published[f"ratio {ratio}"])
        for tensor, saved in zip(bank.owned_tensors(), memory.owned, strict=True):
            tensor.copy_(saved)

    def _selections(self) -> dict[int, torch.Tensor]:
        """Per ratio, the rows that an index source chose; a later one in a range writes over an earlier one's."""
        metadata = self._runner.attn_backend.forward_metadata
        return {} if metadata is None else metadata.core_attn_metadata.selection


def largest_of(replayed: dict[str, torch.Tensor], eager: dict[str, torch.Tensor]) -> float:
    """The largest difference of tensors of the same name."""
    return max(
        largest_difference(RangeOutputs(tensor, None), RangeOutputs(eager[name], None))
        for name, tensor in replayed.items()
    )
