"""A recording under way: what a capturing stream is to a CUDA graph.

Two torch modes watch the body, one for Python-level calls and one for operations below autograd. Both stay on
for the whole body, and only look on during breaks: the body may have put modes of its own on top (a default
device is one), so they cannot be taken off in between.

Composite operations are recorded by their parts. Without gradients torch splits them before a mode sees them,
but inference mode hands them over whole, with host reads hidden inside.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dsv4_graphs.bank.backend import Body, CaptureError
from sglang_dsv4_graphs.bank.tape_memory import Ledger, Owner, storage_key
from sglang_dsv4_graphs.bank.tape_ops import (
    COMPOSITE,
    Call,
    Site,
    leaves,
    refused_call,
    refused_operation,
    site_of,
    tensors_in,
    user_site,
)
from sglang_dsv4_graphs.bank.tape_parts import Break, Op, Segment, held_by


class _BreakFunctions:
    """What the engine's wrapper knows as ``capture.cuda_graph``: where it leaves its replay functions."""

    def __init__(self) -> None:
        self._break_fns: list[Callable[[], object]] = []


class Capture:
    """Collects the parts of one body; the underscored names are what the engine's break wrapper uses.

    Used once. ``segment`` is the open one, None outside segments. Does not set the engine's context variable.
    """

    _barrier_fn = None

    def __init__(self) -> None:
        self.cuda_graph = _BreakFunctions()
        self.ledger = Ledger()
        self.parts: list[Segment | Break] = []
        self.segment: Segment | None = None
        self._failure: CaptureError | None = None
        self._random_state: torch.Tensor | None = None

    @property
    def index(self) -> int:
        """The number of the open segment, or of the next one."""
        return (len(self.parts) + 1) // 2

    def run(self, body: Body) -> list[torch.Tensor | None]:
        """Record ``body`` and return its outputs."""
        with _CallMode(self), _OpMode(self):
            self._open()
            outputs = body()
            self._close()
        if self._failure is not None:  # raised already, and swallowed by the body
            raise self._failure
        if not isinstance(outputs, (list, tuple)) or not all(t is None or isinstance(t, torch.Tensor) for t in outputs):
            raise CaptureError(f"a body must return a list of tensors and None, not {type(outputs).__name__}")
        return list(outputs)

    def fail(self, what: str, site: Site) -> CaptureError:
        """The error to raise; the first one ends the recording even if the body swallows it."""
        error = CaptureError(f"{what}\n  at {site.with_source()}")
        self._failure = self._failure or error
        return error

    def _open(self) -> None:
        self._random_state = torch.get_rng_state()
        self.segment = Segment()

    def _close(self) -> None:
        segment, self.segment = self.segment, None
        assert segment is not None
        assert self._random_state is not None
        # Operators say by a tag that they draw random numbers; custom ones may not.
        if not torch.equal(self._random_state, torch.get_rng_state()):
            raise self.fail(f"segment {self.index} ({segment.name}) drew random numbers", user_site())
        self.parts.append(segment)

    def _end_current_segment(self) -> None:
        caller = sys._getframe(1)
        site = _break_site(caller)
        if self.segment is None:
            raise self.fail("a break inside a break", site)
        index = self.index
        self._close()
        self.parts.append(Break(site, inference=torch.is_inference_mode_enabled()))
        # What the wrapper holds before the break has run are the break's arguments, wherever it keeps them.
        for tensor in tensors_in(dict(caller.f_locals)):
            self.ledger.read(tensor, "a break as its argument", index, site)

    def _begin_new_segment(self) -> None:
        calls, last = self.cuda_graph._break_fns, self.parts[-1] if self.parts else None
        if self.segment is not None or not isinstance(last, Break) or len(calls) != self.index:
            raise self.fail("a segment begins without one break before it", user_site())
        last.call = calls[-1]
        # The ledger knows the arguments by now; what else the replay function holds is new: the result.
        for tensor in held_by(last.call):
            self.ledger.own(tensor, Owner.BRIDGE)
        self._open()

    def operation(self, call: Call) -> Any:
        """Run one operation of the open segment and note it."""
        site = user_site()
        reason = refused_operation(call)
        if reason is not None:
            raise self.fail(f"{call.facts.name} cannot be captured: {reason}", site)
        # What happens from here on is not the body's doing, so its calls are none to be watched.
        with torch._C.DisableTorchFunction():
            result = call.run()
            try:
                self._note(call, result, site)
            except NotImplementedError as e:
                raise self.fail(f"{call.facts.name} uses a tensor without plain storage: {e}", site) from e
        return result

    def _note(self, call: Call, result: Any, site: Site) -> None:
        facts, segment = call.facts, self.segment
        assert segment is not None
        if facts.skipped:
            return
        if facts.constant:
            self.ledger.own(result, Owner.CONSTANT)
            return
        given = {storage_key(t) for t in tensors_in(call.bound)}
        results = [(i, t) for i, t in enumerate(leaves(result)) if isinstance(t, torch.Tensor)]
        new = [(i, t) for i, t in results if storage_key(t) not in given]
        if results and not new and facts.may_be_view:
            return
        self._note_memory(call, [t for _, t in new], site)
        if not facts.uninitialised:
            segment.ops.append(Op(call.func, call.args, call.kwargs, new, waits=facts.waits, site=site))
            segment.inference |= torch.is_inference_mode_enabled()

    def _note_memory(self, call: Call, new: list[torch.Tensor], site: Site) -> None:
        facts = call.facts
        for name in facts.writes:
            if any(self.ledger.owner(t) is Owner.CONSTANT for t in tensors_in(call.bound.get(name))):
                raise self.fail(f"{facts.name} writes to a host constant", site)
        for name, value in call.bound.items():
            if name not in facts.overwrites and not facts.shape_only:
                for tensor in tensors_in(value):
                    self.ledger.read(tensor, facts.name, self.index, site)
        for name in facts.overwrites:
            for tensor in tensors_in(call.bound.get(name)):
                self.ledger.overwrite(tensor)
        for tensor in new:
            self.ledger.own(tensor, Owner.SEGMENT)


def _break_site(caller: FrameType) -> Site:
    """The line that called the break: the first outside the wrapper's file, torch and the tape."""
    frame: FrameType | None = caller
    while frame is not None and frame.f_code is not Capture.run.__code__:
        site = user_site(frame)
        if site.file != caller.f_code.co_filename:
            return site
        frame = frame.f_back
    return site_of(caller.f_back or caller)


class _CallMode(TorchFunctionMode):
    """Sees Python-level calls: host reads that are no operation."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._capture.segment is not None:
            reason = refused_call(func, args, kwargs)
            if reason is not None:
                raise self._capture.fail(reason, user_site())
        return func(*args, **kwargs)


class _OpMode(TorchDispatchMode):
    """Sees every operation below autograd."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._capture.segment is None:
            return func(*args, **kwargs)
        # Subclasses that dispatch in Python hold their memory elsewhere; parameters and their like do not.
        strange = {t.__name__ for t in types if t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__}
        if strange:
            raise self._capture.fail(f"{func} on tensors of type {', '.join(sorted(strange))}", user_site())
        call = Call(func, args, kwargs)
        if call.facts.composite:
            with self:
                return func._op_dk(COMPOSITE, *args, **kwargs)
        return self._capture.operation(call)
