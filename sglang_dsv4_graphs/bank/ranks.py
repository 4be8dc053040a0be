"""All ranks decide alike: what is captured and what replays follows from what every rank reports.

Under tensor parallelism a rank that replays while another runs eagerly can hang or corrupt. So after each capture
the ranks exchange how it went, and all of them drop a bucket that failed on any; and before each replay they
exchange whether a guarded buffer moved (one small CPU reduction), and all retire the bank if one did. Waits are
bounded; an expired one is an error, at startup naming the ranks that are missing.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
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

    def any(self, problem: bool) -> bool:
        """Whether any rank has a problem; every rank must ask at the same point of the same step.

        Raises:
            RankError: if a rank does not come within the wait.
        """
        if self.size == 1:
            return problem
        flag = torch.tensor([int(problem)], dtype=torch.int32)
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        try:
            work.wait(self._wait)
        except RuntimeError as e:
            raise RankError(f"rank {self.rank} waited {self._wait.total_seconds():g} s in a step: {e}") from e
        return bool(flag.item())

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
