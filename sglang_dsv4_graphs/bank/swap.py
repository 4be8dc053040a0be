"""One message from every rank to every other, with a bound on the wait and names for those that do not come.

``monitored_barrier`` bounds the wait of rank 0 alone and ``all_gather`` does not say who is missing.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# A message's place; longer ones are cut.
MESSAGE_BYTES = 1024


def swap(message: str, rank: int, size: int, group: Any, wait: timedelta) -> tuple[list[str], list[int]]:
    """Send ``message`` to every other rank and take one from each: all messages, and the ranks that are missing."""
    own = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8, device="cpu")
    data = message.encode()[:MESSAGE_BYTES]
    own[: len(data)] = torch.tensor(list(data), dtype=torch.uint8, device="cpu")
    messages = [own if r == rank else torch.empty_like(own) for r in range(size)]
    others = [r for r in range(size) if r != rank]
    deadline = time.monotonic() + wait.total_seconds()
    try:
        sent = [dist.isend(own, group=group, group_dst=r) for r in others]
        received = [dist.irecv(messages[r], group=group, group_src=r) for r in others]
    except RuntimeError:  # a connection is closed already
        return [], others
    missing = [r for r, *works in zip(others, received, sent, strict=True) if not _done(works, deadline)]
    return [bytes(m.tolist()).rstrip(b"\0").decode(errors="replace") for m in messages], missing


def _done(works: list[Any], deadline: float) -> bool:
    """Whether all of ``works`` end before ``deadline``."""
    try:
        for work in works:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except RuntimeError:  # timed out, or the peer has gone
        return False
    return True
