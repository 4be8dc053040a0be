"""Values that the breaks of one replay share.

Layers of a range ask the same things of a step: which rows belong to which request, how many compressed positions a
row sees. The engine answers anew in every layer, because in an eager step nobody knows when a step ends. A replay
does: its breaks share one object that is made when it starts and dropped when it ends, so that no step can see
another's values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class StepShared:
    """Values of one replay, each made when first asked for."""

    def __init__(self) -> None:
        self._values: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of ``key``, from ``make`` the first time."""
        if key not in self._values:
            self._values[key] = make()
        value: T = self._values[key]
        return value
