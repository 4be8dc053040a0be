"""CUDA-graph semantics without a GPU: a tape of tensor operations that is re-run on the same storages.

Capture and replay are where this plugin can be wrong in ways that eager code cannot (a stale address, a value
of the recorded step, a read of freed memory), so they must be tested where tests run: on machines without a
GPU.

While a body runs, every tensor operation of a segment is noted with its tensors. A replay repeats the
operations in order: in-place and ``out=`` operations write where they wrote, other results are copied into
the recorded result's storage, views are left out because their tensors still alias. Uninitialised allocations
are left out as well: their memory holds what the last replay, or the poison, left in it.

Strict where a capturing stream would be, and more (``tape_ops``): an operation that it refuses is a
``CaptureError`` even if the body swallows it. Breaks go through the engine's own wrapper, which finds the
capture object in the engine's context variable. That variable is given to the backend; beyond it the tape
knows four attribute names that the wrapper uses, and nothing else of the engine.

Functions under ``torch.compile`` run, and are recorded, uncompiled: torch leaves them so under a dispatch
mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from sglang_dsv4_graphs.bank.backend import Body, CaptureError, GraphBackend, Recording, ReplayFault
from sglang_dsv4_graphs.bank.tape_capture import Capture
from sglang_dsv4_graphs.bank.tape_memory import ExternalRead
from sglang_dsv4_graphs.bank.tape_ops import user_site

# The tape under way in this context, whichever backend object records it.
_recording_var: ContextVar[Capture | None] = ContextVar("tape_recording", default=None)


class TapeRecording(Recording):
    """A tape. Beyond the contract it names, and poisons, the memory that a CUDA graph could not rely on."""

    def __init__(self, capture: Capture, outputs: list[torch.Tensor | None], *, poison: bool) -> None:
        self.outputs = outputs
        self._parts = capture.parts
        self._ledger = capture.ledger
        self._poison = poison
        self.breaks = len(self._parts) // 2
        self.segments = self.breaks + 1

    def replay(self) -> None:
        with self._scope():
            for part in self._parts:
                part.run()

    def replay_debug(self) -> None:
        with self._scope():
            for i, part in enumerate(self._parts):
                try:
                    part.run_debug()
                except Exception as e:
                    raise ReplayFault(part.part, i // 2, part.name, f"{type(e).__name__}: {e}") from e

    def external_reads(self, keep: Iterable[torch.Tensor] = ()) -> list[ExternalRead]:
        """Tensors that the recording reads and neither it nor anything in ``keep`` owns, one per storage.

        ``keep``: what the recorder holds: weights, static inputs, caches, buffers that breaks fill.
        """
        return self._ledger.external_reads(keep)

    def poison(self, keep: Iterable[torch.Tensor]) -> None:
        """Spoil, once, what a CUDA graph may not find as it left it: the segments' memory and external reads.

        Floats become NaN, integers far out of range (8-bit ones 63), bools are flipped. Whole storages are
        spoilt, so ``keep`` must name everything that is in use elsewhere. What breaks returned is left alone.
        """
        with torch.inference_mode():
            self._ledger.poison_own()
            self._ledger.poison_foreign(keep)

    @contextmanager
    def _scope(self) -> Iterator[None]:
        capture = _recording_var.get()
        if capture is not None and capture.segment is not None:
            raise capture.fail("a replay inside a segment that is being recorded", user_site())
        with torch.no_grad():
            if self._poison:
                with torch.inference_mode():
                    self._ledger.poison_own()
            yield


class TapeBackend(GraphBackend):
    """Records tapes. ``capture_var`` is the context variable in which break wrappers look for a capture.

    With ``poison``, every replay first spoils the memory that its segments allocated: whatever a replay does
    not write anew shows.
    """

    name = "tape"

    def __init__(self, capture_var: ContextVar[Any], *, poison: bool = False) -> None:
        self._capture_var = capture_var
        self._poison = poison

    def record(self, body: Body, *, warmups: int = 2) -> TapeRecording:
        outer = _recording_var.get()
        if outer is not None:
            raise outer.fail("a recording inside a recording", user_site())
        if self._capture_var.get() is not None:
            raise CaptureError("a recording while another capture is under way")
        with torch.no_grad():
            for _ in range(warmups):
                body()
            capture = Capture()
            own_token, token = _recording_var.set(capture), self._capture_var.set(capture)
            try:
                outputs = capture.run(body)
            finally:
                self._capture_var.reset(token)
                _recording_var.reset(own_token)
        return TapeRecording(capture, outputs, poison=self._poison)
