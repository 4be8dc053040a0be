"""Whether a capture has room: asked before it begins, because a rank that runs out in its middle takes its peers along.

An allocation that fails in a warm-up leaves the other ranks' kernels waiting in a collective, and no exchange on the
host can call them back. So the ranks compare their free memory before each bucket, and all stop if one has clearly
too little. "Clearly": a capture that this lets through can still fail. Pure functions of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# What a capture takes whatever its rows: graph objects, allocator segments, workspaces of libraries.
FLOOR = 256 << 20


class Grown(NamedTuple):
    """What the growing forward of ``rows`` rows held beside its workspaces, in bytes."""

    rows: int
    bytes: int


def expected_bytes(rows: int, grown: Grown | None, costs: Sequence[int]) -> int:
    """The least that capturing ``rows`` rows needs, in bytes.

    Args:
        rows: of the bucket.
        grown: the eager forward before all captures: a bucket's first run takes its share of that.
        costs: what this bank's captures have taken so far, largest bucket first. The first one brings static rows and
            the pool that later ones share, so it says nothing of them; from the second on, the last one does.
    """
    if not costs:
        share = 0 if grown is None or grown.rows <= 0 else grown.bytes * rows // grown.rows
    else:
        share = costs[-1] if len(costs) > 1 else 0
    return max(FLOOR, share)


def shortage(rows: int, free: Sequence[int], expected: Sequence[int]) -> str | None:
    """Why ``rows`` rows have no room on the rank with the least free memory, or None; bytes in rank order."""
    least, needed = min(free), max(expected)
    if least >= needed:
        return None
    gib = float(1 << 30)
    return (
        f"rank {list(free).index(least)} has {least / gib:.2f} GiB free, a capture of {rows} rows takes "
        f"{needed / gib:.2f}: lower --mem-fraction-static or the bank's cap"
    )
