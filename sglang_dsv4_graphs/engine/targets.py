"""The engine's functions as attributes, by the names of their contracts."""

from __future__ import annotations

from typing import Any

from sglang_dsv4_graphs.engine.contract import release, resolve
from sglang_dsv4_graphs.engine.facts import HOOKS, contracts_for


class Targets:
    """What the contracts of an engine version name; attributes are resolved when first used."""

    def __init__(self, engine_version: str) -> None:
        self.version = engine_version
        self.release = release(engine_version)
        self._targets = {c.name: c.target for c in contracts_for(engine_version)}

    def __getattr__(self, name: str) -> Any:
        targets: dict[str, str] = self.__dict__.get("_targets", {})
        if name not in targets:
            raise AttributeError(f"the engine {self.__dict__.get('version')} has no contract {name!r}")
        value = resolve(targets[name])
        # Hook targets change when hooks are applied; everything else is fixed.
        if not any(c.name == name for c in HOOKS):
            self.__dict__[name] = value
        return value

    def has(self, name: str) -> bool:
        """Whether this engine version has the contract ``name``."""
        return name in self._targets
