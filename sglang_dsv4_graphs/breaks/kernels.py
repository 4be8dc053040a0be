"""Triton kernels of the breaks; each replaces a chain of small launches, because a step is short of host time."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# FP4 index keys: 128 values, packed two to a byte, with one power-of-two scale per 32; payload and scales lie apart
# in a page (engine: DeepSeekV4IndexerPool).
INDEX_DIM = 128
PAYLOAD_BYTES = 64
SCALE_BYTES = 4
SLOT_BYTES = PAYLOAD_BYTES + SCALE_BYTES


# Step-sized numbers and pointers into the middle of a tensor must not make new variants: each would be compiled inside
# a request.
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["lens", "slots", "starts"])
def _select_visible(  # type: ignore[no-untyped-def]
    raw,
    page,
    lens,
    slots,
    starts,
    rows,
    width,
    raw_stride,
    page_stride,
    HAS_PAGE: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    live = row < rows
    length = tl.load(lens + row, mask=live, other=0)
    visible = columns < length
    tl.store(raw + row * raw_stride + columns, tl.where(visible, columns, -1), mask=inside)
    if HAS_PAGE:
        start = 0
        if HAS_STARTS:
            start = tl.load(starts + row, mask=live, other=0)
        slot = tl.load(slots + start + columns, mask=visible & inside, other=-1)
        tl.store(page + row * page_stride + columns, slot.to(tl.int32), mask=inside)


def select_visible(
    raw: torch.Tensor,
    page: torch.Tensor | None,
    lens: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor | None,
) -> None:
    """``selection.select_all`` in one launch. ``raw`` and ``page`` have the same shape and contiguous rows."""
    total, width = raw.shape
    if total == 0:
        return
    _select_visible[(total,)](
        raw,
        raw if page is None else page,
        lens,
        slots,
        lens if starts is None else starts,
        lens.shape[0],
        width,
        raw.stride(0),
        0 if page is None else page.stride(0),
        HAS_PAGE=page is not None,
        HAS_STARTS=starts is not None,
        BLOCK=triton.next_power_of_2(width),
    )


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots"])
def _dequantize_index_keys(  # type: ignore[no-untyped-def]
    table,
    slots,
    out,
    count,
    page_bytes,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    PAYLOAD: tl.constexpr,
    SCALES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    feature = tl.arange(0, DIM)
    live = row < count
    slot = tl.load(slots + row, mask=live, other=0)
    page = table + (slot // PAGE) * page_bytes
    offset = slot % PAGE
    byte = tl.load(page + offset * PAYLOAD + feature // 2, mask=live & (feature >= 0), other=0).to(tl.int32)
    code = (byte >> ((feature % 2) * 4)) & 0xF
    magnitude = code & 0x7
    # e2m1: 0, 0.5, then (1 + m / 2) * 2 ** (e - 1) for exponent e = 1 to 3.
    exponent = magnitude >> 1
    mantissa = (magnitude & 1).to(tl.float32)
    power = (1 << tl.maximum(exponent - 1, 0)).to(tl.float32)
    value = tl.where(exponent == 0, 0.5 * mantissa, (1.0 + 0.5 * mantissa) * power)
    # A product: 0 - 0.0 would lose the sign of a negative zero.
    value = value * tl.where(code >= 8, -1.0, 1.0)
    scale_at = PAGE * PAYLOAD + offset * SCALES + feature // 32
    biased = tl.load(page + scale_at, mask=live & (feature >= 0), other=0).to(tl.int32)
    # 2 ** (biased - 127) by its bits; the exponent 0 is the denormal 2 ** -127.
    bits = tl.where(biased == 0, 0x00400000, biased << 23)
    result = value * bits.to(tl.float32, bitcast=True)
    result = tl.where(live, result, 0.0)
    tl.store(out + row * DIM + feature, result.to(tl.bfloat16))


def dequantize_index_keys(table: torch.Tensor, slots: torch.Tensor, rows: int) -> torch.Tensor:
    """Index keys of ``slots``, and zeros up to ``rows`` rows: [rows, 128] bfloat16, in one launch.

    Args:
        table: [pages, page size * 68] uint8: 64 payload bytes a slot, then 4 scale bytes a slot.
        slots: [at most rows] int64.
    """
    out = torch.empty((rows, INDEX_DIM), dtype=torch.bfloat16, device=table.device)
    if rows:
        _dequantize_index_keys[(rows,)](
            table,
            slots,
            out,
            slots.shape[0],
            table.stride(0),
            PAGE=table.shape[1] // SLOT_BYTES,
            DIM=INDEX_DIM,
            PAYLOAD=PAYLOAD_BYTES,
            SCALES=SCALE_BYTES,
            num_warps=1,
        )
    return out


def holds_index_keys(table: torch.Tensor) -> bool:
    """Whether ``table`` is laid out as ``dequantize_index_keys`` reads it."""
    return table.is_cuda and table.dtype == torch.uint8 and table.dim() == 2 and table.shape[1] % SLOT_BYTES == 0
