"""A bank: one graph per bucket of rows, all of one layer range.

Padding a step to the next bucket lets a handful of graphs serve every row count. The bank owns what its graphs
read and write (static rows, counts, the capture step's batch and metadata, the padded query buffer) for as long
as the graphs live, and it refuses to replay when something it does not own has moved.

Does not decide whether a step replays (``decide``), and does not know when to capture (``sweep``).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sglang_dsv4_graphs.bank.backend import GraphBackend, Recording
from sglang_dsv4_graphs.bank.buckets import bucket_for
from sglang_dsv4_graphs.bank.copy_in import Rows, copy_in
from sglang_dsv4_graphs.bank.counts import RowCounts
from sglang_dsv4_graphs.bank.guard import Addresses, AddressGuard, MovedBufferError
from sglang_dsv4_graphs.bank.layer_range import LayerRange, RangeInputs, RangeOutputs
from sglang_dsv4_graphs.bank.query_pad import QueryPad
from sglang_dsv4_graphs.bank.statics import StaticRows
from sglang_dsv4_graphs.bank.trial import SEVERAL
from sglang_dsv4_graphs.breaks.shared import StepShared

# (real rows, bucket rows, sharded) -> rows of this rank's shard
LocalRows = Callable[[int, int, bool], int]


@dataclass(frozen=True)
class CaptureStats:
    """What one captured bucket cost."""

    rows: int
    segments: int
    seconds: float
    bytes: int


@dataclass
class _Captured:
    recording: Recording
    addresses: Addresses
    stats: CaptureStats
    query_pad: torch.Tensor | None
    # Never read: what the graph's kernels read by address must live as long as it.
    owned: tuple[Any, ...]


class Bank:
    """Captured graphs of one range, by bucket."""

    def __init__(
        self,
        *,
        name: str,
        layers: LayerRange,
        buckets: tuple[int, ...],
        backend: GraphBackend,
        guard: AddressGuard,
        local_rows: LocalRows,
        captured_layers: tuple[int, ...] = (),
        free_bytes: Callable[[], int] = lambda: 0,
        synchronize: Callable[[], None] = lambda: None,
        debug: bool = False,
        lean: bool = True,
        store_in_graph: bool = False,
    ) -> None:
        self.name = name
        self.layers = layers
        self.planned = buckets
        self.captured_layers = captured_layers
        self.guard = guard
        self.retired: str | None = None
        # The largest bucket that pays for a step of fewer than ``SEVERAL`` requests; None: every one does.
        self.largest_for_few: int | None = None
        self._backend = backend
        self._local_rows = local_rows
        self._free_bytes = free_bytes
        self._synchronize = synchronize
        self._debug = debug
        self._lean = lean
        self._store_in_graph = store_in_graph
        # Window slots that captured K stores write to; rows past a step's own go to the padding slot 0.
        self._slots: torch.Tensor | None = None
        self._statics = StaticRows(max(buckets, default=0))
        self._counts: RowCounts | None = None
        self._query_pad = QueryPad()
        self._captured: dict[int, _Captured] = {}
        self._buckets: tuple[int, ...] = ()

    @property
    def buckets(self) -> tuple[int, ...]:
        """Captured buckets, ascending; empty once retired."""
        return self._buckets

    @property
    def stats(self) -> list[CaptureStats]:
        return [self._captured[rows].stats for rows in self._buckets]

    @property
    def static_bytes(self) -> int:
        return self._statics.nbytes

    def owned_tensors(self) -> list[torch.Tensor]:
        """Everything the graphs read that the bank keeps: what poison tests must leave alone."""
        counts = [] if self._counts is None else self._counts.tensors
        # One per storage: smaller buckets read a part of the largest's.
        pads = [c.query_pad for c in self._captured.values() if c.query_pad is not None]
        pad = {t.untyped_storage().data_ptr(): t for t in sorted(pads, key=len)}.values()
        slots = [] if self._slots is None else [self._slots]
        return [*self._statics.tensors, *counts, *pad, *slots]

    def recording(self, bucket: int) -> Recording:
        return self._captured[bucket].recording

    def bucket_for(self, rows: int) -> int | None:
        return bucket_for(rows, self._buckets)

    def pays(self, bucket: int, requests: int) -> bool:
        """Whether a step of ``requests`` requests is faster in ``bucket`` than run eagerly."""
        return self.largest_for_few is None or bucket <= self.largest_for_few or requests >= SEVERAL

    def takes(self, live: RangeInputs) -> bool:
        """Whether ``live`` are rows of the type that was captured; any others must run eagerly."""
        return self._statics.takes(live.tensors())

    def check(self, bucket: int, *, everything: bool = False) -> None:
        """Raise ``MovedBufferError`` if a buffer that ``bucket``'s graph reads has moved."""
        self.guard.check(self._captured[bucket].addresses, bank=self.name, bucket=bucket, everything=everything)

    def moved(self, bucket: int) -> MovedBufferError | None:
        """What ``check`` raises, for a decision that all ranks take together."""
        try:
            self.check(bucket)
        except MovedBufferError as e:
            return e
        return None

    def end_ladder(self, largest: int) -> None:
        """Plan no bucket above ``largest``, and no rows for one; before the first capture."""
        self.planned = tuple(b for b in self.planned if b <= largest)
        self._statics = StaticRows(max(self.planned, default=0))

    def drop(self, bucket: int) -> None:
        """Forget one bucket's graph; its steps run eagerly from now on."""
        self._captured.pop(bucket, None)
        self._buckets = tuple(sorted(self._captured))
        self._backend.settle()

    def drop_for_several(self) -> list[int]:
        """Forget, and plan no more, the buckets that pay for steps of several requests alone; returns them."""
        gone = [b for b in self.planned if not self.pays(b, 1)]
        self.planned = tuple(b for b in self.planned if b not in gone)
        self.largest_for_few = None
        for bucket in gone:
            self.drop(bucket)
        return gone

    def retire(self, reason: str) -> None:
        """Drop every graph for good, and free what the bank owns for them; waits for a replay in flight.

        What earlier replays returned stays readable as long as its holder keeps it.
        """
        self.retired = reason
        self._buckets = ()
        if self._captured:
            self._synchronize()
        self._captured.clear()
        self._statics = StaticRows(0)
        self._counts = self._slots = None
        self._query_pad = QueryPad()
        self._backend.settle()

    def capture(self, bucket: int, live: RangeInputs, batch: Any, metadata: Any) -> CaptureStats:
        """Record ``bucket``'s graph from a dummy step of exactly ``bucket`` rows.

        ``metadata`` is the attention metadata in use; it may hold the padded query buffer.

        Raises:
            CaptureError: the graph could not be recorded; nothing of it is kept.
        """
        start, free = time.perf_counter(), self._free_bytes()
        self._statics.allocate(live.tensors())
        self._statics.copy_in(live.tensors())
        batch = self._own_batch(batch, bucket, bucket)
        self._query_pad.lend(metadata, bucket)
        copy_in(self._slot_parts(batch, bucket, bucket))
        with self.layers.capture_scope(batch), self.layers.storing_into(self._slots):
            recording = self._backend.record(self._body(live, bucket, batch), warmups=1)
        pad = self._query_pad.take(metadata)
        stats = CaptureStats(bucket, recording.segments, time.perf_counter() - start, max(0, free - self._free_bytes()))
        owned = (batch, dict(vars(batch)), metadata)
        self._captured[bucket] = _Captured(recording, self.guard.addresses(), stats, pad, owned)
        self._buckets = tuple(sorted(self._captured))
        return stats

    def outputs(self, bucket: int, rows: int) -> RangeOutputs:
        """The first ``rows`` rows of what ``bucket``'s last replay (or its capture) left."""
        return RangeOutputs.of(self._captured[bucket].recording.outputs, rows)

    def replay(self, bucket: int, live: RangeInputs, batch: Any) -> RangeOutputs:
        """Run ``bucket``'s graph on a step's rows (at most ``bucket``); ``check`` comes before."""
        captured = self._captured[bucket]
        step, counts = self._bound_batch(batch, live.rows, bucket)
        parts = self._statics.parts(live.tensors())
        with self.layers.replay_scope(step), self.layers.sharing(StepShared() if self._lean else None):
            self.copy_in([*parts, *self._slot_parts(step, live.rows, bucket)], counts)
            captured.recording.replay_debug() if self._debug else captured.recording.replay()
        return self.outputs(bucket, live.rows)

    def copy_in(self, parts: list[Rows], counts: Any) -> None:
        """A step's rows, slots and counts to where the graphs read them; of its own, so that it can be timed."""
        copy_in(parts, *counts)

    def run_eagerly(self, bucket: int, live: RangeInputs, batch: Any) -> RangeOutputs:
        """The same padded rows without the graph: the reference a replay must equal bit for bit.

        Repeats the step's KV writes, so it must see the cache state that the replay saw.
        """
        self._statics.copy_in(live.tensors())
        step = self._own_batch(batch, live.rows, bucket)
        with self.layers.capture_scope(step):
            outputs = self._body(live, bucket, step)()
        return RangeOutputs.of(outputs, live.rows)

    def _body(self, live: RangeInputs, bucket: int, batch: Any) -> Callable[[], list[torch.Tensor | None]]:
        inputs = live.like(self._statics.inputs(bucket))

        def body() -> list[torch.Tensor | None]:
            outputs = self.layers.body(inputs, batch, self.captured_layers)
            return self._statics.store_outputs(outputs, bucket)

        return body

    def _slot_parts(self, batch: Any, rows: int, bucket: int) -> list[Rows]:
        """The step's window slots, to copy to where the captured stores read them."""
        if not self._store_in_graph:
            return []
        live = self.layers.window_slots(batch)
        if len(live) < rows:
            # The rest would go to the padding slot: K lost without a word.
            raise ValueError(f"bank={self.name}: {len(live)} window slots for {rows} rows")
        if self._slots is None:
            self._slots = live.new_zeros(self._statics.max_rows)
        return [Rows(self._slots, live[:rows], bucket)]

    def _own_batch(self, batch: Any, rows: int, bucket: int) -> Any:
        """A copy of the batch that carries the real row count, on the bank's own device counts."""
        step, counts = self._bound_batch(batch, rows, bucket)
        copy_in((), *counts)
        return step

    def _bound_batch(self, batch: Any, rows: int, bucket: int) -> tuple[Any, tuple[Any, ...]]:
        """The same, with the device counts (and their values) still to be written by ``copy_in``."""
        step = copy.copy(batch)
        step.global_num_token_non_padded_cpu = rows
        if batch.num_token_non_padded is None:
            return step, ()
        if self._counts is None:
            self._counts = RowCounts(batch.num_token_non_padded)
        sharded = bool(getattr(batch, "attn_tp_sequence_sharded", False))
        values = self._counts.checked(self._local_rows(rows, bucket, sharded), rows)
        self._counts.bind(step)
        return step, (self._counts.word, values)
