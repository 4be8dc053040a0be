"""Running trials of a bank's buckets on this machine, on all ranks alike (``trial`` decides from their times)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_dsv4_graphs.bank.bank import Bank
from sglang_dsv4_graphs.bank.capture_run import BatchOf, CaptureRun
from sglang_dsv4_graphs.bank.layer_range import RangeInputs, RangeOutputs
from sglang_dsv4_graphs.bank.trial import (
    ROUNDS,
    SEVERAL,
    Trial,
    bucket_for_several,
    largest_winner,
    trim_reason,
    worst_rows,
)

if TYPE_CHECKING:
    from sglang_dsv4_graphs.bank.sweep import Startup


class TrialRun:
    """Trials of one bank, with graphs that are thrown away; ``batch_of`` builds a dummy step of some rows."""

    def __init__(self, startup: Startup, bank: Bank, batch_of: BatchOf) -> None:
        self._startup, self._bank, self._batch_of = startup, bank, batch_of

    def trim(self) -> None:
        """End the ladder where replays stop paying."""
        bank, log = self._bank, self._startup.log
        few, trials = largest_winner(bank.planned, self.try_bucket)
        reason = trim_reason(trials)
        largest = self._with_several(few, trials)
        for t in trials:
            log.debug(
                "trial",
                bank=bank.name,
                bucket=t.bucket,
                rows=t.rows,
                requests=t.requests,
                eager_s=t.eager,
                replayed_s=t.replayed,
            )
        dropped = [b for b in bank.planned if b > largest]
        if dropped:
            bank.end_ladder(largest)
            log.info("trimmed", bank=bank.name, rows=f"{dropped[0]}..{dropped[-1]}", reason=reason)
        if few < largest:
            bank.largest_for_few = few
            above = [b for b in bank.planned if b > few]
            log.info("several", bank=bank.name, rows=f"{above[0]}..{above[-1]}", requests=SEVERAL)

    def _with_several(self, few: int, trials: list[Trial]) -> int:
        """The largest bucket to keep for steps of several requests; ``few`` where these gain no more than others."""
        bucket = bucket_for_several(self._bank.planned, few)
        if bucket is None or self._startup.most_requests < SEVERAL:
            return few
        trials.append(self.try_bucket(bucket, SEVERAL))
        return bucket if trials[-1].wins else few

    def try_bucket(self, bucket: int, requests: int = 1) -> Trial:
        """Race eager runs against replays of ``bucket``; all ranks take the slowest rank's word.

        A bucket that cannot be captured or raced on one rank loses on all of them, and none races without the others:
        a range has collectives.

        Args:
            bucket: rows of the graph; its worst step is raced.
            requests: 1, the dummy step that buckets are captured from, or more of equal length.
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

        def step() -> Any:
            return self._batch_of(rows) if requests == 1 else startup.dummies.batch(rows, -(-rows // requests))

        def attempt() -> None:
            startup.run(step, lambda batch: startup.visit(scratch, batch, race))

        problem = CaptureRun(startup, scratch, self._batch_of).one(bucket)
        problem = problem or startup.together(f"trial of {scratch.name} rows={bucket}", attempt)
        scratch.retire("trial over")
        startup.device.release()
        if problem:
            startup.log.debug("trial-failed", bank=bank.name, bucket=bucket, reason=problem)
            return Trial(bucket, rows, 0.0, float("inf"), requests)
        # The slowest replay and the fastest eager run of all ranks.
        notes = startup.ranks.rendezvous(f"{min(eager)!r} {min(replayed)!r}")
        times = [tuple(map(float, note.split())) for note in notes]
        return Trial(bucket, rows, min(t[0] for t in times), max(t[1] for t in times), requests)
