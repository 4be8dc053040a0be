"""Streams for a machine that has one: everything runs in order, at once.

Inside a breakable scope the engine sends layers without compression down a prepare that forks side streams
and stores their K with whatever slots the capture saw. That path must stay reachable here, or no test could
tell that a bank keeps out of it. So the model's module, and nothing else, gets a ``torch`` whose streams do
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class InlineEvent:
    """An event that has always happened."""

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class InlineStream:
    """A stream on which work is done when it is issued."""

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: InlineEvent | None = None) -> InlineEvent:
        return event or InlineEvent()


class CudaNamespace:
    """``torch.cuda`` with inline streams; every other name is torch's own."""

    Stream = InlineStream
    Event = InlineEvent

    def __init__(self) -> None:
        self._current = InlineStream()

    def current_stream(self, device: Any = None) -> InlineStream:
        return self._current

    @contextmanager
    def stream(self, stream: InlineStream | None) -> Iterator[None]:
        previous, self._current = self._current, stream or self._current
        try:
            yield
        finally:
            self._current = previous

    def is_current_stream_capturing(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class TorchNamespace:
    """``torch`` for one module: its ``cuda`` and its device module are a ``CudaNamespace``."""

    def __init__(self) -> None:
        self.cuda = CudaNamespace()

    def get_device_module(self, device: Any = None) -> CudaNamespace:
        return self.cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
