"""Running trials of a bank's buckets on this machine, on all ranks alike (``trial`` decides from their times)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dsv4_graphs.bank.bank import Bank, RangeOutputs
from sglang_dsv4_graphs.bank.layer_range import RangeInputs
from sglang_dsv4_graphs.bank.trial import ROUNDS, Trial, largest_winner, trim_reason, worst_rows

if TYPE_CHECKING:
    from sglang_dsv4_graphs.bank.sweep import Startup


class TrialRun:
    """Trials of one bank, with graphs that are thrown away; ``batch_of`` builds a dummy step of some rows."""

    def __init__(self, startup: Startup, bank: Bank, batch_of: Callable[[int], Any]) -> None:
        self._startup, self._bank, self._batch_of = startup, bank, batch_of

    def trim(self) -> None:
        """End the ladder where replays stop paying."""
        bank, log = self._bank, self._startup.log
        largest, trials = largest_winner(bank.planned, self.try_bucket)
        for t in trials:
            log.debug("trial", bank=bank.name, bucket=t.bucket, rows=t.rows, eager_s=t.eager, replayed_s=t.replayed)
        dropped = [b for b in bank.planned if b > largest]
        if dropped:
            bank.end_ladder(largest)
            log.info("trimmed", bank=bank.name, rows=f"{dropped[0]}..{dropped[-1]}", reason=trim_reason(trials))

    def try_bucket(self, bucket: int) -> Trial:
        """Race eager runs against replays of ``bucket``; all ranks take the slowest rank's word.

        A bucket that cannot be captured or raced on one rank loses on all of them, and none races without the others:
        a range has collectives.
        """
        startup, bank = self._startup, self._bank
        rows = worst_rows(bucket, bank.planned)
        first, last = bank.layers.first, bank.layers.last
        scratch = startup.new_bank(f"{bank.name}-trial", first, last, (bucket,), startup.backend.scratch())
        eager, replayed = [], []

        def race(live: RangeInputs, batch: Any) -> RangeOutputs:
            for _ in range(ROUNDS):
                with scratch.layers.replay_scope(batch):
                    eager.append(startup.device.seconds(lambda: scratch.layers.body(live, batch)))
                replayed.append(startup.device.seconds(lambda: scratch.replay(bucket, live, batch)))
            return scratch.outputs(bucket, live.rows)

        def attempt() -> None:
            startup.run(lambda: self._batch_of(rows), lambda batch: startup.visit(scratch, batch, race))

        problem = startup.capture_one(scratch, bucket, self._batch_of)
        problem = problem or startup.together(f"trial of {scratch.name} rows={bucket}", attempt)
        scratch.retire("trial over")
        startup.device.release()
        if problem:
            startup.log.debug("trial-failed", bank=bank.name, bucket=bucket, reason=problem)
            return Trial(bucket, rows, 0.0, float("inf"))
        # The slowest replay and the fastest eager run of all ranks.
        notes = startup.ranks.rendezvous(f"{min(eager)!r} {min(replayed)!r}")
        times = [tuple(map(float, note.split())) for note in notes]
        return Trial(bucket, rows, min(t[0] for t in times), max(t[1] for t in times))
