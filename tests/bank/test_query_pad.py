"""Padded query buffers: every graph's lives as long as the graph, in the ways of both engine versions."""

from __future__ import annotations

import gc
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.bank import Bank  # noqa: E402
from sglang_dsv4_graphs.bank.guard import AddressGuard  # noqa: E402
from sglang_dsv4_graphs.bank.layer_range import RangeInputs  # noqa: E402
from sglang_dsv4_graphs.bank.tape import TapeBackend  # noqa: E402
from tests.bank.small_range import SmallRange, live_batch, live_rows  # noqa: E402

BUCKETS = (4, 8)


@pytest.fixture
def bank() -> Bank:
    variable: ContextVar[Any] = ContextVar("capture", default=None)
    return Bank(
        name="full-layer",
        layers=SmallRange(variable),  # type: ignore[arg-type]
        buckets=BUCKETS,
        backend=TapeBackend(variable, poison=True),
        guard=AddressGuard([]),
        local_rows=lambda rows, bucket, sharded: rows,
    )


def padding_like(release: str, metadata: SimpleNamespace, bank: Bank) -> Any:
    """A body that pads its query in the way of an engine ``release``: what it finds must have its rows."""
    body = bank.layers.body

    def padding(inputs: RangeInputs, *rest: Any) -> Any:
        pad, rows = metadata.q_pad_buffer, inputs.rows
        if pad is None or pad.shape[0] < rows or (release == "0.5.22" and pad.shape[0] != rows):
            pad = metadata.q_pad_buffer = torch.zeros(rows, 3)
        outputs = body(inputs, *rest)
        outputs[1] = outputs[1] + pad[:rows].sum(-1, keepdim=True)
        return outputs

    return padding


@pytest.mark.parametrize("release", ["0.5.22", "0.5.23"])
@pytest.mark.parametrize(("order", "pads"), [((8, 4), [8]), ((4, 8), [4, 8])], ids=["largest first", "smallest first"])
def test_padded_query_buffers_live_as_long_as_their_graphs(
    bank: Bank, release: str, order: tuple[int, ...], pads: list[int]
) -> None:
    body = bank.layers.body
    for bucket in order:
        metadata = SimpleNamespace(q_pad_buffer=None)
        bank.layers.body = padding_like(release, metadata, bank)  # type: ignore[method-assign]
        bank.capture(bucket, live_rows(bucket), live_batch(bucket), metadata)
        bank.layers.body = body  # type: ignore[method-assign]
        metadata.q_pad_buffer = None  # the engine's to take away
    del metadata
    gc.collect()
    assert sorted(len(t) for t in bank.owned_tensors() if t.shape[1:] == (3,)) == pads
    kept = [*bank.owned_tensors(), bank.layers.weight, bank.layers.cache]
    for bucket in BUCKETS:
        assert bank.recording(bucket).external_reads(keep=kept) == []
    bank.drop(8)
    assert any(t.shape[1:] == (3,) for t in bank.owned_tensors())  # the smaller graph's, if only a part of it
    bank.retire("shut down")
    assert bank.owned_tensors() == []


def test_no_pad_where_the_metadata_has_no_place_for_one(bank: Bank) -> None:
    bank.capture(8, live_rows(8), live_batch(8), SimpleNamespace(q_pad_buffer=torch.zeros(8, 3)))
    metadata = SimpleNamespace()
    bank.capture(4, live_rows(4), live_batch(4), metadata)
    assert vars(metadata) == {}
