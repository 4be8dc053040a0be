"""Functions put in front of an object's methods for a while, and every one of them taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]
_ABSENT = object()


class Patches:
    """Replacements of attributes on instances and of elements in lists; ``undo`` puts everything back, latest first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, make: Callable[[Call], Call]) -> None:
        """Put ``make(owner.name)`` on the instance ``owner`` in front of its method ``name``.

        Raises:
            AttributeError: ``owner`` has no such method.
        """
        original = getattr(owner, name)
        own = vars(owner).get(name, _ABSENT)

        def undo() -> None:
            if own is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        setattr(owner, name, make(original))
        self._undo.append(undo)

    def replace_all(self, items: list[Any], make: Callable[[Any], Any]) -> None:
        """Replace every element of ``items`` in place."""
        before = list(items)

        def undo() -> None:
            items[:] = before

        items[:] = [make(item) for item in before]
        self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()

    def __bool__(self) -> bool:
        return bool(self._undo)
