"""The engine's real DeepseekV4Model on a machine without a GPU, for the tests and the demo.

Importing this package costs nothing: torch and the engine are imported when a name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_dsv4_graphs.cpu_engine.batches import Request
    from sglang_dsv4_graphs.cpu_engine.build import build_runner
    from sglang_dsv4_graphs.cpu_engine.config import ModelShape
    from sglang_dsv4_graphs.cpu_engine.runner import CpuRunner, StepResult
    from sglang_dsv4_graphs.cpu_engine.substitutes import apply_substitutes

__all__ = ["CpuRunner", "ModelShape", "Request", "StepResult", "apply_substitutes", "build_runner"]

_HOMES = {
    "CpuRunner": "runner",
    "ModelShape": "config",
    "Request": "batches",
    "StepResult": "runner",
    "apply_substitutes": "substitutes",
    "build_runner": "build",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
