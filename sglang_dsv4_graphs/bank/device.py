"""What the sweep needs of the device: free memory, giving memory back, and timing one call."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


class Device:
    """The device of one server; a CPU (demo, tests) has no memory to report."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device.startswith("cuda")

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[0]) if self.is_cuda else 0

    def room_bytes(self) -> int:
        """The most that a capture could get: free memory, and what the allocator holds for nobody."""
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() if self.is_cuda else 0
        return self.free_bytes() + int(unused)

    def release(self) -> None:
        """Give what nothing uses back to the device; pools of living graphs stay."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Run on ``stream``, after everything before and before everything after; None is the current one."""
        return self._ordered(stream) if self.is_cuda and stream is not None else nullcontext()

    @contextmanager
    def _ordered(self, stream: Any) -> Iterator[None]:
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            yield
        torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object]) -> float:
        """Wall time of ``call`` with everything it launched, from an idle device."""
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        """Wait for everything that was launched."""
        if self.is_cuda:
            torch.cuda.synchronize()
