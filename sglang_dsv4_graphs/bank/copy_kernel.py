"""The Triton kernel of ``copy_in``: words of several tensors in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

BLOCK = 4096
# (buffer, source, words to copy, words to write): zeros behind the copied ones.
Words = tuple[torch.Tensor, torch.Tensor, int, int]


@triton.jit
def _copy(source, buffer, copied, written, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(source.to(tl.pointer_type(tl.int32)) + at, mask=at < copied, other=0)
    tl.store(buffer.to(tl.pointer_type(tl.int32)) + at, words, mask=at < written)


# Step-sized numbers and pointers into the middle of a tensor must not make new variants: each would be compiled inside
# a request.
@triton.jit(
    do_not_specialize=["c0", "w0", "c1", "w1", "c2", "w2", "c3", "w3", "c4", "w4", "c5", "w5", "low", "high"],
    do_not_specialize_on_alignment=["s0", "s1", "s2", "s3", "s4", "s5", "b0", "b1", "b2", "b3", "b4", "b5", "counts"],
)
def _copy_words(  # type: ignore[no-untyped-def]
    s0, s1, s2, s3, s4, s5,
    b0, b1, b2, b3, b4, b5,
    c0, c1, c2, c3, c4, c5,
    w0, w1, w2, w3, w4, w5,
    counts,
    low,
    high,
    HAS_COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(1)
    if part == 0:
        _copy(s0, b0, c0, w0, BLOCK)
        if HAS_COUNTS and tl.program_id(0) == 0:
            halves = counts.to(tl.pointer_type(tl.int32))
            tl.store(halves, low.to(tl.int32))
            tl.store(halves + 1, high.to(tl.int32))
    elif part == 1:
        _copy(s1, b1, c1, w1, BLOCK)
    elif part == 2:
        _copy(s2, b2, c2, w2, BLOCK)
    elif part == 3:
        _copy(s3, b3, c3, w3, BLOCK)
    elif part == 4:
        _copy(s4, b4, c4, w4, BLOCK)
    else:
        _copy(s5, b5, c5, w5, BLOCK)


def copy_words(parts: Sequence[Words], counts: torch.Tensor | None, values: tuple[int, int]) -> None:
    """Copy up to six parts, and ``values`` as 32-bit halves into ``counts`` [1] int64, in one launch."""
    most = max((p[3] for p in parts), default=0)
    if counts is None and most == 0:
        return
    if not parts and counts is not None:
        parts = [(counts, counts, 0, 0)]
    padded = [*parts, *[(parts[0][0], parts[0][0], 0, 0)] * (6 - len(parts))]
    buffers, sources, copied, written = zip(*padded, strict=True)
    _copy_words[(max(1, triton.cdiv(most, BLOCK)), len(parts))](
        *sources,
        *buffers,
        *copied,
        *written,
        parts[0][0] if counts is None else counts,
        *values,
        HAS_COUNTS=counts is not None,
        BLOCK=BLOCK,
    )
