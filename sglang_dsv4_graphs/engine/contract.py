"""Contracts: how a thing of the engine that we rely on is written down, and looked up.

States no fact about the engine: those are in ``facts``.
"""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Contract:
    """One thing of the engine that we hook or call.

    ``signature`` is written as parameter names, ``=`` after a name with a default, ``*`` before keyword-only ones;
    None means that only the name must exist. ``versions`` limits it to engines that have it (empty: all).
    """

    name: str
    target: str
    signature: str | None = None
    versions: tuple[str, ...] = ()

    def holds_for(self, engine_version: str) -> bool:
        return not self.versions or release(engine_version) in self.versions


def release(engine_version: str) -> str:
    """The release part of a version: ``0.5.23`` of ``0.5.23.post1+cu130``."""
    return ".".join(engine_version.split("+")[0].split(".")[:3])


def describe_signature(obj: object) -> str:
    """``obj``'s parameters in this module's notation.

    Raises:
        ValueError: if ``obj`` has no signature.
    """
    if not callable(obj):
        raise ValueError(f"{obj!r} is not callable")
    parts: list[str] = []
    keyword_only = False
    for p in inspect.signature(obj).parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            parts.append("*" + p.name)
            keyword_only = True
            continue
        if p.kind is p.VAR_KEYWORD:
            parts.append("**" + p.name)
            continue
        if p.kind is p.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        parts.append(p.name if p.default is p.empty else p.name + "=")
    return ", ".join(parts)


def resolve(target: str) -> Any:
    """The object a dotted target names.

    Raises:
        ImportError, AttributeError: if it does not exist.
    """
    return pkgutil.resolve_name(target)
