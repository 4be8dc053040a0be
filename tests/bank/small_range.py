"""A small layer range with what makes real ones hard: breaks that read the step, a cache, counts on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch

from sglang_dsv4_graphs.bank.layer_range import RangeInputs
from sglang_dsv4_graphs.breaks.shared import StepShared

STREAMS, HIDDEN, SLOTS = 2, 3, 256


def breaking(capture_var: ContextVar[Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    """``inner`` as a break, in the way of the engine's wrapper."""

    def wrapper(*args: Any) -> Any:
        capture = capture_var.get()
        if capture is None:
            return inner(*args)
        capture._end_current_segment()
        output = inner(*args)
        capture.cuda_graph._break_fns.append(lambda: inner(*args))
        capture._begin_new_segment()
        return output

    return wrapper


class SmallRange:
    """Stands where a ``LayerRange`` stands: one layer with a KV store and an attention over the cache."""

    first, last = 0, 4

    def __init__(self, capture_var: ContextVar[Any]) -> None:
        self.weight = torch.randn(HIDDEN, HIDDEN)
        self.cache = torch.zeros(SLOTS, HIDDEN)
        self.scopes: list[tuple[str, Any]] = []
        self.seen: list[tuple[str, int]] = []
        self.fails: Exception | None = None
        # What the replay under way shares, and what each break saw of it.
        self.shared: StepShared | None = None
        self.shared_in_breaks: list[StepShared | None] = []
        # Where a capture under way stores inside its segment; None where the store breaks.
        self.slots: torch.Tensor | None = None
        self._store = breaking(capture_var, self._store_live_rows)
        self._attend = breaking(capture_var, self._attend_live_rows)

    @contextmanager
    def replay_scope(self, batch: Any) -> Iterator[None]:
        self.scopes.append(("replay", batch))
        yield
        self.scopes.pop()

    @contextmanager
    def capture_scope(self, batch: Any) -> Iterator[None]:
        self.scopes.append(("capture", batch))
        try:
            with torch.no_grad():
                yield
        finally:
            self.scopes.pop()

    @contextmanager
    def sharing(self, shared: StepShared | None) -> Iterator[None]:
        self.shared = shared
        try:
            yield
        finally:
            self.shared = None

    @contextmanager
    def storing_into(self, slots: torch.Tensor | None) -> Iterator[None]:
        self.slots = slots
        try:
            yield
        finally:
            self.slots = None

    def window_slots(self, batch: Any) -> torch.Tensor:
        return batch.out_cache_loc

    def body(self, inputs: RangeInputs, batch: Any, captured_layers: Any = ()) -> list[torch.Tensor | None]:
        if self.fails is not None:
            raise self.fails
        rows = inputs.rows
        x = inputs.residual.sum(1) @ self.weight + inputs.positions[:, None] * 0.5 + inputs.input_ids[:, None]
        if inputs.pre is not None:
            x = x * inputs.pre.sum(1, keepdim=True)
        if batch.num_token_non_padded is not None:
            x = torch.where(torch.arange(rows)[:, None] < batch.num_token_non_padded, x, 0.0)
        out = torch.zeros_like(x)
        if self.slots is None:
            self._store(x)
        else:
            self.cache.index_copy_(0, self.slots[:rows], x)
        self._attend(out)
        residual = inputs.residual + out[:, None, :] + x[:, None, :] * 2
        aux = [torch.cat([x + layer for layer in captured_layers], dim=-1)] if captured_layers else []
        return [residual, residual.mean(-1), *aux]

    def _live(self, what: str) -> tuple[int, Any]:
        """What a break reads: the step's own batch, with its real row count."""
        batch = self.scopes[-1][1]
        rows = batch.global_num_token_non_padded_cpu
        self.seen.append((what, rows))
        self.shared_in_breaks.append(self.shared)
        return rows, batch.out_cache_loc[:rows]

    def _store_live_rows(self, x: torch.Tensor) -> None:
        rows, slots = self._live("store")
        self.cache[slots] = x[:rows]

    def _attend_live_rows(self, out: torch.Tensor) -> None:
        rows, slots = self._live("attend")
        out.zero_()
        out[:rows] = self.cache[slots].cumsum(0)


def live_rows(rows: int, *, pre: bool = True) -> RangeInputs:
    """New random rows."""
    residual = torch.randn(rows, STREAMS, HIDDEN)
    mix = torch.rand(rows, STREAMS) if pre else None
    return RangeInputs(residual, mix, torch.randint(100, (rows,)), torch.randint(100, (rows,)))


def live_batch(rows: int, *, counted: bool = True, sharded: bool = False) -> Any:
    """A step's batch at random slots, its counts its own; slot 0 is for padding."""
    count = torch.tensor(rows, dtype=torch.int32) if counted else None
    return SimpleNamespace(
        out_cache_loc=1 + torch.randperm(SLOTS - 1)[:rows],
        num_token_non_padded=count,
        global_num_token_non_padded=count,
        global_num_token_non_padded_cpu=rows,
        attn_tp_sequence_sharded=sharded,
    )
