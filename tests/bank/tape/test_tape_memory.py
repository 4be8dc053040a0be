"""Whose memory a tape reads, and that poison shows what nobody owns."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

from sglang_dsv4_graphs.bank.tape import TapeBackend  # noqa: E402
from tests.bank.tape.helpers import check, fresh, x23  # noqa: E402

Tensor = torch.Tensor


def stale_bodies(as_break: Any) -> dict[str, Callable[[Tensor], list[Tensor]]]:
    """Bodies that read what a CUDA graph would find freed: left by a warm-up, or hidden by a break."""
    cache: dict[str, Tensor] = {}
    state = SimpleNamespace()

    def workspace(x: Tensor) -> list[Tensor]:
        cache.setdefault("table", torch.ones(3))
        return [x * cache["table"]]

    @as_break
    def plan(x: Tensor) -> None:
        state.table = torch.full((3,), x.shape[0])

    def side_product(x: Tensor) -> list[Tensor]:
        plan(x)
        return [x * state.table]

    return {"workspace": workspace, "side_product": side_product}


@pytest.mark.parametrize("kind", ["workspace", "side_product"])
def test_a_stale_read_is_named_and_shows_after_poison(backend: TapeBackend, as_break: Any, kind: str) -> None:
    body, x = stale_bodies(as_break)[kind], x23()
    recording = backend.record(lambda: body(x))
    (read,) = recording.external_reads([x])
    assert tuple(read.shape) == (3,)
    assert read.operation == "aten.mul.Tensor"
    assert f"in {kind}" in str(read)
    assert str(read.dtype) in str(read)
    recording.poison([x])
    fresh(x)
    recording.replay()
    want = body(x)[0]
    assert not torch.equal(recording.outputs[0], want)
    if read.dtype.is_floating_point:
        assert recording.outputs[0].isnan().all()


def test_what_is_kept_is_neither_named_nor_poisoned(backend: TapeBackend) -> None:
    table, x = torch.ones(4, 3), x23()
    recording = backend.record(lambda: [x * table[0]])
    assert len(recording.external_reads()) == 2
    assert recording.external_reads([table[2:], x]) == []  # any view keeps the storage
    recording.poison([table[2:], x])
    assert torch.equal(table, torch.ones(4, 3))
    fresh(x)
    recording.replay()
    assert torch.equal(recording.outputs[0], x)


def test_a_foreign_argument_of_a_break_is_a_read(breaks: SimpleNamespace) -> None:
    """The engine holds a break's arguments weakly on a GPU."""
    cache = [torch.ones(3)]
    attend = breaks.wrap(lambda x, weights: x * weights[0])
    x = x23()
    recording = TapeBackend(breaks.var).record(lambda: [attend(x + 1, cache)])
    (read,) = recording.external_reads([x])
    assert "argument" in read.operation
    recording.poison([x])
    fresh(x)
    recording.replay()
    assert recording.outputs[0].isnan().all()


def test_what_a_break_returns_is_read_safely(breaks: SimpleNamespace) -> None:
    attend = breaks.wrap(lambda x: x.cumsum(0))
    x = x23()
    recording = TapeBackend(breaks.var, poison=True).record(lambda: [attend(x + 1) * 2])
    assert recording.external_reads([x]) == []
    recording.poison([x])
    fresh(x)
    recording.replay()
    assert torch.equal(recording.outputs[0], (x + 1).cumsum(0) * 2)


def test_a_foreign_buffer_counts_as_read_unless_all_of_it_was_written_first(backend: TapeBackend) -> None:
    whole, part, added, slots, shape = (torch.zeros(2, 3) for _ in range(5))
    x, rows = x23(), torch.tensor([1, 0])

    def body() -> list[Tensor]:
        whole.copy_(x)
        part[:1].copy_(x[:1])
        added.add_(x)
        slots.index_copy_(0, rows, x)
        shaped = torch.zeros_like(shape) + torch.empty_like(shape).fill_(2)
        return [whole + 1, part + 1, added + 1, slots + 1, shaped]

    reads = backend.record(body).external_reads([x, rows])
    assert [r.operation for r in reads] == [
        "aten.add_.Tensor",
        "aten.index_copy_.default",
        "aten.add.Tensor",
    ]
    assert {r.tensor.data_ptr() for r in reads} == {t.data_ptr() for t in (part, added, slots)}


def test_memory_that_no_operation_of_a_replay_writes_shows(capture_var: ContextVar[Any]) -> None:
    """An uninitialised buffer that something filled, in the recorded run, without an operation."""

    def body(x: Tensor) -> list[Tensor]:
        buffer = torch.empty(3)
        ctypes.memset(buffer.data_ptr(), 0, buffer.nbytes)
        return [buffer + x]

    x = torch.zeros(3)
    quiet = TapeBackend(capture_var).record(lambda: body(x))
    loud = TapeBackend(capture_var, poison=True).record(lambda: body(x))
    fresh(x)
    quiet.replay()
    assert torch.equal(quiet.outputs[0], x)
    loud.replay()
    assert loud.outputs[0].isnan().all()


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex64]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison_shows_in_every_type(backend: TapeBackend, dtype: Any) -> None:
    stale = torch.ones(4).to(dtype)
    recording = backend.record(lambda: [stale.clone()])
    for _ in range(2):  # a second poison must not undo the first
        recording.poison([])
        recording.replay()
        (seen,) = recording.outputs
        if dtype.is_floating_point or dtype.is_complex:
            assert seen.to(torch.complex64).isnan().all()
        elif dtype is torch.bool:
            assert not seen.any()
        else:
            assert (seen.long() >= (63 if dtype is torch.uint8 else 16000)).all()


def test_a_poisoned_index_fails_loudly(backend: TapeBackend) -> None:
    x, rows = x23(), torch.tensor([1, 0])
    recording = backend.record(lambda: [x[rows], F.embedding(rows, x)])
    recording.poison([x])
    with pytest.raises(IndexError):
        recording.replay()


def test_constants_and_inputs_survive_the_poison_of_every_replay(backend: TapeBackend) -> None:
    check(backend, lambda x: [x * torch.tensor(3.0), torch.where(x > 0, x, 2.0)], x23())
