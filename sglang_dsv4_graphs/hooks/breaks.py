"""Breaks that engine 0.5.22 lacks.

Its prefill graph captures the SWA K store with bucket-sized slot buffers and runs the low-ratio sources once while
it captures. A range captured for live slots needs the store between segments, and its capture pass hands the
sources activations that no segment has computed yet: the indexer would pick blocks from them and read pages past
the context. 0.5.23 has both in its tail scope.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dsv4_graphs.engine.api import Engine

Call = Callable[..., Any]


class OldEngineBreaks:
    """AROUND hooks that break inside a range capture and pass everything else through."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._store: Call | None = None
        self._sources: Call | None = None

    def around_kv_store(
        self,
        original: Call,
        attention: Any,
        x: Any,
        positions: Any,
        forward_batch: Any,
        attn_backend: Any,
        qkv_a: Any = None,
        q_rope: Any = None,
    ) -> Any:
        """AROUND ``MQALayer._compute_kv_to_cache``."""
        if not self._engine.capturing_range:
            return original(
                attention, x, positions, forward_batch, attn_backend, qkv_a=qkv_a, q_rope=q_rope
            )
        if self._store is None:
            self._store = self._engine.eager_on_graph(self._store_live_rows)
        return self._store(original, attention, x, positions, qkv_a)

    def _store_live_rows(self, original: Call, attention: Any, x: Any, positions: Any, qkv_a: Any) -> None:
        engine = self._engine
        batch = engine.get_break_context().forward_batch
        rows = batch.global_num_token_non_padded_cpu
        if rows == 0:
            return
        qkv_rows = None if qkv_a is None else qkv_a[:rows]
        # The inner store must not break again: capturing_range stays set while a warm-up runs.
        with engine.outside_range_capture():
            original(attention, x[:rows], positions[:rows], batch, engine.get_attn_backend(), qkv_a=qkv_rows)

    def around_low_ratio_sources(
        self, original: Call, layer: Any, x: Any, q_lora: Any, positions: Any
    ) -> Any:
        """AROUND the engine's own break of the sources: the same call, without its capture pass."""
        if not self._engine.capturing_range:
            return original(layer, x, q_lora, positions)
        if self._sources is None:
            self._sources = self._engine.eager_on_graph(self._run_sources, capture_stub=_skip)
        return self._sources(original, layer, x, q_lora, positions)

    def _run_sources(self, original: Call, layer: Any, x: Any, q_lora: Any, positions: Any) -> None:
        # The engine's break around a break would be recorded twice: call what it wraps.
        original.__wrapped__(layer, x, q_lora, positions)  # type: ignore[attr-defined]


def _skip(*args: Any) -> None:
    """Stands for the sources while a capture passes over them."""
