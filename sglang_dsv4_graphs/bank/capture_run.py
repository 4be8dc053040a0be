"""Capturing one bank's buckets, largest first, on all ranks alike; a bucket that fails keeps those before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from sglang_dsv4_graphs.bank.backend import CaptureError
from sglang_dsv4_graphs.bank.bank import Bank
from sglang_dsv4_graphs.bank.layer_range import RangeInputs, RangeOutputs
from sglang_dsv4_graphs.bank.report import bucket_values
from sglang_dsv4_graphs.bank.room import expected_bytes, shortage

if TYPE_CHECKING:
    from sglang_dsv4_graphs.bank.sweep import Startup

# Builds a dummy step of some rows.
BatchOf = Callable[[int], Any]
NO_ROOM_FOR_SEVERAL = "a capture failed, and buckets for every step come first"


class CaptureRun:
    """Captures of one bank in one sweep, each from the dummy step ``batch_of(rows)``."""

    def __init__(self, startup: Startup, bank: Bank, batch_of: BatchOf) -> None:
        self._startup, self._bank, self._batch_of = startup, bank, batch_of

    def ladder(self) -> None:
        """Capture every planned bucket.

        Raises:
            CaptureError: in strict mode, if a bucket fails.
        """
        while self._missing():
            pass

    def _missing(self) -> bool:
        """Capture down the ladder until a bucket fails; whether another go may get further.

        Buckets for steps of several requests alone go first then, so that their memory costs no other step its graph.
        """
        bank, log = self._bank, self._startup.log
        missing = sorted(set(bank.planned) - set(bank.buckets), reverse=True)
        # None: a bar on a terminal only, as in the engine's own capture.
        quiet = True if log.rank else None
        for rows in tqdm(missing, desc=f"Capturing {bank.name}", disable=quiet):
            problem = self.one(rows)
            if problem:
                bank.drop(rows)
                gone = bank.drop_for_several()
                self._failed(rows, problem)
                if gone:
                    log.info("trimmed", bank=bank.name, rows=f"{gone[0]}..{gone[-1]}", reason=NO_ROOM_FOR_SEVERAL)
                return bool(gone)
            log.debug("captured", **bucket_values(bank, rows))
        return False

    def one(self, rows: int) -> str:
        """Capture one bucket on all ranks; returns what went wrong on one of them, or nothing."""
        startup, bank = self._startup, self._bank

        def capture(live: RangeInputs, batch: Any) -> RangeOutputs:
            metadata = startup.served.engine.get_attn_backend().forward_metadata
            bank.capture(rows, live, batch, metadata)
            return bank.outputs(rows, rows)

        def attempt() -> None:
            batch = self._batch_of(rows)
            self._check_room(rows)
            startup.visit(bank, batch, capture)

        return startup.together(f"capture of {bank.name} rows={rows}", attempt)

    def _check_room(self, rows: int) -> None:
        """Stop on all ranks alike where one has too little memory for ``rows`` rows; meets the other ranks."""
        device = self._startup.device
        costs = [stats.bytes for stats in reversed(self._bank.stats)]
        free, expected = device.room_bytes(), expected_bytes(rows, self._startup.grown, costs)
        notes = [note.split() for note in self._startup.ranks.rendezvous(f"{free} {expected}")]
        problem = shortage(rows, [int(n[0]) for n in notes], [int(n[1]) for n in notes])
        if problem is not None and device.is_cuda:
            raise CaptureError(problem)

    def _failed(self, rows: int, problem: str) -> None:
        startup, bank = self._startup, self._bank
        startup.device.release()
        startup.log.warning("capture-failed", bank=bank.name, rows=rows, kept=len(bank.buckets), reason=problem)
        if startup.strict:
            raise CaptureError(f"bank={bank.name} rows={rows}: {problem}")
