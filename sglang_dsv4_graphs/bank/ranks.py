"""All ranks decide alike: what is captured and what replays follows from what every rank reports.

Under tensor parallelism a rank that replays while another runs eagerly can hang or corrupt. So after each capture
the ranks exchange how it went, and all of them drop a bucket that failed on any; and before each replay they
exchange whether a guarded buffer moved (one small CPU reduction), and all retire the bank if one did. Waits are
bounded on every rank (``monitored_barrier`` bounds rank 0's alone); an expired one is an error, at startup naming
the ranks that are missing.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Longer than the slowest capture step that was measured by far (first-use kernel compilation: 60 s).
WAIT = timedelta(seconds=300)
# A report's place in a message; longer ones are cut.
REPORT_BYTES = 1024


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
        own = torch.zeros(REPORT_BYTES, dtype=torch.uint8)
        text = report.encode()[:REPORT_BYTES]
        own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        reports = [own if r == self.rank else torch.empty_like(own) for r in range(self.size)]
        others = [r for r in range(self.size) if r != self.rank]
        sent = [dist.isend(own, group=self._group, group_dst=r) for r in others]
        received = [dist.irecv(reports[r], group=self._group, group_src=r) for r in others]
        deadline = time.monotonic() + self._wait.total_seconds()
        missing = [f"rank {r}" for r, *works in zip(others, received, sent, strict=True) if not _done(works, deadline)]
        if missing:
            waited = f"rank {self.rank} waited {self._wait.total_seconds():g} s"
            raise RankError(f"{waited}: nothing came from {', '.join(missing)}")
        return [bytes(r.tolist()).rstrip(b"\0").decode(errors="replace") for r in reports]


def _done(works: list[Any], deadline: float) -> bool:
    """Whether all of ``works`` end before ``deadline``."""
    try:
        for work in works:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except RuntimeError:  # timed out, or the peer has gone
        return False
    return True
