"""How large a bucket pays: a trial at startup, because it depends on the machine.

A replay saves host time and costs padding and a few copies. A step whose eager run keeps the GPU busy longer than
the host needs gains nothing and would lose those, so the ladder ends at the largest bucket that wins on this
machine. Each trial runs the worst step of a bucket (one row more than the bucket below holds).

The host takes time for each request of an eager step, the GPU for each row: a step of several requests gains where
one of a single request does not. So buckets above that end may stay for steps of several requests alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# Runs of each kind in one trial, alternating; the fastest of each counts.
ROUNDS = 2
# Buckets up to here are host bound on every GPU that runs this model, so they are never tried.
ALWAYS = 1024
# Only multiples are tried: a trial costs about a second of startup.
COARSE = 512
# What a replay of one request must save of the eager time to win. A tie costs memory and startup, and eager times of
# one trial in several servers differ by up to 4 % (docs/performance.md).
GAIN = 0.05
# Requests from which on a step is one of several.
SEVERAL = 4
# The largest bucket that may stay for steps of several requests alone; more cost memory and startup for all.
SEVERAL_CAP = 4096


@dataclass(frozen=True)
class Trial:
    """Seconds of one range at ``rows`` rows of ``requests`` requests, eager and replayed in ``bucket``."""

    bucket: int
    rows: int
    eager: float
    replayed: float
    requests: int = 1

    @property
    def wins(self) -> bool:
        # Several are tried with the fewest that are several: where these tie, more of them win.
        gain = GAIN if self.requests == 1 else 0.0
        return self.replayed <= (1 - gain) * self.eager


def worst_rows(bucket: int, buckets: Sequence[int]) -> int:
    """The fewest rows that land in ``bucket`` of an ascending ladder: those with the most padding."""
    return max((b for b in buckets if b < bucket), default=0) + 1


def largest_winner(buckets: Sequence[int], run: Callable[[int], Trial]) -> tuple[int, list[Trial]]:
    """Bisect for the largest bucket that wins, taking it that a smaller one wins where a larger does.

    Args:
        buckets: ascending ladder; its largest and the multiples of 512 above 1024 are tried.
        run: tries one bucket.

    Returns:
        The largest bucket to keep, and the trials made.
    """
    tried = [b for b in buckets if b > ALWAYS and (b % COARSE == 0 or b == buckets[-1])]
    trials: list[Trial] = []

    def loses(bucket: int) -> bool:
        trials.append(run(bucket))
        return not trials[-1].wins

    winners = bisect_left(tried, True, key=loses)
    if winners:
        return tried[winners - 1], trials
    return max((b for b in buckets if b <= ALWAYS), default=0), trials


def bucket_for_several(buckets: Sequence[int], few: int) -> int | None:
    """The bucket whose trial decides on those above ``few``, the largest that pays for one request; None: none do."""
    above = [b for b in buckets if few < b <= SEVERAL_CAP]
    return above[-1] if above else None


def trim_reason(trials: Sequence[Trial]) -> str:
    """Why a ladder was cut short, for the log."""
    if any(t.replayed == float("inf") for t in trials):
        return "a trial could not be captured"
    return "eager is as fast there"
