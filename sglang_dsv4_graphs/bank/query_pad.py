"""The padded query buffer: under tensor parallelism the query's heads are padded to the width of the kernels.

The model makes the buffer, zeroed, when a step first needs it, and leaves it on that step's attention metadata. A
graph reads it by address, so it must live as long as the graph; and since every layer overwrites the same heads and
the rest stays zero, the buckets of a bank can share the largest one.

How the model takes a buffer that it finds differs: 0.5.23 one of at least its rows, 0.5.22 one of exactly its rows. Any
other is replaced by a new one, which then belongs to that bucket alone.
"""

from __future__ import annotations

from typing import Any

import torch


class QueryPad:
    """The largest padded query buffer that a bank's captures have made, lent to its smaller buckets."""

    def __init__(self) -> None:
        self.largest: torch.Tensor | None = None

    def lend(self, metadata: Any, rows: int) -> None:
        """Let a step of ``rows`` rows find the first rows of the buffer on its metadata."""
        pad = self.largest
        if pad is not None and pad.shape[0] >= rows and hasattr(metadata, "q_pad_buffer"):
            metadata.q_pad_buffer = pad[:rows]

    def take(self, metadata: Any) -> torch.Tensor | None:
        """The buffer that the step of ``metadata`` used, for whoever captured it to hold; None if it used none."""
        pad: torch.Tensor | None = getattr(metadata, "q_pad_buffer", None)
        if pad is not None and (self.largest is None or pad.shape[0] > self.largest.shape[0]):
            self.largest = pad
        return pad
