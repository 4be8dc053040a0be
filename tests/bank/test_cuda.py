"""CUDA captures of several ranks: wherever one fails, all leave the engine's scopes alike and its group still works.

The engine's classes are stood in for: what counts here is when the ranks meet. As with the engine's own communicators,
leaving the capture scope is a collective on the engine's CPU group, which has no bound on its wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank import cuda  # noqa: E402
from sglang_dsv4_graphs.bank.backend import CaptureError  # noqa: E402
from sglang_dsv4_graphs.bank.cuda import CudaGraphBackend  # noqa: E402
from sglang_dsv4_graphs.bank.ranks import Ranks  # noqa: E402
from tests.bank.processes import a_group, run_ranks  # noqa: E402

BREAKS = 3


class Engine:
    """Breakable captures as a list of what happened; ``group`` is the engine's own, None for one rank."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.done: list[str] = []
        self.capture: Any = None
        self.BreakableCUDAGraph = lambda: SimpleNamespace(_segments=[], _break_fns=[])

    def set_graph_pool_id(self, pool: Any) -> None:
        self.done.append(f"pool {pool}")

    def forget_graph_inputs(self) -> None:
        self.done.append("forgotten")

    def pool_capture_scope(self) -> Any:
        return nullcontext()

    @contextmanager
    def graph_capture(self, stream: Any) -> Iterator[Any]:
        import torch.distributed as dist

        try:
            yield SimpleNamespace(stream=stream)
        finally:
            self.done.append("registered")
            if self.group is not None:
                dist.barrier(group=self.group)

    @contextmanager
    def BreakableCUDAGraphCapture(self, *, cuda_graph: Any, pool: Any, stream: Any, barrier_fn: Any) -> Iterator[None]:
        self.capture = SimpleNamespace(graph=cuda_graph, barrier=barrier_fn, open=True)
        try:
            yield
        finally:
            self._end_segment()
            self.capture = None

    def _end_segment(self) -> None:
        # As the engine's: a break that raised has closed its segment already.
        assert self.capture.open
        self.capture.graph._segments.append(object())
        self.capture.open = False

    def break_out(self, call: Any) -> None:
        if self.capture is None:
            return call()
        self._end_segment()
        self.capture.barrier()
        call()
        self.capture.graph._break_fns.append(call)
        self.capture.open = True
        return None


class Body:
    """A range with three breaks that fails at ``at``: (run, segment or break)."""

    def __init__(self, engine: Engine, at: str | None = None) -> None:
        self.engine, self.at, self.run = engine, at, 0

    def _reach(self, place: str) -> None:
        if f"{self.run} {place}" == self.at:
            raise torch.OutOfMemoryError(f"no room at {self.at}")

    def __call__(self) -> list[Any]:
        self.run += 1
        for i in range(BREAKS):
            self._reach(f"segment {i}")
            self.engine.break_out(lambda i=i: self._reach(f"break {i}"))
        self._reach(f"segment {BREAKS}")
        return [torch.ones(1)]


# The first run is the warm-up, the second one is recorded.
PLACES = ["1 segment 0", "1 break 1", "2 segment 0", "2 segment 2", "2 break 2", f"2 segment {BREAKS}"]


# Streams whose workspace was held.
HELD: list[Any] = []


@contextmanager
def no_gpu() -> Iterator[None]:
    stream = SimpleNamespace(wait_stream=lambda other: None)
    with (
        patch.object(torch.cuda, "synchronize"),
        patch.object(torch.cuda, "current_stream", lambda: stream),
        patch.object(cuda, "hold_workspace", HELD.append),
    ):
        yield


def record(engine: Engine, ranks: Ranks, at: str | None, **options: Any) -> Any:
    with no_gpu():
        backend = CudaGraphBackend(engine, pool="pool", stream="stream", ranks=ranks, **options)  # type: ignore[arg-type]
        return backend.record(Body(engine, at), warmups=1)


def test_one_rank_records_segments_and_breaks() -> None:
    engine = Engine()
    recording = record(engine, Ranks(0, 1), None)
    assert (recording.segments, recording.breaks) == (BREAKS + 1, BREAKS)
    assert engine.done == ["pool pool", "registered"]


def test_the_stream_has_its_workspace_before_a_capture_and_after_graphs_went() -> None:
    HELD.clear()
    with no_gpu():
        backend = CudaGraphBackend(Engine(), pool="pool", stream="stream", ranks=Ranks(0, 1))  # type: ignore[arg-type]

        def body() -> list[Any]:
            assert HELD == ["stream"]
            return []

        backend.record(body, warmups=0)
        backend.settle()
    assert HELD == ["stream", "stream"]


def test_a_workspace_that_cannot_be_taken_again_ends_no_step(caplog: pytest.LogCaptureFixture) -> None:
    """A bank is retired inside a step; a capture, which may fail, still says so."""

    def hold(stream: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    with no_gpu(), patch.object(cuda, "hold_workspace", hold):
        backend = CudaGraphBackend(Engine(), pool="pool", stream="stream", ranks=Ranks(0, 1))  # type: ignore[arg-type]
        backend.settle()
        assert "workspace could not be taken again" in caplog.text
        with pytest.raises(CaptureError, match="no room"):
            backend.record(list, warmups=0)


@pytest.mark.parametrize("at", PLACES)
def test_the_reason_is_what_the_body_raised(at: str) -> None:
    """Closing a capture in whose break something failed raises an empty assertion over it."""
    engine = Engine()
    with pytest.raises(CaptureError, match=f"^OutOfMemoryError: no room at {at}$") as caught:
        record(engine, Ranks(0, 1), at)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    # What it left of the communicators' inputs must not be registered with the next capture's.
    assert engine.done == ["pool pool", "registered", "forgotten"]


@pytest.fixture
def holders(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Captures that torch was asked for: what of a graph, its pool, its stream, and the device of what it ran."""
    captured: list[tuple[Any, ...]] = []

    @contextmanager
    def graph(holder: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        # The process's other threads use the device meanwhile.
        assert capture_error_mode == "thread_local"
        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros", lambda size, device: captured.append((holder, pool, stream, device)))
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: object())
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(cuda, "_HELD", {})
    return captured


def test_a_shared_pool_is_held_once_for_good(holders: list[tuple[Any, ...]]) -> None:
    for _ in range(2):
        record(Engine(), Ranks(0, 1), None, shared=True)
    ((graph, *rest),) = holders
    assert rest == ["pool", "stream", "cuda"]
    assert list(cuda._HELD.items()) == [
        ("pool", graph)
    ]  # a graph that nobody holds is destroyed, and its pool is free again
    with no_gpu():
        cuda.hold_pool("another", "stream")
    assert [pool for _, pool, *_ in holders] == ["pool", "another"]


def test_a_pool_is_held_before_the_first_capture(holders: list[tuple[Any, ...]]) -> None:
    """Whatever becomes of ours: a bank that captured nothing lets go of nothing."""
    with pytest.raises(CaptureError):
        record(Engine(), Ranks(0, 1), PLACES[0], shared=True)
    assert len(holders) == 1


def test_a_holder_that_fails_is_a_failed_capture(
    holders: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*args: Any) -> None:
        raise torch.OutOfMemoryError("no room for the holder")

    monkeypatch.setattr(cuda, "hold_pool", no_room)
    engine = Engine()
    with pytest.raises(CaptureError, match=r"^OutOfMemoryError: no room for the holder$"):
        record(engine, Ranks(0, 1), None, shared=True)
    assert engine.done == ["forgotten"]


def test_pools_of_our_own_are_not_held(holders: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """They go back to the device with their last graph."""
    record(Engine(), Ranks(0, 1), None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "of its own")
    engine = Engine()
    with no_gpu():
        shared = CudaGraphBackend(engine, pool="pool", stream="s", ranks=Ranks(0, 1), shared=True)  # type: ignore[arg-type]
        for backend in (shared.apart(), shared.scratch()):
            backend.record(Body(engine), warmups=0)
    assert engine.done[0] == "pool of its own"
    assert holders == []


def wherever_one_fails(rank: int, size: int) -> dict[str, Any]:
    import torch.distributed as dist

    group = dist.new_group(list(range(size)))
    ranks = Ranks(rank, size, a_group(size), timedelta(seconds=20))
    found: dict[str, Any] = {}

    def capture(name: str, at: str | None, before: bool = False) -> None:
        engine = Engine(group)

        def attempt() -> None:
            if before:
                raise ValueError("no dummy step")
            record(engine, ranks, at)

        failure = ranks.together(name, attempt)
        found[name] = (str(failure) if failure else "", engine.done)

    for culprit in range(size):
        for at in PLACES:
            capture(f"{culprit} {at}", at if rank == culprit else None)
        capture(f"{culprit} before", None, before=rank == culprit)
    capture("fine", None)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return found | {"engine": total.item()}


def test_wherever_one_rank_fails_all_leave_alike(tmp_path: Any) -> None:
    found = run_ranks(2, wherever_one_fails, tmp_path)
    for culprit in (0, 1):
        for at in PLACES:
            name = f"{culprit} {at}"
            for of in found:
                assert of[name][0] == f"rank {culprit}: OutOfMemoryError: no room at {at}"
                assert of[name][1] == ["pool pool", "registered", "forgotten"]
        # None enters the engine's scope: leaving it would wait for the one that never came.
        assert found[1 - culprit][f"{culprit} before"] == (f"rank {culprit}: ValueError: no dummy step", ["forgotten"])
    for of in found:
        assert of["fine"] == ("", ["pool pool", "registered"])
        assert of["engine"] == 2.0
