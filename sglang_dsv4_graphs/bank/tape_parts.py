"""The parts of a tape: recorded operations, the segments they form, and the breaks between segments.

A replay must leave in every recorded tensor what the recorded run left there, given new inputs. So each
operation is held with aliases of its tensors, made when it was recorded: a parameter that is given new
storage later is read at its old address, as a kernel would read it, and a tensor reshaped in place later
keeps its recorded shape here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch

from sglang_dsv4_graphs.bank.tape_ops import Site, leaves, tensors_in


def aliases(value: Any) -> Any:
    """``value`` with every tensor replaced by a new one on the same storage; lists and tuples are copied."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if type(value) in (list, tuple):
        return type(value)(aliases(v) for v in value)
    return value


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """One element of every expanded dimension: a tensor that repeats elements cannot be copied into."""
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _kind(value: object) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _mode(inference: bool) -> AbstractContextManager[Any]:
    """Only inference mode may write to tensors that were made in it; an inference caller's mode is kept."""
    return torch.inference_mode() if inference else nullcontext()


class Op:
    """One recorded operation; ``results`` are its new tensors, by their position in what it returned."""

    __slots__ = ("_args", "_func", "_kwargs", "_results", "_waits", "site")

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: list[tuple[int, torch.Tensor]],
        *,
        waits: bool,
        site: Site,
    ) -> None:
        self.site = site
        self._func, self._waits = func, waits
        self._args, self._kwargs = aliases(args), {k: aliases(v) for k, v in kwargs.items()}
        self._results = [(i, t.detach(), 0 in t.stride()) for i, t in results]

    def __str__(self) -> str:
        return str(self._func)

    def run(self) -> None:
        result = self._func(*self._args, **self._kwargs)
        if self._waits:
            for leaf in leaves(result):
                if isinstance(leaf, torch.ScriptObject):
                    torch._C._distributed_c10d.Work.unbox(leaf).wait()
        if not self._results:
            return
        fresh = (result,) if isinstance(result, torch.Tensor) else tuple(leaves(result))
        for position, recorded, repeats in self._results:
            new = fresh[position]
            # copy_ would broadcast and convert: a result of another kind must not pass as the recorded one.
            if new is None or new.shape != recorded.shape or new.dtype != recorded.dtype:
                raise RuntimeError(f"{self}: {_kind(recorded)} when recorded, {_kind(new)} now")
            if repeats:
                _without_repeats(recorded).copy_(_without_repeats(new))
            else:
                recorded.copy_(new)


class Segment:
    """Operations between two breaks, in order. ``inference``: some were recorded in inference mode."""

    part: ClassVar[Literal["segment", "break"]] = "segment"

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.inference = False

    @property
    def name(self) -> str:
        return f"from {self.ops[0].site}" if self.ops else "empty"

    def run(self) -> None:
        with _mode(self.inference):
            for op in self.ops:
                op.run()

    def run_debug(self) -> None:
        """``run``, with a note on an error of which operation it was."""
        with _mode(self.inference):
            for op in self.ops:
                try:
                    op.run()
                except Exception as e:
                    e.add_note(f"in {op}, recorded at {op.site.with_source()}")
                    raise


class Break:
    """Eager code between two segments; ``call`` repeats it and is known once it has run."""

    part: ClassVar[Literal["segment", "break"]] = "break"

    def __init__(self, site: Site, *, inference: bool) -> None:
        self.site = site
        self.inference = inference
        self.call: Callable[[], object] | None = None

    @property
    def name(self) -> str:
        return f"{_wrapped_name(self.call)} from {self.site}"

    def run(self) -> None:
        assert self.call is not None
        with _mode(self.inference):
            self.call()

    run_debug = run


def _closed_over(call: object) -> list[Any]:
    """A function's closure: of the engine's replay function its arguments, its function, its output."""
    return [cell.cell_contents for cell in getattr(call, "__closure__", None) or ()]


def _wrapped_name(call: object) -> str:
    """The name of the function that a replay function wraps, or its own."""
    for value in [*_closed_over(call), call]:
        if callable(value) and hasattr(value, "__qualname__"):
            return value.__qualname__
    return repr(call)


def held_by(call: object) -> list[torch.Tensor]:
    """Tensors that a replay function holds directly, and attributes of an object it holds (a break's result).

    Objects among the arguments are not looked into: what a break hides there is nobody's to keep.
    """
    found: list[torch.Tensor] = []
    for value in _closed_over(call):
        found += tensors_in(value)
        if not callable(value) and not isinstance(value, torch.Tensor):
            found += tensors_in(list(getattr(value, "__dict__", {}).values()))
    return found
