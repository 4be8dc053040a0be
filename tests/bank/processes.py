"""Ranks as real processes with a gloo world, for tests of what they must decide alike."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT_S = 180


def run_ranks(size: int, function: Callable[..., Any], folder: Path) -> list[Any]:
    """What ``function(rank, size)`` returned in each of ``size`` processes with a gloo group."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    store = str(folder / "store")
    processes = [spawn.Process(target=_enter, args=(function, rank, size, store, results)) for rank in range(size)]
    for p in processes:
        p.start()
    deadline = time.monotonic() + TIMEOUT_S
    for p in processes:
        p.join(max(0.0, deadline - time.monotonic()))
    codes = [p.exitcode for p in processes]
    for p in processes:
        p.kill()
    assert codes == [0] * size
    return [value for _, value in sorted(results.get() for _ in range(size))]


def _enter(function: Callable[..., Any], rank: int, size: int, store: str, results: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    results.put((rank, function(rank, size)))
    # A peer that ends its process early would break the connections of one that still reads.
    with suppress(RuntimeError):
        dist.monitored_barrier(timeout=timedelta(seconds=20))
    os._exit(0)


def a_group(size: int) -> Any:
    import torch.distributed as dist

    return dist.new_group(list(range(size)), backend="gloo", use_local_synchronization=True)
