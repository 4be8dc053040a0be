"""From the timers of single steps to one table: where the host time of a replayed step goes.

Pure functions of the rows that ``step_timers`` made. Every number is the median over the steps; a part that holds
others is given as what is left without them, so the parts add up to the client's time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from sglang_dsv4_graphs.bench.errors import BenchError

Row = dict[str, Any]
# Names of the lines, in the order of the table.
REQUEST = "request path (client to scheduler and back)"
METADATA = "engine's metadata"
LOOP = "layer loop outside the banks"
OUTSIDE = "forward outside the layer loop (embedding, head, logits)"
STORE = "of which K store, in merged breaks"
TIMERS = "timers themselves, spread over the above"
DRAIN = "waiting for the GPU after the forward"
GUARD, COPY_IN, SEGMENTS, BREAK, REST, HAND_OFF = (
    "bucket and guard check",
    "copy-in",
    "segment launches",
    "break",
    "rest of the replay (counts, contexts)",
    "output hand-off",
)


def reduce_steps(measured: Row) -> list[Row]:
    """The table's lines for one prompt length: part, bank, count and total microseconds per step, and their mean.

    Args:
        measured: ``steps`` as the timers wrote them, ``ttft_ms`` of the client (absent: no request path), ``timer_us``.

    Raises:
        BenchError: a bank took part and not one of its segments was timed.
    """
    steps = [_Spent(step["spent"]) for step in measured["steps"]]
    if not steps:
        return []
    banks = sorted({bank for s in steps for bank in s.banks()})
    lines = _Lines()
    times = measured.get("ttft_ms")
    if times and len(times) == len(steps):
        left = [ms * 1e3 - s.us("forward") - s.us("drain") for ms, s in zip(times, steps, strict=True)]
        lines.add(REQUEST, [(1, us) for us in left])
    lines.add(METADATA, [s.of("metadata") for s in steps])
    lines.add(OUTSIDE, [(1, s.us("forward") - s.us("metadata") - s.us("loop")) for s in steps])
    in_banks = [sum(s.us(p, b) for b in banks for p in ("guard", "range", "hand-off")) for s in steps]
    lines.add(LOOP, [(1, s.us("loop") - inside) for s, inside in zip(steps, in_banks, strict=True)])
    for bank in banks:
        _add_bank(lines, bank, steps)
    lines.add(STORE, [s.of("store") for s in steps])
    lines.add(DRAIN, [s.of("drain") for s in steps])
    timers = [sum(count for count, _ in s.values()) for s in steps]
    lines.add(TIMERS, [(n, n * measured["timer_us"]) for n in timers])
    return lines.rows


def _add_bank(lines: _Lines, bank: str, steps: Sequence[_Spent]) -> None:
    if not any(s.us("segments", bank) for s in steps):
        raise BenchError(f"the timers met no segment of bank {bank}: its recordings keep them elsewhere")
    lines.add(GUARD, [s.of("guard", bank) for s in steps], bank)
    lines.add(COPY_IN, [s.of("copy-in", bank) for s in steps], bank)
    lines.add(SEGMENTS, [s.of("segments", bank) for s in steps], bank)
    for kind in sorted({kind for s in steps for kind in s.kinds(bank)}):
        lines.add(f"{BREAK}: {kind}", [s.of("break", bank, kind) for s in steps], bank)
    lines.add(REST, [(1, s.us("range", bank) - s.inside_range(bank)) for s in steps], bank)
    lines.add(HAND_OFF, [s.of("hand-off", bank) for s in steps], bank)


class _Lines:
    """The table's lines as they come; a part that never ran has none."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(self, part: str, values: Sequence[tuple[int, float]], bank: str | None = None) -> None:
        count, us = (round(statistics.median(v), 2) for v in zip(*values, strict=True))
        if count or us:
            mean = round(us / count, 2) if count else None
            self.rows.append({"bank": bank, "part": part, "count": count, "us": us, "mean_us": mean})


class _Spent:
    """One step's rows, looked up."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {(r["part"], r["bank"], r["kind"]): (int(r["count"]), float(r["us"])) for r in rows}

    def of(self, part: str, bank: str | None = None, kind: str | None = None) -> tuple[int, float]:
        return self._rows.get((part, bank, kind), (0, 0.0))

    def us(self, part: str, bank: str | None = None) -> float:
        return self.of(part, bank)[1]

    def values(self) -> list[tuple[int, float]]:
        return list(self._rows.values())

    def banks(self) -> set[str]:
        return {bank for _, bank, _ in self._rows if bank is not None}

    def kinds(self, bank: str) -> set[str]:
        return {kind for part, b, kind in self._rows if part == "break" and b == bank and kind is not None}

    def inside_range(self, bank: str) -> float:
        """What of a replay has a line of its own."""
        breaks = sum(self.of("break", bank, kind)[1] for kind in self.kinds(bank))
        return self.us("copy-in", bank) + self.us("segments", bank) + breaks
