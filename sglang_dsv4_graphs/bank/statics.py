"""Static rows: the buffers a bank's graphs read and write, shared by all its buckets.

A graph reads fixed addresses, so each step's rows are copied into buffers sized for the largest bucket; a
smaller bucket uses their first rows. Outputs go back into static buffers inside the graph, so that no bucket
keeps memory of its own for them. The residual streams' output takes the place of their input: every read of the
input comes before that last copy, and at 8192 rows it saves 320 MiB.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_dsv4_graphs.bank.copy_in import Rows, copy_in


class StaticRows:
    """Input and output buffers of one bank; row 0 of every tensor is the row axis.

    Allocated from the first live tensors seen (the largest bucket's). Rows past a step's own keep what an
    earlier step left there: finite values of real rows, which only other padding rows can depend on.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor | None] = []

    def allocate(self, live: Sequence[torch.Tensor]) -> None:
        """Make the input buffers like ``live`` ([rows, …] each); a second call is a no-op."""
        if not self._inputs:
            self._inputs = [t.new_zeros((self.max_rows, *t.shape[1:])) for t in live]

    def inputs(self, rows: int) -> list[torch.Tensor]:
        """The first ``rows`` rows of every input buffer."""
        return [buffer[:rows] for buffer in self._inputs]

    def takes(self, live: Sequence[torch.Tensor]) -> bool:
        """Whether ``live`` are rows like those that the buffers were made for."""
        return len(live) == len(self._inputs) and all(map(_alike, self._inputs, live))

    def copy_in(self, live: Sequence[torch.Tensor], *, clear_to: int = 0) -> None:
        """Copy a step's rows in; rows from there to ``clear_to`` are zeroed (comparisons only).

        Raises:
            ValueError: if a tensor is not shaped like the one the buffers were made for.
        """
        copy_in(self.parts(live, clear_to=clear_to))

    def parts(self, live: Sequence[torch.Tensor], *, clear_to: int = 0) -> list[Rows]:
        """What ``copy_in`` copies, for who copies more with it."""
        for buffer, t in zip(self._inputs, live, strict=True):
            if not _alike(buffer, t):
                raise ValueError(
                    f"a step's rows are {tuple(t.shape)} {t.dtype}, the graphs were captured for rows of "
                    f"{tuple(buffer.shape[1:])} {buffer.dtype}"
                )
        return [Rows(buffer, t, clear_to) for buffer, t in zip(self._inputs, live, strict=True)]

    def store_outputs(self, outputs: Sequence[torch.Tensor | None], rows: int) -> list[torch.Tensor | None]:
        """Copy a body's outputs into the output buffers (inside the graph) and return those rows.

        The first output is the residual streams and lands in the first input buffer; the others get buffers
        when first seen.
        """
        if not self._outputs:
            self._outputs = [None if t is None else t.new_zeros((self.max_rows, *t.shape[1:])) for t in outputs]
            self._outputs[0] = self._inputs[0]
        stored: list[torch.Tensor | None] = []
        for buffer, t in zip(self._outputs, outputs, strict=True):
            if buffer is None or t is None:
                stored.append(None)
                continue
            buffer[:rows].copy_(t)
            stored.append(buffer[:rows])
        return stored

    def make_outputs(self, outputs: Sequence[torch.Tensor | None]) -> None:
        """Allocate the output buffers outside a capture, so that they belong to no graph's pool."""
        if not self._outputs:
            self.store_outputs(outputs, outputs[0].shape[0] if outputs[0] is not None else 0)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every buffer, for memory reports and ownership checks."""
        seen = {id(t): t for t in (*self._inputs, *self._outputs) if t is not None}
        return list(seen.values())

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)


def _alike(buffer: torch.Tensor, live: torch.Tensor) -> bool:
    return live.shape[1:] == buffer.shape[1:] and live.dtype == buffer.dtype
