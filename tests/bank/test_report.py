"""Log values of captures: the names and units that tools read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.bank import CaptureStats
from sglang_dsv4_graphs.bank.report import bank_values, bucket_values, total_values
from sglang_dsv4_graphs.log import line

GIB = 1 << 30


def bank(*stats: CaptureStats) -> Any:
    return SimpleNamespace(name="full-layer", stats=list(stats), buckets=tuple(s.rows for s in stats))


SMALL, LARGE = CaptureStats(64, 44, 0.25, GIB // 2), CaptureStats(8192, 43, 0.5, GIB)


def test_one_bucket() -> None:
    values = bucket_values(bank(SMALL, LARGE), 8192)
    assert values == {"bank": "full-layer", "rows": 8192, "segments": 43, "gib": 1.0, "seconds": 0.5}


def test_a_bank() -> None:
    text = line("captured", **bank_values(bank(SMALL, LARGE), seconds=9.0, used=3 * GIB))
    assert text == ("dsv4-graphs: captured bank=full-layer graphs=2 rows=64..8192 segments=87 gib=3.000 seconds=9.000")


def test_a_bank_that_captured_nothing() -> None:
    assert bank_values(bank(), seconds=9.0, used=3 * GIB) == {"bank": "full-layer", "graphs": 0, "seconds": 9.0}


def test_memory_that_grew_is_not_negative() -> None:
    assert bank_values(bank(SMALL), seconds=1.0, used=-5)["gib"] == 0.0
    assert total_values([bank(SMALL)], free_before=0, free=GIB, seconds=1.0)["gib"] == 0.0


def test_all_banks() -> None:
    values = total_values([bank(SMALL, LARGE), bank(SMALL)], free_before=5 * GIB, free=2 * GIB, seconds=4.0)
    assert values == {
        "bank": "total",
        "graphs": 3,
        "segments": 131,
        "gib": 3.0,
        "free_gib_before": 5.0,
        "free_gib_after": 2.0,
        "seconds": 4.0,
    }
