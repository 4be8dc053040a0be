"""The row counts that captured kernels read from the device.

A MoE masks padding rows by a count tensor on the batch. The graph must read one that lives as long as it does
and holds the current step's count, so the bank owns both counts (local to this rank's shard, and global) in one
8-byte word that a single fill updates.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dsv4_graphs.bank.copy_in import copy_in


class RowCounts:
    """Device counts owned by a bank; views of the two halves of one int64 word (little endian, as CUDA is)."""

    def __init__(self, like: torch.Tensor) -> None:
        """``like``: the batch's own count, int32, shaped () or (1,)."""
        if like.dtype != torch.int32 or like.numel() != 1:
            raise ValueError(f"a row count is one int32, got {tuple(like.shape)} {like.dtype}")
        self._word = torch.zeros((1,), dtype=torch.int64, device=like.device)
        halves = self._word.view(torch.int32)
        self.local = halves[0].view_as(like)
        self.total = halves[1].view_as(like)

    def write(self, local_rows: int, total_rows: int) -> None:
        """Set both counts with one launch."""
        copy_in((), self._word, self.checked(local_rows, total_rows))

    @staticmethod
    def checked(local_rows: int, total_rows: int) -> tuple[int, int]:
        """Both counts, as ``copy_in`` takes them."""
        if not 0 <= local_rows <= total_rows < 2**31:
            raise ValueError(f"row counts out of range: local {local_rows}, total {total_rows}")
        return local_rows, total_rows

    @property
    def word(self) -> torch.Tensor:
        return self._word

    def bind(self, batch: Any) -> None:
        """Put the counts on ``batch`` in place of its own, where it has them."""
        batch.num_token_non_padded = self.local
        if batch.global_num_token_non_padded is not None:
            batch.global_num_token_non_padded = self.total

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self._word]
