"""The startup sweep: grow, capture everything, hand memory back.

Order is what makes graphs safe (docs/design.md): kernels that size cached workspaces by row count must have seen
the largest step before the first capture; larger buckets come first, so that smaller ones reuse the pool's
blocks; a capture that fails keeps those that succeeded; and under tensor parallelism all ranks keep the same set.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from sglang_dsv4_graphs.bank.backend import CaptureError, GraphBackend
from sglang_dsv4_graphs.bank.bank import Bank, RangeOutputs
from sglang_dsv4_graphs.bank.buckets import UNCHUNKED_ROWS
from sglang_dsv4_graphs.bank.device import Device
from sglang_dsv4_graphs.bank.dummies import Dummies
from sglang_dsv4_graphs.bank.engram import has_engram
from sglang_dsv4_graphs.bank.guard import AddressGuard
from sglang_dsv4_graphs.bank.layer_range import LayerRange, RangeInputs
from sglang_dsv4_graphs.bank.ranks import Ranks
from sglang_dsv4_graphs.bank.report import bank_values, bucket_values, total_values
from sglang_dsv4_graphs.bank.served import ServedModel, Step
from sglang_dsv4_graphs.bank.trial import ROUNDS, Trial, largest_winner, trim_reason, worst_rows
from sglang_dsv4_graphs.bank.views import Takeover
from sglang_dsv4_graphs.engine.facts import TAIL_ROWS_PER_REQUEST
from sglang_dsv4_graphs.log import RankLog, logger

BatchOf = Callable[[int], Any]
# What happens to a bank's rows in a dummy step: (live rows, batch) -> outputs.
Visit = Callable[[RangeInputs, Any], RangeOutputs]


class Startup:
    """One sweep over one served model; implementations of the startup hook capture through it."""

    def __init__(
        self,
        *,
        served: ServedModel,
        dummies: Dummies,
        backend: GraphBackend,
        make_guard: Callable[[], AddressGuard],
        ranks: Ranks,
        device: Device,
        chunk_size: int | None,
        strict: bool,
        extra_rows: int = 0,
    ) -> None:
        self.served = served
        self.dummies = dummies
        self.chunk_size = chunk_size
        self._extra_rows = extra_rows
        self.banks: list[Bank] = []
        self._backend = backend
        self._make_guard = make_guard
        self._guard: AddressGuard | None = None
        self._ranks = ranks
        self._device = device
        self._strict = strict
        self._log: RankLog = served.log
        self._grow_seconds = 0.0
        self._began, self._free_before = 0.0, 0

    @property
    def largest_step(self) -> int:
        """Tokens of the largest prefill step this server runs or captures."""
        chunk = self.chunk_size if self.chunk_size and self.chunk_size > 0 else UNCHUNKED_ROWS
        return max(chunk + self._extra_rows, self.served.settings.full_layer_max_tokens)

    def make_bank(self, name: str, first: int, last: int, buckets: tuple[int, ...], *, apart: bool = False) -> Bank:
        """An empty bank over layers ``[first, last)``; ``apart`` shares no memory with other graphs."""
        bank = self._new_bank(name, first, last, buckets, self._backend.apart() if apart else self._backend)
        self.banks.append(bank)
        return bank

    def _new_bank(self, name: str, first: int, last: int, buckets: tuple[int, ...], backend: GraphBackend) -> Bank:
        served = self.served
        if served.plain_loop is None:
            raise CaptureError("the model's layer loop was never called: grow() comes before captures")
        wanted = served.model.dspark_layers_to_capture or ()
        return Bank(
            name=name,
            layers=LayerRange(served.engine, served.model, served.plain_loop, first, last),
            buckets=buckets,
            backend=backend,
            guard=self.guard_now(),
            local_rows=served.engine.local_rows,
            captured_layers=tuple(i for i in wanted if first <= i < last),
            free_bytes=self._device.free_bytes,
            debug=served.settings.debug,
        )

    def guard_now(self) -> AddressGuard:
        """The address guard, made once every workspace has its final size."""
        if self._guard is None:
            self._guard = self._make_guard()
        return self._guard

    def grow(self) -> None:
        """One eager forward of the largest step, nobody capturing: every workspace reaches its final size."""
        start = time.perf_counter()
        rows = min(self.largest_step, self.dummies.most_rows)
        with self.served.forced(lambda step: [Takeover.of_nothing(decoder_replay_tail=None)]):
            self.dummies.run(self.dummies.batch(rows))
        self._grow_seconds = time.perf_counter() - start

    def capture_all(self, bank: Bank, batch_of: BatchOf, *, trim: bool = False) -> None:
        """Capture every planned bucket, largest first, each from the dummy step ``batch_of(rows)``.

        ``trim`` ends the ladder at the largest bucket that pays on this machine.

        Raises:
            CaptureError: in strict mode, if a bucket fails.
        """
        if trim and self._device.is_cuda:
            self._trim(bank, batch_of)
        start, free = time.perf_counter(), self._device.free_bytes()
        order = sorted(bank.planned, reverse=True)
        for rows in tqdm(order, desc=f"Capturing {bank.name}", disable=self._quiet()):
            problems = self._ranks.gather(self._capture_one(bank, rows, batch_of))
            if any(problems):
                bank.drop(rows)
                self._failed(bank, rows, next(f"rank {r}: {p}" for r, p in enumerate(problems) if p))
                break
            self._log.debug("captured", **bucket_values(bank, rows))
        used = free - self._device.free_bytes()
        self._log.info("captured", **bank_values(bank, seconds=time.perf_counter() - start, used=used))

    def _capture_one(self, bank: Bank, rows: int, batch_of: BatchOf) -> str:
        """Capture one bucket; returns what went wrong, or nothing."""

        def capture(live: RangeInputs, batch: Any) -> RangeOutputs:
            metadata = self.served.engine.get_attn_backend().forward_metadata
            bank.capture(rows, live, batch, metadata)
            return bank.outputs(rows, rows)

        try:
            self.visit(bank, batch_of(rows), capture)
        except Exception as e:  # whatever a kernel, an allocator or the engine raises: the server must still serve
            logger.debug("capture of %s rows=%s failed", bank.name, rows, exc_info=True)
            lines = str(e).strip().splitlines()
            return f"{type(e).__name__}: {lines[0] if lines else 'no message'}"
        return ""

    def visit(self, bank: Bank, batch: Any, visit: Visit) -> None:
        """Run a dummy step up to the end of ``bank``'s range, with ``visit`` in place of the range."""
        served, model = self.served, self.served.model
        first, last = bank.layers.first, bank.layers.last
        overrides: dict[str, Any] = {"decoder_replay_tail": None}
        if last < model.end_layer and not model.dspark_layers_to_capture:
            # Nobody needs the rest of the model; with DSpark the step must collect every layer it promised.
            overrides |= {"end_layer": last, "late_layer_start": None}

        def takeovers(step: Step) -> list[Takeover]:
            def run(state: Any, positions: Any, input_ids: Any, step_batch: Any) -> Any:
                outputs = visit(step.inputs(first, last, state, positions, input_ids), step_batch)
                if outputs.aux is not None:
                    # Only rows of the tail go on to the draft; a late range has no others.
                    tail = step.tail if first == model.start_layer else None
                    served.engine.collect_aux(step.packer, outputs.aux, len(bank.captured_layers), tail)
                return served.engine.HcState(outputs.residual, outputs.pre)

            return [Takeover(first, last, run, overrides)]

        with served.forced(takeovers):
            self.dummies.run(batch)

    def _trim(self, bank: Bank, batch_of: BatchOf) -> None:
        """End the ladder where replays stop paying; every rank takes the slowest rank's word."""
        largest, trials = largest_winner(bank.planned, lambda bucket: self._try(bank, bucket, batch_of))
        for t in trials:
            self._log.debug(
                "trial", bank=bank.name, bucket=t.bucket, rows=t.rows, eager_s=t.eager, replayed_s=t.replayed
            )
        dropped = [b for b in bank.planned if b > largest]
        if dropped:
            bank.planned = tuple(b for b in bank.planned if b <= largest)
            self._log.info("trimmed", bank=bank.name, rows=f"{dropped[0]}..{dropped[-1]}", reason=trim_reason(trials))

    def _try(self, bank: Bank, bucket: int, batch_of: BatchOf) -> Trial:
        rows = worst_rows(bucket, bank.planned)
        scratch = self._new_bank(
            f"{bank.name}-trial", bank.layers.first, bank.layers.last, (bucket,), self._backend.scratch()
        )
        eager, replayed = [], []

        def race(live: RangeInputs, batch: Any) -> RangeOutputs:
            for _ in range(ROUNDS):
                with scratch.layers.replay_scope(batch):
                    eager.append(self._device.seconds(lambda: scratch.layers.body(live, batch)))
                replayed.append(self._device.seconds(lambda: scratch.replay(bucket, live, batch)))
            return scratch.outputs(bucket, live.rows)

        problem = self._capture_one(scratch, bucket, batch_of)
        if not problem:
            self.visit(scratch, batch_of(rows), race)
        # The ranks' slowest replay and fastest eager run decide, so that all decide alike.
        reports = self._ranks.gather(problem or f"{min(eager)!r} {min(replayed)!r}")
        scratch.retire("trial over")
        self._device.release()
        try:
            times = [tuple(map(float, r.split())) for r in reports]
        except ValueError:
            return Trial(bucket, rows, 0.0, float("inf"))
        return Trial(bucket, rows, min(t[0] for t in times), max(t[1] for t in times))

    def _failed(self, bank: Bank, rows: int, problem: str) -> None:
        self._device.release()
        kept = len(bank.buckets)
        self._log.warning("capture-failed", bank=bank.name, rows=rows, kept=kept, reason=problem)
        if self._strict:
            raise CaptureError(f"bank={bank.name} rows={rows}: {problem}")

    def open_engine_tail(self) -> None:
        """Tell the engine's tail runner that a full chunk has run: its break in prefill graphs then calls us."""
        tail = getattr(self.served.model, "decoder_replay_tail", None)
        if tail is not None:
            tail.runner.ready(self.largest_step)

    def drive_engine_tail(self) -> None:
        """Let the engine capture its own tail graphs now, where they stay in charge, instead of inside a request.

        0.5.23 captures them on first use after a full-chunk step: report one, then run one small step.
        """
        model = self.served.model
        tail = getattr(model, "decoder_replay_tail", None)
        if tail is None or any(b.buckets and b.layers.first == model.late_layer_start for b in self.banks):
            return
        if has_engram(model, model.late_layer_start, model.end_layer):
            return  # the engine's graphs cannot have one
        self.open_engine_tail()
        with self.served.forced(lambda step: []):
            self.dummies.run(self.dummies.batch(min(TAIL_ROWS_PER_REQUEST, self.dummies.most_rows)))

    def open(self) -> None:
        """The engine has captured its own graphs: from here on time and memory are ours."""
        self.guard_now()
        self._began, self._free_before = time.perf_counter(), self._device.free_bytes()

    def release(self) -> None:
        """Hand back what the captures left over."""
        self._device.release()

    def rehearse(self, stream: Any) -> None:
        """One small step through the served path on the stream that serves, head and logits too.

        The allocator keeps blocks per stream: without this the first request pays for them.
        """
        self.served.rehearsing = True
        try:
            with self._device.on(stream):
                self.dummies.run_whole(self.dummies.batch(min(TAIL_ROWS_PER_REQUEST, self.dummies.most_rows)))
        finally:
            self.served.rehearsing = False

    def summary(self) -> None:
        """One line for everything that was captured; seconds count growing too."""
        seconds = self._grow_seconds + time.perf_counter() - self._began
        free = self._device.free_bytes()
        values = total_values(self.banks, free_before=self._free_before, free=free, seconds=seconds)
        self._log.info("captured", **values)

    def _quiet(self) -> bool | None:
        # None: a bar on a terminal only, as in the engine's own capture.
        return True if self._log.rank else None
