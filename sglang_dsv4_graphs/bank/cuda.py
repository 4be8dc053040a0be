"""CUDA graphs: the engine's own breakable graphs behind the backend contract.

A breakable graph is a list of CUDA graphs (segments) with eager calls (breaks) between them. The engine's class
is used as it is, in the engine's pool and on its capture stream: the allocator hands a pool's free blocks only to
the stream that freed them, and the ranges never run at the same time as each other or as the prefill graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from sglang_dsv4_graphs.bank.backend import CaptureError, GraphBackend, Recording, ReplayFault
from sglang_dsv4_graphs.engine.api import Engine

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
    """Records bodies as breakable CUDA graphs in one pool, on one stream."""

    name = "cuda"

    def __init__(self, engine: Engine, *, pool: Any, stream: Any, barrier: Callable[[], None]) -> None:
        self._engine = engine
        self._pool = pool
        self._stream = stream
        self._barrier = barrier

    def scratch(self) -> GraphBackend:
        return self.apart()

    def apart(self) -> GraphBackend:
        return CudaGraphBackend(
            self._engine, pool=torch.cuda.graph_pool_handle(), stream=self._stream, barrier=self._barrier
        )

    def record(self, body: Body, *, warmups: int = 2) -> Recording:
        engine = self._engine
        graph = engine.BreakableCUDAGraph()
        engine.set_graph_pool_id(self._pool)
        try:
            with engine.graph_capture(stream=self._stream) as context:
                for _ in range(warmups):
                    torch.cuda.synchronize()
                    self._barrier()
                    body()
                with (
                    engine.pool_capture_scope(),
                    engine.BreakableCUDAGraphCapture(
                        cuda_graph=graph, pool=self._pool, stream=context.stream, barrier_fn=self._barrier
                    ),
                ):
                    outputs = body()
                stream = context.stream
        except Exception as e:
            raise CaptureError(f"{type(e).__name__}: {e}") from e
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        return CudaRecording(engine, graph, outputs)
