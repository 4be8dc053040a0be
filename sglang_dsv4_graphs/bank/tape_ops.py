"""What a tape must know about single operations: which a CUDA graph would refuse, and what each reads and
writes.

On the CPU every host read just works, so a body that could never be captured on a GPU records without
complaint and replays the recorded step's values for ever. The refusals here stand in for the errors of a
capturing stream. They come from torch's own operator tags and schemas where these say enough, and from a
short list where they do not (Python methods that no dispatcher sees; operations that are fine with some
arguments only).

Stricter than a GPU where torch's CPU code is: ``one_hot`` checks its input's range on the host.

Not seen at all, because torch offers no place to see it: memory read through a raw pointer (``data_ptr``,
``torch.utils.dlpack.to_dlpack``), and what a custom operator does inside, which is one operation, as one
kernel is.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch

# Code between the user's line and the operation: torch, this tape, the standard library (copy, math).
_BETWEEN = (str(Path(torch.__file__).parent), str(Path(__file__).with_name("tape")), "<frozen")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd

# Python entry points that read or copy a tensor's memory without an operation.
HOST_READS = {
    torch.Tensor.tolist: "Tensor.tolist",
    torch.Tensor.numpy: "Tensor.numpy",
    torch.Tensor.__array__: "Tensor.__array__",
    torch.Tensor.__dlpack__: "Tensor.__dlpack__",
    torch.Tensor.__repr__: "Tensor.__repr__",
    torch.Tensor.__format__: "Tensor.__format__",
    torch.Tensor.__deepcopy__: "Tensor.__deepcopy__",
    torch.Tensor.cpu: "Tensor.cpu",
}
# Functions that upload a Python value if they are given a device.
_UPLOADS = {torch.tensor: "torch.tensor", torch.as_tensor: "torch.as_tensor", torch.asarray: "torch.asarray"}

_UNINITIALISED = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted"}
_UNINITIALISED |= {"aten::new_empty", "aten::new_empty_strided"}
_SHAPE_ONLY = {f"aten::{n}" for n in ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")}
# On a GPU these wait for the stream; no tag says so.
_WAITS = {"c10d::barrier", "aten::_linalg_check_errors"}
_OVERWRITES_SELF = {"aten::copy_", "aten::fill_", "aten::zero_"}
_SCALARS = {"IntType", "FloatType", "BoolType", "NumberType", "SymIntType", "SymBoolType", "StringType"}


@dataclass(frozen=True)
class Site:
    """A line of user code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    def with_source(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        return f"{self}: {source}" if source else str(self)


@cache
def _is_between(file: str) -> bool:
    # Packages may be installed inside the standard library's folder.
    installed = "site-packages" in file or "dist-packages" in file
    return file.startswith(_BETWEEN) or (file.startswith(_STANDARD_LIBRARY) and not installed)


def site_of(frame: FrameType) -> Site:
    return Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def user_site(frame: FrameType | None = None) -> Site:
    """The innermost line of user code, from ``frame`` (the caller's) outwards."""
    start = frame or sys._getframe(1)
    found: FrameType | None = start
    while found is not None and _is_between(found.f_code.co_filename):
        found = found.f_back
    return site_of(found or start)


def leaves(value: Any) -> Iterator[Any]:
    """Everything in nested lists, tuples and dict values, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def refused_call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why a Python-level call may not be captured, starting with its name; None if it may."""
    if func in HOST_READS:
        return f"{HOST_READS[func]} reads a tensor on the host"
    if func is torch.Tensor.new_tensor:
        return "Tensor.new_tensor uploads a host value"
    # "cpu" spelled out is a host tensor on every machine; any other device is where the model runs.
    if func in _UPLOADS and kwargs.get("device") not in (None, "cpu"):
        data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        if not isinstance(data, torch.Tensor):
            return f"{_UPLOADS[func]} uploads a host value"
    return None


@dataclass(frozen=True)
class OpFacts:
    """What holds for every call of one operator."""

    name: str
    refused: str | None
    arguments: tuple[str, ...]
    writes: frozenset[str]
    overwrites: frozenset[str]
    composite: bool
    skipped: bool
    constant: bool
    may_be_view: bool
    uninitialised: bool
    shape_only: bool
    waits: bool


def _refusal(func: Any) -> str | None:
    """The refusal that needs no arguments."""
    schema, space = func._schema, func.namespace
    if torch.Tag.data_dependent_output in func.tags:
        return "its result is read on the host (item(), bool(), int(), float(), an index, equal)"
    if schema.name in _WAITS or space.startswith("_c10d_functional"):
        return "it waits on the host or leaves an unfinished collective"
    if torch.Tag.dynamic_output_shape in func.tags and func not in (_INDEX, _REPEAT):
        return "its output's shape depends on data"
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    if seeded and not any(a.name == "dropout_p" for a in schema.arguments):
        return "it draws random numbers, which a replay would not repeat"
    if space not in ("aten", "prim", "prims", "profiler"):
        kinds = {r.type.kind() for r in schema.returns}
        if kinds & _SCALARS and any("Tensor" in str(a.type) for a in schema.arguments):
            return "it returns a number, which a replay could not update"
    return None


_LIFT = torch.ops.aten.lift_fresh.default
_INDEX, _REPEAT = torch.ops.aten.index.Tensor, torch.ops.aten.repeat_interleave.Tensor
_MASKS = (torch.bool, torch.uint8)


@cache
def facts_of(func: Any) -> OpFacts:
    """The facts of an ``OpOverload``."""
    schema, base = func._schema, func._schema.name
    writes = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    out = frozenset(a.name for a in schema.arguments if a.is_out)
    # An operator with a CPU kernel of its own runs as that kernel, as it would without the tape.
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return OpFacts(
        name=str(func),
        refused=_refusal(func),
        arguments=tuple(a.name for a in schema.arguments),
        writes=writes,
        overwrites=out | (frozenset({"self"}) if base in _OVERWRITES_SELF else frozenset()),
        composite=has(func.name(), "CompositeImplicitAutograd") and not has(func.name(), "CPU"),
        skipped=torch.Tag.inplace_view in func.tags or func.namespace == "profiler",
        constant=func is _LIFT,
        may_be_view=func.namespace == "aten" and not schema.is_mutable,
        uninitialised=base in _UNINITIALISED and not out,
        shape_only=base in _UNINITIALISED | _SHAPE_ONLY,
        waits=any("c10d.Work" in str(r.type) for r in schema.returns),
    )


class Call:
    """One call of an operator, with its arguments by name."""

    __slots__ = ("args", "bound", "facts", "func", "kwargs")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.facts = facts_of(func)
        self.bound: dict[str, Any] = {**dict(zip(self.facts.arguments, args, strict=False)), **kwargs}

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)


def refused_operation(call: Call) -> str | None:
    """Why an operation may not be captured; None if it may."""
    bound = call.bound
    if call.facts.refused is not None:
        return call.facts.refused
    if bound.get("dropout_p"):
        return "it draws random numbers, which a replay would not repeat"
    if call.func is _REPEAT and bound.get("output_size") is None:
        return "its output's shape depends on data unless output_size is given"
    if call.facts.constant and bound["self"].dim() > 0:
        return "it brings host data in (a list, an array, an index list), which a replay would not update"
    indices = bound.get("indices")
    if isinstance(indices, (list, tuple)):
        given = [i for i in indices if i is not None]
        if any(i.dtype in _MASKS for i in given) and not _is_masked_fill(call, len(given)):
            return "it indexes with a mask, so its shape depends on data"
    return None


def _is_masked_fill(call: Call, indices: int) -> bool:
    """``x[mask] = number``, which torch runs as a masked fill, without a shape that depends on data."""
    if call.func._schema.name not in ("aten::index_put_", "aten::index_put"):
        return False
    return indices == 1 and call.bound["values"].dim() == 0 and not call.bound.get("accumulate", False)
