"""A recorder that records nothing: it counts breaks, and refuses what no recording can hold.

The engine's break wrappers ask for little of a capture: an end and a beginning of a segment, and a place for
the break. Between breaks every operation must keep its shapes whatever the data is, and none may read the
host.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_DATA_DEPENDENT = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::bincount",
    "aten::equal",
    "aten::repeat_interleave.Tensor",
)
_HOST_READS = ("numpy", "tolist", "item", "__array__")


class NotCapturable(AssertionError):
    """A segment read the host, or made a tensor whose shape depends on data."""


class _RefuseDataDependence(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name + ("." + func._schema.overload_name if func._schema.overload_name else "")
        if name in _DATA_DEPENDENT or func._schema.name in _DATA_DEPENDENT:
            raise NotCapturable(name)
        if func._schema.name in ("aten::index", "aten::index_put", "aten::index_put_"):
            for index in args[1]:
                if index is not None and index.dtype in (torch.bool, torch.uint8):
                    raise NotCapturable(f"{name} with a mask")
        return func(*args, **(kwargs or {}))


class StrictCapture:
    """Stands where the engine's capture object stands; ``breaks`` lists (function name, layer) in order."""

    _barrier_fn = None

    def __init__(self) -> None:
        self.cuda_graph = SimpleNamespace(_break_fns=[])
        self.segments = 0
        self._mode: Any = None
        self._saved: dict[str, Any] = {}

    @property
    def breaks(self) -> list[tuple[str, int]]:
        found = []
        for replay in self.cuda_graph._break_fns:
            held = inspect.getclosurevars(replay).nonlocals
            owner = held["captured_args"][0]
            layer = held["captured_args"][3] if isinstance(owner, torch.Tensor) else owner.layer_id
            found.append((held["captured_inner"].__name__, layer))
        return found

    def _begin_new_segment(self) -> None:
        self.segments += 1
        self._saved = {name: getattr(torch.Tensor, name) for name in _HOST_READS}
        for name in _HOST_READS:
            setattr(torch.Tensor, name, _refuse(name))
        self._mode = _RefuseDataDependence()
        self._mode.__enter__()

    def _end_current_segment(self) -> None:
        if self._mode is None:
            return  # a break failed: its segment had ended
        self._mode.__exit__(None, None, None)
        self._mode = None
        for name, original in self._saved.items():
            setattr(torch.Tensor, name, original)


def _refuse(name: str) -> Any:
    def refused(*args: Any, **kwargs: Any) -> Any:
        raise NotCapturable(f"Tensor.{name}")

    return refused


@contextmanager
def strict_capture() -> Iterator[StrictCapture]:
    """Capture strictly within the block."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph

    capture = StrictCapture()
    token = breakable_cuda_graph._current_capture_var.set(capture)
    capture._begin_new_segment()
    try:
        yield capture
    finally:
        breakable_cuda_graph._current_capture_var.reset(token)
        capture._end_current_segment()
