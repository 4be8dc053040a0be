"""The demo's steps: what a server sees in a day, in the fewest rows.

Buckets go wrong at their edges, breaks at prefix hits, and counts where requests are many. The sizes follow from
the ladder that was captured, so that an edge here is an edge there. Pure functions of numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PlannedStep:
    """One extend step: how many more tokens of which requests. ``image``: one of them carries an image."""

    what: str
    parts: tuple[tuple[str, int], ...]
    image: bool = False

    @property
    def rows(self) -> int:
        return sum(tokens for _, tokens in self.parts)


def step(what: str, *, image: bool = False, **parts: int) -> PlannedStep:
    return PlannedStep(what, tuple(parts.items()), image)


def plan(ladder: Sequence[int]) -> list[PlannedStep]:
    """The steps for an ascending ladder of buckets; a request named in several steps continues in each.

    Raises:
        ValueError: the ladder is too small to have edges.
    """
    if len(ladder) < 2 or ladder[0] < 16:
        raise ValueError(f"the demo's steps need two buckets, the smaller of at least 16 rows: {tuple(ladder)}")
    small, second, largest = ladder[0], ladder[1], ladder[-1]
    third = largest // 3
    return [
        step("one row", a=1),
        step("smallest bucket - 1", b=small - 1),
        step("smallest bucket", c=small),
        step("smallest bucket + 1", d=small + 1),
        step("three requests", e=second // 3, f=second // 6, g=second // 4),
        step("prefix hit beside a new one", b=second // 3, h=second // 4),
        step("largest bucket, first chunk", i=largest),
        step("its second chunk", i=second + small // 3),
        step("largest bucket + 1", j=largest + 1),
        step("the chunk behind it", j=small + small // 5),
        step("one row of eight requests", a=1, b=1, c=1, d=1, e=1, f=1, g=1, h=1),
        step("two long prompts", k=third, l=third),
        step("three long prompts", m=third, o=third, p=third),
        step("a request with an image", n=small // 2, image=True),
        step("text behind the image", n=small // 4),
        step("two prefix hits", k=second - small // 2, a=small // 2 - 1),
    ]


def prompt_lengths(steps: Sequence[PlannedStep]) -> dict[str, int]:
    """How long each request's prompt is in the end."""
    lengths: Counter[str] = Counter()
    for planned in steps:
        lengths.update(dict(planned.parts))
    return dict(lengths)


def describe_parts(prefixes: Sequence[int], tokens: Sequence[int]) -> str:
    """``40+21``: new requests; ``42@63``: 42 tokens behind 63 that are in the cache."""
    if len(tokens) > 3:
        hits = sum(1 for p in prefixes if p)
        return f"{len(tokens)} ({hits} hits)"
    parts = [f"{n}@{p}" if p else str(n) for p, n in zip(prefixes, tokens, strict=True)]
    return "+".join(parts)
