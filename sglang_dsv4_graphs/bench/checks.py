"""Captured graphs checked inside a real server: replay against eager, and replays under allocator churn.

Outputs can only be compared within one process: kernels differ from run to run, and random weights amplify rounding.
So this runs where the graphs live. It builds extend steps whose requests own real KV slots, with other tokens, lengths
and positions than the captures had, and compares per row count: replay with eager on the same padded rows, eager with
itself, replay with itself; where eager differs from itself, also whether some row of the replays lies apart. Then it
replays in random order, frees and fills memory between, and compares with the first replay of the same rows; row counts
at which eager does not equal itself are listed apart, since there nothing can.
It writes over KV of cached prompts: flush the radix cache afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sglang_dsv4_graphs.bank.bank import Bank
from sglang_dsv4_graphs.bank.layer_range import RangeInputs, RangeOutputs
from sglang_dsv4_graphs.bank.range_bank import repeatable
from sglang_dsv4_graphs.bank.shadow import largest_difference
from sglang_dsv4_graphs.bank.sweep import Startup
from sglang_dsv4_graphs.bench.apart import rows_apart
from sglang_dsv4_graphs.bench.results import write_json
from sglang_dsv4_graphs.engine.facts import TAIL_ROWS_PER_REQUEST

CHURN = 50
# Runs of each kind where eager does not equal itself.
ANSWERS = 4
PAGE = 256
_FIRST_ID, _LAST_ID = 3, 100000
_GARBAGE_MIB, _GARBAGE_BLOCKS = 64, 4
Visit = Callable[[RangeInputs, Any], Any]
Report = dict[str, Any]


def check_banks(startup: Startup, into: Path, rows: Sequence[int] | None = None) -> Report:
    """Check every bank; the report so far is in ``into`` after each comparison.

    Args:
        startup: of the server, after its captures.
        into: JSON file.
        rows: row counts, instead of every bucket's edges.
    """
    report: Report = {}
    for bank in startup.banks:
        if not bank.buckets:
            continue
        report[bank.name] = BankChecks(startup, bank, lambda: write_json(into, report)).run(rows, report)
        write_json(into, report)
    return report


def edge_rows(buckets: Sequence[int]) -> list[int]:
    """Every bucket exactly full, and the fewest rows that land in it."""
    below = [0, *buckets[:-1]]
    return sorted({*buckets, *(b + 1 for b in below)})


class BankChecks:
    """Checks of one bank."""

    def __init__(self, startup: Startup, bank: Bank, save: Callable[[], None]) -> None:
        self._startup, self._bank, self._save = startup, bank, save
        self._runner = startup.dummies._runner
        self._draw = random.Random(7)

    def run(self, wanted: Sequence[int] | None, report: Report) -> Report:
        bank = self._bank
        mine: Report = {"buckets": list(bank.buckets), "rows": [], "churn": {}}
        report[bank.name] = mine
        if not repeatable(self._startup.served.model, bank):
            mine["skipped"] = "its first layers read a selection that a second run lacks"
            return mine
        rows = [n for n in wanted or edge_rows(bank.buckets) if n <= bank.buckets[-1]]
        for n in rows:
            mine["rows"].append(self.compare(n))
            self._save()
        unsteady = {row["rows"] for row in mine["rows"] if row["eager_vs_eager"] != 0.0}
        mine["churn"] = self.churn(rows, unsteady)
        return mine

    def compare(self, rows: int) -> Report:
        """One step of ``rows`` rows, replayed and run eagerly on the same padded rows, each twice."""
        bank = self._bank

        def visit(live: RangeInputs, batch: Any) -> Report:
            bucket = self._bucket(live.rows)
            bank.check(bucket, everything=True)
            replay = bank.replay(bucket, live, batch).cloned()
            eager = bank.run_eagerly(bucket, live, batch).cloned()
            again = bank.run_eagerly(bucket, live, batch).cloned()
            replay_again = bank.replay(bucket, live, batch).cloned()
            found = {
                "rows": live.rows,
                "bucket": bucket,
                "requests": batch.batch_size,
                "replay_vs_eager": largest_difference(replay, eager),
                "eager_vs_eager": largest_difference(eager, again),
                "replay_vs_replay": largest_difference(replay, replay_again),
                "mean_abs": float(eager.residual.float().abs().mean()),
                "finite": bool(torch.isfinite(replay.residual).all()),
            }
            if found["eager_vs_eager"] != 0.0:
                found["apart"] = self._apart(live, batch, [replay, replay_again], [eager, again])
            return found

        return self._step(rows, rows, visit)

    def _apart(
        self, live: RangeInputs, batch: Any, replays: list[RangeOutputs], eager: list[RangeOutputs]
    ) -> dict[str, Any]:
        """Whether some row of the replays lies apart from that of eager runs, with more of both."""
        bucket = self._bucket(live.rows)
        for _ in range(ANSWERS - 2):
            replays.append(self._bank.replay(bucket, live, batch).cloned())
            eager.append(self._bank.run_eagerly(bucket, live, batch).cloned())
        return rows_apart([r.residual for r in replays], [r.residual for r in eager])

    def churn(self, rows: Sequence[int], unsteady: set[int]) -> Report:
        """Replays in random order with the allocator's memory freed and filled between."""
        first: dict[int, RangeOutputs] = {}
        worst: dict[int, list[float]] = {}
        for n in (self._draw.choice(rows) for _ in range(CHURN)):

            def visit(live: RangeInputs, batch: Any) -> RangeOutputs:
                return self._bank.replay(self._bucket(live.rows), live, batch).cloned()

            outputs = self._step(n, n, visit)
            if n in first:
                worst.setdefault(n, []).append(largest_difference(first[n], outputs))
            else:
                first[n] = outputs
            self._spoil_free_memory()
        steady = {n: v for n, v in worst.items() if n not in unsteady}
        return {
            "replays": CHURN,
            "eager_equals_itself": _worst_rows(steady),
            "eager_differs_from_itself": _worst_rows({n: v for n, v in worst.items() if n in unsteady}),
        }

    def _spoil_free_memory(self) -> None:
        sizes = [self._draw.randrange(1, _GARBAGE_MIB) << 20 for _ in range(_GARBAGE_BLOCKS)]
        garbage = [torch.full((size,), 7, dtype=torch.uint8, device=self._runner.device) for size in sizes]
        del garbage
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _bucket(self, rows: int) -> int:
        bucket = self._bank.bucket_for(rows)
        assert bucket is not None, rows
        return bucket

    def _lengths(self, rows: int, draw: random.Random) -> list[int]:
        """Request lengths: one to four for the full width, whole tails for the late layers."""
        if self._bank.layers.first > self._startup.served.model.start_layer:
            return [min(TAIL_ROWS_PER_REQUEST, rows - at) for at in range(0, rows, TAIL_ROWS_PER_REQUEST)]
        parts = min(rows, draw.choice((1, 1, 2, 3, 4)))
        cuts = sorted(draw.sample(range(1, rows), parts - 1)) if parts > 1 else []
        return [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]

    def _step(self, rows: int, seed: int, visit: Visit) -> Any:
        """Run an extend that gives the bank ``rows`` rows; what ``visit`` returned in place of the range."""
        draw = random.Random(seed)
        batch = self._batch(self._lengths(rows, draw), draw)
        tables = [self._runner.req_to_token_pool.req_to_token]
        mapping = getattr(self._runner.token_to_kv_pool, "full_to_swa_index_mapping", None)
        tables += [] if mapping is None else [mapping]
        saved = [table.clone() for table in tables]
        seen: list[Any] = []

        def visited(live: RangeInputs, step_batch: Any) -> RangeOutputs:
            seen.append(visit(live, step_batch))
            return self._bank.outputs(self._bucket(live.rows), live.rows)

        try:
            self._own_slots(batch, draw.randrange(1, 4), mapping)
            self._startup.visit(self._bank, batch, visited)
        finally:
            for table, before in zip(tables, saved, strict=True):
                table.copy_(before)
        return seen[0]

    def _batch(self, lengths: list[int], draw: random.Random) -> Any:
        served = self._startup.served
        last = min(_LAST_ID, int(served.model.config.vocab_size))
        ids = [draw.randrange(_FIRST_ID, last) for _ in range(sum(lengths))]
        input_ids = torch.tensor(ids, dtype=torch.int64, device=self._runner.device)
        return served.engine.extend_batch(runner=self._runner, lengths=lengths, input_ids=input_ids)

    def _own_slots(self, batch: Any, page: int, mapping: Any) -> None:
        """Whole pages per request, as the engine's allocator gives them; the window's slots get the same numbers."""
        table, slots = self._runner.req_to_token_pool.req_to_token, []
        for i, n in enumerate(batch.extend_seq_lens_cpu):
            own = torch.arange(n, device=table.device) + PAGE * page
            page += -(-n // PAGE)
            table[i, :n] = own.to(table.dtype)
            slots.append(own)
        batch.out_cache_loc = torch.cat(slots)
        if mapping is not None:
            mapping[batch.out_cache_loc] = batch.out_cache_loc.to(mapping.dtype)


def _worst_rows(differences: dict[int, list[float]]) -> Report:
    """Per row count how often it was compared and the largest difference, and the largest of all."""
    rows = [
        {"rows": n, "compared": len(found), "largest_difference": max(found)}
        for n, found in sorted(differences.items())
    ]
    return {"rows": rows, "largest_difference": max((max(v) for v in differences.values()), default=0.0)}
