"""One wrong row among rows that differ anyway: whether two kinds of answers lie apart somewhere.

From some hundred rows on the engine's kernels differ from run to run, and a few rows far (another expert), so the
largest difference says nothing of one wrong row. But a wrong row is wrong in every answer of its kind: two answers of
different kinds are further apart there than two of one kind. By chance rows are so too; how far, the same answers dealt
to the kinds in every other way tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch

_FAR = 1e30


def rows_apart(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The widest gap between two kinds of answers in any row, beside that of every other way to deal the answers.

    Args:
        one, other: at least two answers of each kind, [rows, ...] each.

    Returns:
        ``widest`` gap, its ``row``, ``widest_by_chance`` of the other deals, and ``chance``: the share of all deals
        with a gap as wide. With four answers of each kind the smallest is 0.03.
    """
    distances = _distances([*one, *other])
    count = len(one) + len(other)
    kinds = [frozenset(kind) for kind in combinations(range(count), len(one))]
    if len(one) == len(other):
        kinds = [kind for kind in kinds if 0 in kind]  # the rest are these with the kinds' names exchanged
    found = [_gaps(distances, kind, count) for kind in kinds]
    widest = [float(gaps.max()) for gaps in found]
    return {
        "answers": count,
        "widest": widest[0],
        "row": int(found[0].argmax()),
        "widest_by_chance": max(widest[1:]),
        "chance": round(sum(w >= widest[0] for w in widest) / len(widest), 4),
    }


def _distances(answers: Sequence[torch.Tensor]) -> dict[tuple[int, int], torch.Tensor]:
    """[rows] largest absolute difference per row, of every two answers; what is no number is far from any other."""
    found = {}
    for i, j in combinations(range(len(answers)), 2):
        a, b = answers[i].flatten(1), answers[j].flatten(1)
        same = (a == b) | (torch.isnan(a) & torch.isnan(b))
        difference = torch.nan_to_num((a - b).abs().float(), nan=_FAR, posinf=_FAR)
        found[i, j] = torch.where(same, 0.0, difference).amax(1)
    return found


def _gaps(distances: dict[tuple[int, int], torch.Tensor], kind: frozenset[int], count: int) -> torch.Tensor:
    """[rows]: the mean distance of two answers of different kinds, less that of two of one kind.

    Means: they are largest in the deal in which each kind is of one sort, whatever single answers are far off.
    """
    pairs = list(combinations(range(count), 2))
    between = torch.stack([distances[p] for p in pairs if (p[0] in kind) != (p[1] in kind)])
    within = torch.stack([distances[p] for p in pairs if (p[0] in kind) == (p[1] in kind)])
    return between.mean(0) - within.mean(0)
