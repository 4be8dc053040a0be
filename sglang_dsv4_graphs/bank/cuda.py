"""CUDA graphs: the engine's own breakable graphs behind the backend contract.

A breakable graph is a list of CUDA graphs (segments) with eager calls (breaks) between them. The engine's class
is used as it is, in the engine's pool and on its capture stream: the allocator hands a pool's free blocks only to
the stream that freed them, and the ranges never run at the same time as each other or as the prefill graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from sglang_dsv4_graphs.bank.backend import CaptureError, GraphBackend, Recording, ReplayFault
from sglang_dsv4_graphs.bank.ranks import Ranks, brief
from sglang_dsv4_graphs.bank.workspace import hold_workspace
from sglang_dsv4_graphs.engine.api import Engine
from sglang_dsv4_graphs.log import logger

Body = Callable[[], list[torch.Tensor | None]]


class CudaRecording(Recording):
    """A captured breakable graph."""

    def __init__(self, engine: Engine, graph: Any, outputs: list[torch.Tensor | None]) -> None:
        self._engine = engine
        self._graph = graph
        self.outputs = outputs
        self.segments = len(graph._segments)
        self.breaks = len(graph._break_fns)

    def replay(self) -> None:
        with self._engine.pool_replay_scope():
            self._graph.replay()

    def replay_debug(self) -> None:
        """Segment by segment with a sync after each, so that an asynchronous fault is named where it happened."""
        with self._engine.pool_replay_scope():
            for i, segment in enumerate(self._graph._segments):
                self._step("segment", i, f"of {self.segments}", segment.replay)
                if i < self.breaks:
                    call = self._graph._break_fns[i]
                    self._step("break", i, break_name(call), call)

    @staticmethod
    def _step(part: Literal["segment", "break"], index: int, name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            torch.cuda.synchronize()
        except Exception as e:
            raise ReplayFault(part, index, name, e) from e


def break_name(call: Callable[[], Any]) -> str:
    """The function that a break calls, found in the replay closure the engine made for it."""
    for cell in getattr(call, "__closure__", None) or ():
        name = getattr(cell.cell_contents, "__name__", None)
        if name and callable(cell.cell_contents):
            return str(name)
    return "?"


class CudaGraphBackend(GraphBackend):
    """Records bodies as breakable CUDA graphs in one pool, on one stream, all ranks in step.

    The ranks meet where the engine's own captures have barriers, and once more at both ends of the engine's capture
    scope: leaving that scope may be a collective (all-reduce inputs are registered), so all of them enter it, and none
    leaves it before every other has recorded or told what stopped it.
    """

    name = "cuda"

    def __init__(self, engine: Engine, *, pool: Any, stream: Any, ranks: Ranks, shared: bool = False) -> None:
        """``shared``: others capture into ``pool`` too, before or after us."""
        self._engine = engine
        self._shared = shared
        self._pool = pool
        self._stream = stream
        self._ranks = ranks

    def scratch(self) -> GraphBackend:
        return self.apart()

    def apart(self) -> GraphBackend:
        return CudaGraphBackend(
            self._engine, pool=torch.cuda.graph_pool_handle(), stream=self._stream, ranks=self._ranks
        )

    def settle(self) -> None:
        """Take the stream's workspace again.

        A failure is no reason to end a step: what graphs use stays mapped where it was, in a pool that nobody else
        takes from, and the next capture takes the workspace again or fails as a capture.
        """
        try:
            hold_workspace(self._stream)
        except Exception:
            logger.warning("the capture stream's workspace could not be taken again", exc_info=True)

    def record(self, body: Body, *, warmups: int = 2) -> Recording:
        engine = self._engine
        noted = _Noted(body)
        try:
            hold_workspace(self._stream)
            if self._shared:
                hold_pool(self._pool, self._stream)
            self._ranks.rendezvous()
            with engine.graph_capture(stream=self._stream) as context, self._ranks.telling():
                with noted.reasons():
                    graph, outputs = self._record(noted, warmups, context.stream)
                self._ranks.rendezvous()
        except Exception as e:
            # A later capture would register them with its own, at addresses that are gone or of another order by rank.
            engine.forget_graph_inputs()
            raise CaptureError(brief(e)) from e
        torch.cuda.current_stream().wait_stream(context.stream)
        torch.cuda.synchronize()
        return CudaRecording(engine, graph, outputs)

    def _record(self, body: Body, warmups: int, stream: Any) -> tuple[Any, list[torch.Tensor | None]]:
        engine = self._engine
        engine.set_graph_pool_id(self._pool)
        for _ in range(warmups):
            torch.cuda.synchronize()
            self._ranks.rendezvous()
            body()
        graph = engine.BreakableCUDAGraph()
        with (
            engine.pool_capture_scope(),
            engine.BreakableCUDAGraphCapture(
                cuda_graph=graph, pool=self._pool, stream=stream, barrier_fn=self._ranks.rendezvous
            ),
        ):
            return graph, body()


# Graphs that keep a shared pool in use, by pool; for the life of the process.
_HELD: dict[Any, torch.cuda.CUDAGraph] = {}


def hold_pool(pool: Any, stream: Any) -> None:
    """Keep ``pool`` in use for good, by a graph of one small kernel.

    A pool whose last graph is destroyed cannot be captured into again (torch 2.14: an assertion in the host
    allocator), and the engine captures its own tail graphs into the global pool when ours have been retired.
    """
    if pool in _HELD:
        return
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        torch.zeros(1, device="cuda")
    _HELD[pool] = graph


class _Noted:
    """A body that keeps what it raised: closing a capture that broke off raises errors of its own over it."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self.error: Exception | None = None

    def __call__(self) -> list[torch.Tensor | None]:
        try:
            return self._body()
        except Exception as e:
            self.error = e
            raise

    @contextmanager
    def reasons(self) -> Iterator[None]:
        """Raise what the body raised, whatever came over it on the way out."""
        try:
            yield
        except Exception as e:
            if self.error is None or self.error is e:
                raise
        else:
            return
        raise self.error
