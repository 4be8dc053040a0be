"""All ranks decide alike: what was captured follows from what every rank reports.

Under tensor parallelism a rank that replays while another runs eagerly can hang or corrupt, so after each
capture the ranks exchange how it went, and all of them drop a bucket that failed on any. The wait is bounded and
an expired one names the ranks that are missing.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Longer than the slowest capture step that was measured by far (first-use kernel compilation: 60 s).
WAIT = timedelta(seconds=300)


class RankError(RuntimeError):
    """Ranks did not come to the same decision point; names those missing."""


class Ranks:
    """The ranks of one tensor-parallel group; ``group`` is its CPU (gloo) process group, None for one rank."""

    def __init__(self, rank: int, size: int, group: Any = None, wait: timedelta = WAIT) -> None:
        self.rank, self.size = rank, size
        self._group = group
        self._wait = wait

    def gather(self, report: str) -> list[str]:
        """Every rank's report, in rank order.

        Raises:
            RankError: if a rank does not come within the wait.
        """
        if self.size == 1:
            return [report]
        try:
            dist.monitored_barrier(group=self._group, timeout=self._wait, wait_all_ranks=True)
        except RuntimeError as e:
            raise RankError(f"rank {self.rank} waited {self._wait.total_seconds():g} s: {e}") from e
        reports: list[Any] = [None] * self.size
        dist.all_gather_object(reports, report, group=self._group)
        return [str(r) for r in reports]
