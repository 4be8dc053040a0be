"""Whether a capture has room: what it needs follows from what was measured, and the poorest rank decides for all."""

from __future__ import annotations

import pytest

from sglang_dsv4_graphs.bank.room import FLOOR, Grown, expected_bytes, shortage

GIB = 1 << 30


@pytest.mark.parametrize(
    ("grown", "costs", "expected"),
    [
        (None, [], FLOOR),
        # The first bucket's run takes its share of what growing held.
        (Grown(8192, 8 * GIB), [], 4 * GIB),
        (Grown(8192, 1 << 20), [], FLOOR),
        # The first capture brings the pool, so it says nothing of the next one; the second does.
        (Grown(8192, 8 * GIB), [6 * GIB], FLOOR),
        (Grown(8192, 8 * GIB), [6 * GIB, GIB], GIB),
        (Grown(8192, 8 * GIB), [6 * GIB, GIB, 2 * GIB], 2 * GIB),
        (Grown(8192, 8 * GIB), [6 * GIB, 0], FLOOR),
        (Grown(0, 0), [], FLOOR),
    ],
)
def test_what_a_capture_needs(grown: Grown | None, costs: list[int], expected: int) -> None:
    assert expected_bytes(4096, grown, costs) == expected


def test_the_poorest_rank_decides() -> None:
    assert shortage(512, [9 * GIB, 2 * GIB], [GIB, 2 * GIB]) is None
    text = shortage(512, [9 * GIB, 2 * GIB - 1, 3 * GIB], [GIB, 2 * GIB, GIB])
    assert text is not None
    assert text.startswith("rank 1 has 2.00 GiB free, a capture of 512 rows takes 2.00: lower --mem-fraction-static")
