"""Decoded tokens and first log-probabilities of the same prompts, side by side. Pure functions of answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tokens = list[list[int]]
Top = list[list[list[float]]]
# name of a comparison: the two runs that it compares.
COMPARISONS = {
    "replayed equals eager": ("replayed", "eager"),
    "eager equals itself": ("eager again", "eager"),
    "replayed equals itself": ("replayed again", "replayed"),
}
DISTANCE = ", log-probabilities differ by"


def compared(runs: Mapping[str, tuple[Tokens, Top]]) -> dict[str, Any]:
    """How far the runs of ``COMPARISONS`` agree; each run is per prompt its tokens, and [log-probability, token] of
    the likeliest first tokens."""
    row: dict[str, Any] = {"tokens": sum(map(len, runs["eager"][0]))}
    for name, (one, other) in COMPARISONS.items():
        row[name] = equal_tokens(runs[one][0], runs[other][0])
        row[name + DISTANCE] = top_distance(runs[one][1], runs[other][1])
    return row | {f"{key} top": top for key, (_, top) in runs.items()}


def equal_tokens(one: Tokens, other: Tokens) -> int:
    """Tokens that two answers to the same prompts have in common, place by place."""
    return sum(x == y for p, q in zip(one, other, strict=True) for x, y in zip(p, q, strict=True))


def top_distance(one: Top, other: Top) -> float | None:
    """The largest difference of a log-probability that both sides list; None if some prompt shares no token."""
    worst = 0.0
    for p, q in zip(one, other, strict=True):
        a, b = ({int(token): value for value, token in side} for side in (p, q))
        shared = a.keys() & b.keys()
        if not shared:
            return None
        worst = max(worst, *(abs(a[t] - b[t]) for t in shared))
    return round(worst, 5)
