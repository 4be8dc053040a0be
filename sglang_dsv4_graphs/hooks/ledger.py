"""The ledger of patches: what was put where, what was there, and how to take it back.

The engine's ``HookRegistry`` wraps functions well (descriptors, modules that imported them by name) but neither
undoes a hook nor says whether it took effect; it skips a target that another plugin has patched before, and would
apply ours twice if a later plugin comes to the same target. So each patch goes through its way of applying one
target, with our hook alone, and is checked and recorded. Undoing replays the list backwards; where somebody wrapped
our wrapper since, it stays in the chain but passes everything through. Undoing twice is harmless.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_dsv4_graphs.engine.api import Engine
from sglang_dsv4_graphs.engine.contract import Contract, resolve
from sglang_dsv4_graphs.engine.facts import ENTRY_POINT
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
        if any(_content(cell) is hook for cell in getattr(obj, "__closure__", None) or ()):
            return True
        obj = getattr(obj, "__wrapped__", None)
    return False


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty, as in a closure that refers to itself
        return None


class _Switch:
    """Whether the hooks of one installation still act."""

    def __init__(self) -> None:
        self.on = True

    def guard(self, kind: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """``hook`` while the switch is on; afterwards as if it were not there."""

        def hooked(*args: Any, **kwargs: Any) -> Any:
            if self.on:
                return hook(*args, **kwargs)
            return args[0](*args[1:], **kwargs) if kind == "around" else None

        return hooked


class Ledger:
    """Applies hooks through the engine's registry and takes them back."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._patches: list[Patch] = []
        self._switch = _Switch()

    @property
    def patches(self) -> tuple[Patch, ...]:
        return tuple(self._patches)

    def apply(self, hooks: list[tuple[Contract, str, Callable[..., Any]]]) -> None:
        """Apply every (contract, hook type, hook); all take effect or none stays.

        Raises:
            PatchError: naming the target whose hook did not take effect.
            ImportError, AttributeError: a target does not exist; nothing was applied.
        """
        for contract, _, _ in hooks:
            resolve(contract.target)
        self._switch = _Switch()
        try:
            for contract, kind, hook in hooks:
                self._apply_one(contract.target, kind, self._switch.guard(kind, hook))
        except BaseException:
            self.undo()
            raise

    def _apply_one(self, target: str, kind: str, hook: Callable[..., Any]) -> None:
        owner, attribute = owner_of(target)
        old = raw_attribute(owner, attribute)
        source = self._engine.HookSource(plugin_name=ENTRY_POINT, dist_name=DISTRIBUTION)
        try:
            self._engine.hook_registry_apply(target, [(self._engine.HookType(kind), hook, source)])
        except Exception as e:
            raise PatchError(f"{target}: the engine's hook registry did not apply our hook ({e})") from e
        new = raw_attribute(owner, attribute)
        self._patches.append(Patch(target, owner, attribute, old, new, hook))
        inner = new.__func__ if isinstance(new, classmethod | staticmethod) else new
        if not hook_in_chain(inner, hook):
            raise PatchError(f"{target}: the engine's hook registry did not apply our hook")

    def undo(self) -> None:
        """Put back what was there, newest patch first."""
        self._switch.on = False
        back: list[Patch] = []
        while self._patches:
            patch = self._patches.pop()
            if raw_attribute(patch.owner, patch.attribute) is patch.new and patch.new is not patch.old:
                setattr(patch.owner, patch.attribute, patch.old)
                back.append(patch)
        _rebind_importers(back)


def _rebind_importers(patches: list[Patch]) -> None:
    """Give modules that imported a patched function by name the old one back, as the registry gave them the new.

    In one look at all modules, which are thousands. ``patches`` are the newest first: what one puts back may be what
    an older one of the same target put there.
    """
    old: dict[int, Any] = {}
    for patch in reversed(patches):
        old[id(patch.new)] = old.get(id(patch.old), patch.old)
    if not old:
        return
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in old:
                setattr(module, name, old[id(value)])
