"""CUDA-graph prefill for DeepSeek-V4.1 on SGLang, as a plugin.

Public API: ``__version__``, and for extensions ``hookimpl`` and the types their hooks receive and return.
Everything else is internal. Importing this package imports neither torch nor the engine.
"""

from typing import TYPE_CHECKING, Any

from sglang_dsv4_graphs.version import __version__

if TYPE_CHECKING:
    from sglang_dsv4_graphs.bank.guard import GuardedBuffer
    from sglang_dsv4_graphs.extend import Probe, hookimpl

__all__ = ["GuardedBuffer", "Probe", "__version__", "hookimpl"]

_HOMES = {
    "GuardedBuffer": "sglang_dsv4_graphs.bank.guard",
    "Probe": "sglang_dsv4_graphs.extend",
    "hookimpl": "sglang_dsv4_graphs.extend",
}


def __getattr__(name: str) -> Any:
    # Late: the package is imported in every engine process, pluggy and torch only where they are needed.
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
