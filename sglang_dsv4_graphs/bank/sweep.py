"""The startup sweep: grow, capture everything, hand memory back.

Order is what makes graphs safe (docs/design.md): kernels that size cached workspaces by row count must have seen
the largest step before the first capture; larger buckets come first, so that smaller ones reuse the pool's
blocks; a capture that fails keeps those that succeeded; and under tensor parallelism all ranks keep the same set.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from sglang_dsv4_graphs.bank.backend import CaptureError, GraphBackend
from sglang_dsv4_graphs.bank.bank import Bank
from sglang_dsv4_graphs.bank.buckets import UNCHUNKED_ROWS
from sglang_dsv4_graphs.bank.dummies import Dummies
from sglang_dsv4_graphs.bank.guard import AddressGuard
from sglang_dsv4_graphs.bank.layer_range import LayerRange, RangeInputs
from sglang_dsv4_graphs.bank.ranks import Ranks
from sglang_dsv4_graphs.bank.served import Loop, ServedModel, Step
from sglang_dsv4_graphs.bank.views import Takeover
from sglang_dsv4_graphs.engine.facts import TAIL_ROWS_PER_REQUEST
from sglang_dsv4_graphs.log import RankLog, logger

GIB = float(1 << 30)


class Device:
    """What the sweep needs of the device; the CPU stand-in has no memory to report."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device.startswith("cuda")

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[0]) if self.is_cuda else 0

    def release(self) -> None:
        """Give what nothing uses back to the device; graph pools stay."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


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
    ) -> None:
        self.served = served
        self.dummies = dummies
        self.chunk_size = chunk_size
        self._backend = backend
        self._make_guard = make_guard
        self._guard: AddressGuard | None = None
        self._ranks = ranks
        self._device = device
        self._strict = strict
        self._log: RankLog = served.log
        self._began = time.perf_counter()
        self.banks: list[Bank] = []

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Layers whose hidden states the model hands to a DSpark draft."""
        return tuple(self.served.model.dspark_layers_to_capture or ())

    @property
    def largest_step(self) -> int:
        """Tokens of the largest prefill step this server runs or captures."""
        chunk = self.chunk_size if self.chunk_size and self.chunk_size > 0 else UNCHUNKED_ROWS
        return max(chunk, self.served.settings.full_layer_max_tokens)

    def make_bank(
        self, name: str, first: int, last: int, buckets: tuple[int, ...], captured_layers: tuple[int, ...] = ()
    ) -> Bank:
        """An empty bank over layers ``[first, last)``."""
        engine = self.served.engine
        layers = LayerRange(engine, self.served.model, self._loop(), first, last)
        bank = Bank(
            name=name,
            layers=layers,
            buckets=buckets,
            backend=self._backend,
            guard=self.guard_now(),
            local_rows=engine.local_rows,
            captured_layers=captured_layers,
            free_bytes=self._device.free_bytes,
            debug=self.served.settings.debug,
        )
        self.banks.append(bank)
        return bank

    def _loop(self) -> Loop:
        loop = self.served.plain_loop
        if loop is None:
            raise CaptureError("the model's layer loop was never called: grow() comes before captures")
        return loop

    def guard_now(self) -> AddressGuard:
        """The address guard, made once every workspace has its final size."""
        if self._guard is None:
            self._guard = self._make_guard()
        return self._guard

    def grow(self) -> None:
        """One eager forward of the largest step, nobody capturing: every workspace reaches its final size."""
        rows = min(self.largest_step, self.dummies.most_rows)
        with self.served.forced(lambda step: [Takeover.of_nothing(decoder_replay_tail=None)]):
            self.dummies.run(self.dummies.batch(rows))

    def capture_all(self, bank: Bank, batch_of: Callable[[int], Any]) -> None:
        """Capture every planned bucket, largest first, each from the dummy step ``batch_of(rows)``.

        Raises:
            CaptureError: in strict mode, if a bucket fails.
        """
        start, free = time.perf_counter(), self._device.free_bytes()
        order = sorted(bank.planned, reverse=True)
        for rows in tqdm(order, desc=f"Capturing {bank.name}", disable=self._quiet()):
            problem = self._capture_one(bank, rows, batch_of)
            problems = self._ranks.gather(problem)
            if any(problems):
                bank.drop(rows)
                self._failed(bank, rows, next(f"rank {r}: {p}" for r, p in enumerate(problems) if p))
                break
            self._log.debug("captured", bank=bank.name, **bucket_line(bank, rows))
        self._log.info("captured", **bank_line(bank, time.perf_counter() - start, free - self._device.free_bytes()))

    def _capture_one(self, bank: Bank, rows: int, batch_of: Callable[[int], Any]) -> str:
        """Run the dummy step up to the range and record it there; returns what went wrong, or nothing.

        The rest of the model does not run.
        """
        first, last = bank.layers.first, bank.layers.last

        def takeovers(step: Step) -> list[Takeover]:
            def run(state: Any, positions: Any, input_ids: Any, batch: Any) -> Any:
                metadata = self.served.engine.get_attn_backend().forward_metadata
                live = RangeInputs(state.residual, state.pre if first > 0 else None, positions, input_ids)
                bank.capture(rows, live, batch, metadata)
                outputs = bank.outputs(rows, rows)
                return self.served.engine.HcState(outputs.residual, outputs.pre)

            return [Takeover(first, last, run, overrides)]

        overrides = {"end_layer": last, "late_layer_start": None, "decoder_replay_tail": None}
        try:
            with self.served.forced(takeovers):
                self.dummies.run(batch_of(rows))
        except Exception as e:  # whatever a kernel, an allocator or the engine raises: the server must still serve
            logger.debug("capture of %s rows=%s failed", bank.name, rows, exc_info=True)
            return f"{type(e).__name__}: {str(e).strip().splitlines()[0] if str(e).strip() else 'no message'}"
        return ""

    def _failed(self, bank: Bank, rows: int, problem: str) -> None:
        self._device.release()
        kept = len(bank.buckets)
        self._log.warning("capture-failed", bank=bank.name, rows=rows, kept=kept, reason=problem)
        if self._strict:
            raise CaptureError(f"bank={bank.name} rows={rows}: {problem}")

    def drive_engine_tail(self) -> None:
        """Let the engine capture its own tail graphs now, where they stay in charge, instead of inside a request.

        0.5.23 captures them on first use after a full-chunk step: report one, then run one small step.
        """
        tail = getattr(self.served.model, "decoder_replay_tail", None)
        if tail is None or any(b.buckets and b.layers.first >= tail._layer_ids.start for b in self.banks):
            return
        tail.runner.ready(self.largest_step)
        with self.served.forced(lambda step: []):
            self.dummies.run(self.dummies.batch(min(TAIL_ROWS_PER_REQUEST, self.dummies.most_rows)))

    def summary(self, free_before: int) -> None:
        """One line for everything that was captured."""
        free = self._device.free_bytes()
        graphs = sum(len(b.buckets) for b in self.banks)
        self._log.info(
            "captured",
            bank="total",
            graphs=graphs,
            segments=sum(s.segments for b in self.banks for s in b.stats),
            gib=max(0, free_before - free) / GIB,
            free_gib_before=free_before / GIB,
            free_gib_after=free / GIB,
            seconds=time.perf_counter() - self._began,
        )

    def _quiet(self) -> bool | None:
        # None: a bar on a terminal only, as in the engine's own capture.
        return True if self._log.rank else None


def bucket_line(bank: Bank, rows: int) -> dict[str, object]:
    stats = next(s for s in bank.stats if s.rows == rows)
    return {"rows": rows, "segments": stats.segments, "gib": stats.bytes / GIB, "seconds": stats.seconds}


def bank_line(bank: Bank, seconds: float, used: int) -> dict[str, object]:
    """What a bank's captures came to."""
    if not bank.buckets:
        return {"bank": bank.name, "graphs": 0, "seconds": seconds}
    return {
        "bank": bank.name,
        "graphs": len(bank.buckets),
        "rows": f"{bank.buckets[0]}..{bank.buckets[-1]}",
        "segments": sum(s.segments for s in bank.stats),
        "gib": max(0, used) / GIB,
        "seconds": seconds,
    }
