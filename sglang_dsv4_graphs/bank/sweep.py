"""The startup sweep: grow, capture everything, hand memory back.

Order is what makes graphs safe (docs/design.md): kernels that size cached workspaces by row count must have seen
the largest step before the first capture; larger buckets come first, so that smaller ones reuse the pool's
blocks; a capture that fails keeps those that succeeded; and under tensor parallelism all ranks keep the same set.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_dsv4_graphs.bank.backend import CaptureError, GraphBackend
from sglang_dsv4_graphs.bank.bank import Bank
from sglang_dsv4_graphs.bank.buckets import DECODER_REPLAY_STEP, UNCHUNKED_ROWS, rehearsal_rows
from sglang_dsv4_graphs.bank.capture_run import BatchOf, CaptureRun
from sglang_dsv4_graphs.bank.device import Device
from sglang_dsv4_graphs.bank.dummies import Dummies
from sglang_dsv4_graphs.bank.guard import AddressGuard
from sglang_dsv4_graphs.bank.layer_range import LayerRange
from sglang_dsv4_graphs.bank.ranks import Ranks
from sglang_dsv4_graphs.bank.report import bank_values, total_values
from sglang_dsv4_graphs.bank.room import Grown
from sglang_dsv4_graphs.bank.served import ServedModel
from sglang_dsv4_graphs.bank.trial_run import TrialRun
from sglang_dsv4_graphs.bank.views import Takeover
from sglang_dsv4_graphs.bank.visit import Visit, replays_before, visitor
from sglang_dsv4_graphs.log import RankLog, logger


class Startup:
    """One sweep over one served model; implementations of the startup hook capture through it."""

    def __init__(
        self,
        *,
        served: ServedModel,
        dummies: Dummies,
        backend: GraphBackend,
        make_guard: Callable[[int, int], AddressGuard],
        ranks: Ranks,
        device: Device,
        chunk_size: int | None,
        strict: bool,
        extra_rows: int = 0,
        max_requests: int | None = None,
        store_in_graph: bool = False,
    ) -> None:
        self.served = served
        self.dummies = dummies
        self.chunk_size = chunk_size
        self._extra_rows = extra_rows
        self._max_requests = max_requests
        self._store_in_graph = store_in_graph
        self.banks: list[Bank] = []
        self.backend = backend
        self._make_guard = make_guard
        self._guards: dict[tuple[int, int], AddressGuard] = {}
        self.ranks = ranks
        self.device = device
        self.strict = strict
        self.log: RankLog = served.log
        self._grow_seconds = 0.0
        self.grown: Grown | None = None
        self._began, self._free_before, self._free_after = 0.0, 0, 0

    @property
    def largest_step(self) -> int:
        """Tokens of the largest prefill step that can run: the chunk, or what an unchunked server may capture."""
        if self.chunk_size and self.chunk_size > 0:
            return self.chunk_size + self._extra_rows
        return max(UNCHUNKED_ROWS + self._extra_rows, self.served.settings.full_layer_max_tokens)

    @property
    def most_requests(self) -> int:
        """The most requests that one prefill step can have."""
        slots = self.dummies.most_requests
        return slots if self._max_requests is None else min(slots, self._max_requests)

    @property
    def largest_tail(self) -> int:
        """Rows of the largest tail that can run: one of each request slot, and no more than the step's tokens.

        A whole number of steps of the decoder-replay ladder, so its dummy step may be larger than any real one.
        """
        in_step = -(-self.largest_step // DECODER_REPLAY_STEP) * DECODER_REPLAY_STEP
        return min(in_step, self.dummies.most_requests * DECODER_REPLAY_STEP)

    def make_bank(self, name: str, first: int, last: int, buckets: tuple[int, ...], *, apart: bool = False) -> Bank:
        """An empty bank over layers ``[first, last)``; ``apart`` shares no memory with other graphs."""
        bank = self.new_bank(name, first, last, buckets, self.backend.apart() if apart else self.backend)
        self.banks.append(bank)
        return bank

    def new_bank(self, name: str, first: int, last: int, buckets: tuple[int, ...], backend: GraphBackend) -> Bank:
        """A bank that this sweep does not count among its own."""
        served = self.served
        if served.plain_loop is None:
            raise CaptureError("the model's layer loop was never called: grow() comes before captures")
        wanted = served.model.dspark_layers_to_capture or ()
        return Bank(
            name=name,
            layers=LayerRange(served.engine, served.model, served.plain_loop, first, last),
            buckets=buckets,
            backend=backend,
            guard=self.guard_now(first, last),
            local_rows=served.engine.local_rows,
            captured_layers=tuple(i for i in wanted if first <= i < last),
            free_bytes=self.device.free_bytes,
            synchronize=self.device.synchronize,
            debug=served.settings.debug,
            lean=served.settings.lean_breaks,
            store_in_graph=self._store_in_graph,
        )

    def guard_now(self, first: int, last: int) -> AddressGuard:
        """The address guard of layers ``[first, last)``, made when first asked for: workspaces have grown by then."""
        if (first, last) not in self._guards:
            self._guards[first, last] = self._make_guard(first, last)
        return self._guards[first, last]

    def grow(self) -> None:
        """One eager forward of the largest step, nobody capturing: every workspace reaches its final size.

        What else it held goes back to the device, whose free memory the engine may measure next.
        """
        start = time.perf_counter()
        late = self.served.model.late_layer_start is not None
        tails = min(self.largest_tail, self.served.settings.decoder_replay_max_rows) if late else 0
        rows = min(max(self.largest_step, tails), self.dummies.most_rows)
        with self.served.forced(lambda step: [Takeover.of_nothing(decoder_replay_tail=None)]):
            self.run(lambda: self.dummies.batch(rows), self.dummies.run)
        held = self.device.free_bytes()
        self.device.release()
        self.grown = Grown(rows, max(0, self.device.free_bytes() - held))
        self._grow_seconds = time.perf_counter() - start

    def run(self, build: Callable[[], Any], run: Callable[[Any], object]) -> None:
        """Run a dummy step that every rank could build: one that cannot says so before others wait in its forward."""
        batch = build()
        self.ranks.rendezvous()
        run(batch)

    def capture_all(self, bank: Bank, batch_of: BatchOf, *, trim: bool = False) -> None:
        """Capture every planned bucket, largest first, each from the dummy step ``batch_of(rows)``.

        ``trim`` ends the ladder at the largest bucket that pays on this machine.

        Raises:
            CaptureError: in strict mode, if a bucket fails.
        """
        if trim and self.device.is_cuda:
            TrialRun(self, bank, batch_of).trim()
        start, free = time.perf_counter(), self.device.free_bytes()
        CaptureRun(self, bank, batch_of).ladder()
        # What warm-ups left in the allocator's cache is not the bank's.
        self.release()
        used = free - self.device.free_bytes()
        self.log.info("captured", **bank_values(bank, seconds=time.perf_counter() - start, used=used))

    def together(self, what: str, attempt: Callable[[], None]) -> str:
        """Run ``attempt`` on all ranks; returns what went wrong on one of them, or nothing.

        Contains whatever a kernel, an allocator or the engine raises: the server must still serve.
        """
        failure = self.ranks.together(what, attempt)
        if failure is None:
            return ""
        logger.debug("%s failed: %s", what, failure, exc_info=failure.error)
        return str(failure)

    def visit(self, bank: Bank, batch: Any, visit: Visit) -> None:
        """Run a dummy step up to the end of ``bank``'s range, with ``visit`` in place of the range.

        Layers before the range replay where they can: eager ones took 2.7 of the 6.6 s of a late range's captures. All
        ranks must come here alike, as to the forward itself.
        """
        # A buffer that moved is for the first served step to report: here it only keeps the graphs out.
        replayed = replays_before(bank, self.banks, int(batch.input_ids.shape[0]))
        if replayed and self.ranks.who(any(b.moved(bucket) for b, bucket in replayed)) is not None:
            replayed = []
        with self.served.forced(visitor(self.served, bank, visit, replayed)):
            self.dummies.run(batch)

    def open(self) -> None:
        """The engine has captured its own graphs: from here on time and memory are ours."""
        # What lies in the allocator's cache is free too: releases later on would count it against what is taken.
        self.device.release()
        self._began, self._free_before = time.perf_counter(), self.device.free_bytes()

    def release(self) -> None:
        """Hand back what the captures left over; what is left of failed ones goes here."""
        self.device.release()
        self.backend.settle()
        self._free_after = self.device.free_bytes()

    def rehearse(self, stream: Any) -> None:
        """Steps of a few sizes through the served path on the stream that serves, head and logits too.

        The allocator keeps blocks per stream, and kernels are loaded when first launched: without this the first
        requests pay for both. The path is open for these steps alone; whether requests may take it is for all ranks
        to agree on.
        """
        served = self.served
        served.rehearsing = served.ready = True
        try:
            with self.device.on(stream):
                buckets = [b for bank in self.banks for b in bank.buckets if bank.pays(b, 1)]
                for rows in rehearsal_rows(buckets, self.dummies.most_rows):
                    self.run(partial(self.dummies.batch, rows), self.dummies.run_whole)
        finally:
            served.rehearsing = served.ready = False

    def abandon(self, reason: str) -> None:
        """Drop every graph and hand its memory back: this server stays eager."""
        for bank in self.banks:
            bank.retire(reason)
        self.banks.clear()
        self._guards.clear()
        # A graph that an error's frames still held goes only now.
        self.release()

    def summary(self) -> None:
        """One line for everything that was captured; seconds count growing too.

        Memory is as the captures left it: what the rehearsal's steps hold since, any request would.
        """
        seconds = self._grow_seconds + time.perf_counter() - self._began
        values = total_values(self.banks, free_before=self._free_before, free=self._free_after, seconds=seconds)
        self.log.info("captured", **values)
