"""Copy-in: a step's rows, its window slots and its row counts into the static buffers, in one launch.

Each of them alone is a copy of some microseconds of host time, and a step is short of host time. Which way is shorter
depends on the host and on Triton's launcher (docs/performance.md), so the switch is here: ``ONE_LAUNCH``.

The kernel copies 32-bit words of contiguous memory. What is anything else (other strides, an odd number of bytes, more
tensors than it takes) is copied by torch, one by one, with the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

# Whether CUDA buffers are filled by the kernel. Off: by what could be measured without a GPU it costs more host time.
ONE_LAUNCH = False
MOST, WORD = 6, 4


class Rows(NamedTuple):
    """Rows to copy: ``source`` to the first rows of ``buffer``, and zeros behind them up to row ``zeros_to``."""

    buffer: torch.Tensor
    source: torch.Tensor
    zeros_to: int = 0


def copy_in(rows: Sequence[Rows], counts: torch.Tensor | None = None, values: tuple[int, int] = (0, 0)) -> None:
    """Copy all of ``rows``; ``counts`` (int64, [1]) takes ``values`` as its low and high 32 bits."""
    first = rows[0].buffer if rows else counts
    if ONE_LAUNCH and first is not None and first.is_cuda:
        rows = launch(rows, counts, values)
        counts = None
    for r in rows:
        count = r.source.shape[0]
        r.buffer[:count].copy_(r.source)
        if r.zeros_to > count:
            r.buffer[count : r.zeros_to].zero_()
    if counts is not None:
        counts.fill_((values[1] << 32) | values[0])


def launch(rows: Sequence[Rows], counts: torch.Tensor | None, values: tuple[int, int]) -> list[Rows]:
    """Copy with the kernel; returns the rows that it cannot copy."""
    taken = [r for r in rows if _in_words(r)][:MOST]
    if taken or counts is not None:
        from sglang_dsv4_graphs.bank.copy_kernel import copy_words

        whole = [(r.buffer, r.source, *_words(r)) for r in taken]
        copy_words(whole, counts, values)
    kept = {id(r) for r in taken}
    return [r for r in rows if id(r) not in kept]


def _in_words(rows: Rows) -> bool:
    buffer, source = rows.buffer, rows.source
    if source.dtype != buffer.dtype or source.shape[1:] != buffer.shape[1:] or source.device != buffer.device:
        return False
    row_bytes = buffer.stride(0) * buffer.element_size() if buffer.dim() else 1
    aligned = row_bytes % WORD == 0 and buffer.data_ptr() % WORD == 0 and source.data_ptr() % WORD == 0
    return aligned and buffer.is_contiguous() and source.is_contiguous() and buffer.numel() < 2**31


def _words(rows: Rows) -> tuple[int, int]:
    """Words to copy, and words to write in all."""
    per_row = rows.buffer.stride(0) * rows.buffer.element_size() // WORD
    count = rows.source.shape[0]
    return count * per_row, max(count, rows.zeros_to) * per_row
