"""Weight updates: what the engine does to a model in service, told to the banks that captured it.

The address guard compares all weights before every replay. What the engine derives from weights, and what is costly to
ask for, cannot be compared that often; an update is when it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Banks(Protocol):
    """Who is told."""

    def weights_changed(self) -> None: ...


class WeightUpdates:
    """AROUND hooks on the engine's ways to change weights (``engine.facts.WEIGHT_UPDATES``)."""

    def __init__(self, banks: Sequence[Banks]) -> None:
        self._banks = tuple(banks)

    def around(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Tell the banks afterwards, also if the update fails half-way; it may be one part of another."""
        try:
            return original(*args, **kwargs)
        finally:
            for banks in self._banks:
                banks.weights_changed()
