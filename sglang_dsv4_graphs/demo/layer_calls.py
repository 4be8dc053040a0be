"""Counts how often Python enters a decoder layer: the host work that a replay saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

# A layer's entry points: 0.5.23's loop calls the layer itself, 0.5.22's this method of it.
ENTRIES = ("forward", "forward_hc_pre_from_prev")


class LayerCalls:
    """Wraps the entries of every layer for the rest of the process; ``count`` grows by one per call."""

    def __init__(self, layers: Iterable[Any]) -> None:
        self.count = 0
        self._paused = False
        for layer in layers:
            for name in ENTRIES:
                if hasattr(layer, name):
                    setattr(layer, name, self._counted(getattr(layer, name)))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls in here are none of the step's own (comparisons)."""
        saved, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = saved

    def _counted(self, entry: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += not self._paused
            return entry(*args, **kwargs)

        return call
