"""Shadow mode: the first replayed steps of a server are also run eagerly, and compared.

The comparison is exact: same rows, same padding, same process. An eager run repeats the step's KV writes, which
is harmless except where a write depends on what it overwrites: a ratio-2 pair left open by an odd prefix, or, under
encoder SWA bounded replay, any history in the request window. Such steps are skipped, and so is a range whose first
layers read a selection that its later layers overwrite (``range_bank.repeatable``). Engram's history is not written by
a range (``engram``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang_dsv4_graphs.bank.bank import Bank
    from sglang_dsv4_graphs.bank.layer_range import RangeInputs, RangeOutputs
    from sglang_dsv4_graphs.bank.served import ServedModel


class Shadow:
    """Compares up to ``steps`` replays of one bank with eager runs of the same padded rows."""

    def __init__(self, steps: int, served: ServedModel) -> None:
        self._left = steps
        # Not the served model itself: who keeps a shadow by its served model would keep it for ever.
        self._log = served.log
        self.compared = 0
        self.differed = 0

    def wanted(self, batch: Any) -> bool:
        """Whether the next replay is to be compared."""
        if self._left <= 0:
            return False
        return all(n % 2 == 0 for n in batch.extend_prefix_lens_cpu or ())

    def compare(self, bank: Bank, bucket: int, live: RangeInputs, batch: Any, replayed: RangeOutputs) -> RangeOutputs:
        """Run eagerly, log a difference, and return the eager outputs: the step uses what is known right."""
        self._left -= 1
        self.compared += 1
        replayed = replayed.cloned()
        eager = bank.run_eagerly(bucket, live, batch)
        largest = largest_difference(replayed, eager)
        if largest != 0.0:
            self.differed += 1
            self._log.error("shadow", bank=bank.name, bucket=bucket, rows=live.rows, largest_difference=f"{largest:g}")
        if self._left == 0:
            self._log.info("shadow", bank=bank.name, compared=self.compared, differed=self.differed)
        return eager


def largest_difference(one: RangeOutputs, other: RangeOutputs) -> float:
    """The largest absolute difference of two ranges' outputs; NaN against a number is infinite."""
    worst = 0.0
    for a, b in ((one.residual, other.residual), (one.pre, other.pre), (one.aux, other.aux)):
        if a is None or b is None:
            continue
        difference = (a.float() - b.float()).abs()
        same = (a == b) | (torch.isnan(a) & torch.isnan(b))
        difference = torch.where(same, 0.0, torch.nan_to_num(difference, nan=float("inf")))
        worst = max(worst, float(difference.max()) if difference.numel() else 0.0)
    return worst
