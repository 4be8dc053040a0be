"""What captures came to, as log values (docs/logs.md): rows, segments, GiB, seconds."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_dsv4_graphs.bank.bank import Bank

GIB = float(1 << 30)


def bucket_values(bank: Bank, rows: int) -> dict[str, object]:
    """One captured bucket."""
    stats = next(s for s in bank.stats if s.rows == rows)
    return {
        "bank": bank.name,
        "rows": rows,
        "segments": stats.segments,
        "gib": stats.bytes / GIB,
        "seconds": stats.seconds,
    }


def bank_values(bank: Bank, *, seconds: float, used: int) -> dict[str, object]:
    """A whole bank; ``used`` is the device memory it took, in bytes."""
    values: dict[str, object] = {"bank": bank.name, "graphs": len(bank.buckets)}
    if bank.buckets:
        values["rows"] = f"{bank.buckets[0]}..{bank.buckets[-1]}"
        values["segments"] = sum(s.segments for s in bank.stats)
        values["gib"] = max(0, used) / GIB
    return {**values, "seconds": seconds}


def total_values(banks: Sequence[Bank], *, free_before: int, free: int, seconds: float) -> dict[str, object]:
    """Every bank together, with free device memory before and after, in bytes."""
    return {
        "bank": "total",
        "graphs": sum(len(b.buckets) for b in banks),
        "segments": sum(s.segments for b in banks for s in b.stats),
        "gib": max(0, free_before - free) / GIB,
        "free_gib_before": free_before / GIB,
        "free_gib_after": free / GIB,
        "seconds": seconds,
    }
