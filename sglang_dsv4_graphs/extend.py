"""The plugin's own structure, as pluggy hooks: what banks implement and what third parties may add.

Both banks are implementations of these hooks. Another package adds its own by exposing a module or object with
``@hookimpl`` functions under the entry-point group ``sglang_dsv4_graphs`` (docs/extending.md has an example that
is tested). Hooks run in the process that serves the model, on the thread that runs its steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from sglang_dsv4_graphs.bank.backend import GraphBackend
    from sglang_dsv4_graphs.bank.guard import GuardedBuffer
    from sglang_dsv4_graphs.bank.served import ServedModel, Step
    from sglang_dsv4_graphs.bank.sweep import Startup
    from sglang_dsv4_graphs.bank.views import Takeover

PROJECT = "sglang_dsv4_graphs"
ENTRY_POINT_GROUP = "sglang_dsv4_graphs"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class Probe:
    """What a guard implementation may look at: the engine's model runner, its attention backend, the model."""

    model_runner: Any
    attn_backend: Any
    model: Any


class Specs:
    """Hook specifications."""

    @hookspec
    def dsv4_graphs_model_built(self, served: ServedModel) -> None:
        """A model that this plugin serves was constructed (weights are not loaded yet)."""

    @hookspec
    def dsv4_graphs_startup(self, startup: Startup) -> None:
        """The engine has captured its own graphs: capture yours.

        Every kernel workspace has grown to the largest step before. Raise ``CaptureError`` to give up.
        """

    @hookspec
    def dsv4_graphs_step(self, step: Step) -> Takeover | None:
        """An ordinary extend step is about to run: return the layers you run in it, or None."""

    @hookspec
    def dsv4_graphs_guard(self, probe: Probe) -> Iterable[GuardedBuffer]:  # type: ignore[empty-body]
        """Buffers that captured kernels read by address and no bank owns."""

    @hookspec(firstresult=True)
    def dsv4_graphs_backend(self, device: str) -> GraphBackend | None:
        """A graph backend for a device that is not CUDA (the demo's and the tests' tape), or None."""

    @hookspec
    def dsv4_graphs_shutdown(self) -> None:
        """The plugin is being uninstalled: release everything."""


class ExtensionError(RuntimeError):
    """An installed extension could not be loaded; names its entry point."""


def make_manager(*, third_parties: bool = True) -> pluggy.PluginManager:
    """A plugin manager that knows the specifications and, if asked, every installed extension.

    Raises:
        ExtensionError: an extension does not import or implements a hook that does not exist. What it would have
            guarded or captured is then unknown, so nothing may be installed without it.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Specs)
    for entry in entry_points(group=ENTRY_POINT_GROUP) if third_parties else ():
        try:
            manager.register(entry.load(), name=entry.name)
            manager.check_pending()
        except Exception as e:
            raise ExtensionError(
                f"extension {entry.name!r} ({entry.value}) cannot be loaded: {type(e).__name__}: {e}; "
                "repair or uninstall it"
            ) from e
    return manager
