"""The ledger of patches: what was put where, what was there, and how to take it back.

The engine's ``HookRegistry`` applies hooks but neither undoes them nor says whether it did: it skips a target
that was patched before and logs an exception instead of raising it. So each patch is checked after applying, and
recorded so that undoing replays the list backwards. Undoing twice is harmless.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_dsv4_graphs.engine.api import Engine
from sglang_dsv4_graphs.engine.facts import ENTRY_POINT, Contract, resolve
from sglang_dsv4_graphs.version import DISTRIBUTION


class PatchError(RuntimeError):
    """A hook did not take effect."""


@dataclass(frozen=True)
class Patch:
    """One patched attribute."""

    target: str
    owner: Any
    attribute: str
    old: Any
    new: Any
    hook: Callable[..., Any]


def owner_of(target: str) -> tuple[Any, str]:
    """The object that holds ``target``'s last name, and that name."""
    path, _, attribute = target.rpartition(".")
    return resolve(path), attribute


def raw_attribute(owner: Any, attribute: str) -> Any:
    """What ``owner`` itself holds, without the descriptor protocol."""
    return vars(owner)[attribute] if attribute in vars(owner) else getattr(owner, attribute)


def hook_in_chain(obj: Any, hook: Callable[..., Any]) -> bool:
    """Whether ``hook`` is called somewhere in the wrapper chain of ``obj``."""
    while obj is not None:
        cells = getattr(obj, "__closure__", None) or ()
        if any(cell.cell_contents is hook for cell in cells):
            return True
        obj = getattr(obj, "__wrapped__", None)
    return False


class Ledger:
    """Applies hooks through the engine's registry and takes them back."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._patches: list[Patch] = []

    @property
    def patches(self) -> tuple[Patch, ...]:
        return tuple(self._patches)

    def apply(self, hooks: list[tuple[Contract, str, Callable[..., Any]]]) -> None:
        """Register every (contract, hook type, hook) and apply them; all take effect or none stays.

        Raises:
            PatchError: naming the target whose hook did not take effect.
        """
        before: list[tuple[str, Any, str, Any, Callable[..., Any]]] = []
        source = self._engine.HookSource(plugin_name=ENTRY_POINT, dist_name=DISTRIBUTION)
        for contract, _, hook in hooks:
            owner, attribute = owner_of(contract.target)
            before.append((contract.target, owner, attribute, raw_attribute(owner, attribute), hook))
        for contract, kind, hook in hooks:
            self._engine.hook_registry_register(contract.target, hook, self._engine.HookType(kind), source=source)
        self._engine.hook_registry_apply()
        failed = ""
        for target, owner, attribute, old, hook in before:
            new = raw_attribute(owner, attribute)
            self._patches.append(Patch(target, owner, attribute, old, new, hook))
            if not hook_in_chain(new, hook):
                failed = failed or target
        if failed:
            self.undo()
            raise PatchError(f"{failed}: the engine's hook registry did not apply our hook")

    def undo(self) -> None:
        """Put back what was there, newest patch first."""
        while self._patches:
            patch = self._patches.pop()
            self._forget(patch)
            if raw_attribute(patch.owner, patch.attribute) is patch.new and patch.new is not patch.old:
                setattr(patch.owner, patch.attribute, patch.old)
                _rebind_importers(patch.new, patch.old)

    def _forget(self, patch: Patch) -> None:
        """Take our hook out of the registry, so that a later apply does not bring it back."""
        registry = self._engine.hook_registry
        left = [entry for entry in registry._hooks.get(patch.target, []) if entry[1] is not patch.hook]
        if left:
            registry._hooks[patch.target] = left
        else:
            registry._hooks.pop(patch.target, None)
            registry._patched.discard(patch.target)


def _rebind_importers(new: Any, old: Any) -> None:
    """Give modules that imported the patched function by name the old one back, as the registry gave them the new."""
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if value is new:
                setattr(module, name, old)
