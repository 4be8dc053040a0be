"""Decoded tokens and first log-probabilities of the same prompts, side by side. Pure functions of answers.

Kernels differ from run to run, so one answer of each kind says little: each kind answers several times, and what is
between the kinds is held against what is within them.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

T = TypeVar("T")
Tokens = list[list[int]]
Top = list[list[list[float]]]
Run = tuple[Tokens, Top]
Pair = tuple[Run, Run]
DISTANCE = ", log-probabilities differ by"
# How far two answers without a common likely token count as apart.
NOTHING_SHARED = 10.0


def compared(eager: Sequence[Run], replayed: Sequence[Run]) -> dict[str, Any]:
    """How far answers agree, eager and replayed; each is per prompt its tokens, and [log-probability, token] of the
    likeliest first tokens.

    Per comparison: the median of equal tokens over its pairs of answers, and the largest difference of a
    log-probability. ``chance``: how often answers dealt to the kinds at random lie as far apart as these (1: always).
    """
    kinds: dict[str, list[Pair]] = {
        "replayed equals eager": list(product(replayed, eager)),
        "eager equals itself": list(combinations(eager, 2)),
        "replayed equals itself": list(combinations(replayed, 2)),
    }
    row: dict[str, Any] = {"tokens": sum(map(len, eager[0][0])), "answers": [len(eager), len(replayed)]}
    for name, pairs in kinds.items():
        row[name] = statistics.median_low([equal_tokens(one[0], other[0]) for one, other in pairs])
        distances = [top_distance(one[1], other[1]) for one, other in pairs]
        row[name + DISTANCE] = None if None in distances else max(distances, default=0.0)  # type: ignore[type-var]
    row["chance"] = {
        "tokens": chance(eager, replayed, lambda a, b: row["tokens"] - equal_tokens(a[0], b[0])),
        "log-probabilities": chance(eager, replayed, _apart),
    }
    return row | {"eager top": [top for _, top in eager], "replayed top": [top for _, top in replayed]}


def chance(one: Sequence[T], other: Sequence[T], distance: Callable[[T, T], float]) -> float:
    """Share of all ways to deal the answers to two kinds in which the kinds lie as far apart as they do.

    The exact permutation test of the energy distance: what is between the kinds, less what is within them. With four
    answers of each kind the smallest value is 0.03, with two 0.33.
    """
    table = _table([*one, *other], distance)
    count = len(one) + len(other)
    dealt = [_energy(table, set(kind), count) for kind in combinations(range(count), len(one))]
    # The first way is the one at hand; sums of the same numbers in another order differ in the last digits.
    return round(sum(value >= dealt[0] - 1e-9 for value in dealt) / len(dealt), 4)


def chance_together(
    cases: Sequence[tuple[Sequence[T], Sequence[T]]], distance: Callable[[T, T], float], deals: int = 2000
) -> float:
    """``chance`` of several cases at once, each dealt among its own answers: share of ``deals`` random deals.

    A difference that every case shows a little of is found; one case that is far apart by chance is none. 1 for no
    cases.
    """
    tables = [(_table([*one, *other], distance), len(one), len(one) + len(other)) for one, other in cases]
    found = sum(_energy(table, set(range(size)), count) for table, size, count in tables)
    draw = random.Random(0)

    def dealt() -> float:
        return sum(_energy(table, set(draw.sample(range(count), size)), count) for table, size, count in tables)

    # The deal at hand is one of them, so that no chance is 0.
    return round((1 + sum(dealt() >= found - 1e-9 for _ in range(deals))) / (1 + deals), 4)


def _table(every: Sequence[T], distance: Callable[[T, T], float]) -> dict[tuple[int, int], float]:
    return {(i, j): distance(every[i], every[j]) for i, j in combinations(range(len(every)), 2)}


def _energy(table: dict[tuple[int, int], float], kind: set[int], count: int) -> float:
    rest = count - len(kind)
    between = sum(d for (i, j), d in table.items() if (i in kind) != (j in kind)) / (len(kind) * rest)
    within_one = sum(d for (i, j), d in table.items() if i in kind and j in kind) / len(kind) ** 2
    within_other = sum(d for (i, j), d in table.items() if i not in kind and j not in kind) / rest**2
    return between - within_one - within_other


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


def _apart(one: Run, other: Run) -> float:
    found = top_distance(one[1], other[1])
    return NOTHING_SHARED if found is None else found
