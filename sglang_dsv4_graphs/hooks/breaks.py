"""The breaks of a range: fewer and leaner than the engine's, and those that engine 0.5.22 lacks.

Inside a range capture the engine's own break functions would serve, but a step has about ninety of them, and host
time is what a step is short of:

- *Merged KV store*: nothing between the store of a layer's SWA K and its attention reads the SWA cache (the
  low-ratio sources read compressed KV and index keys), so the store runs at the start of the attention break:
  one break and one segment less per layer.
- *Store in the graph*: the store depends on the step by its slots alone, so where those can be copied into a static
  buffer it is captured and breaks nowhere; padding rows store into the engine's padding slot 0.
- *Lean attention*: the break calls the attention backend directly, without the registered operator around it,
  and slices nothing when the bucket is exactly full.
- *0.5.22* stores K inside the segment and runs the sources once while it captures, on activations that no segment
  has computed yet: the indexer would pick blocks from them and read pages past the context.

Rows past the step's own are zeroed in the attention's output: what lies there else may be no number, and an expert
router must not see that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dsv4_graphs.engine.api import Engine
from sglang_dsv4_graphs.settings import Settings

Call = Callable[..., Any]


class RangeBreaks:
    """AROUND hooks that break inside a range capture and pass everything else through."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._merged = settings.merged_kv_store
        self._lean = settings.lean_breaks
        self._made: dict[str, Call] = {}

    def _break(self, name: str, run: Call, capture_stub: Call | None = None) -> Call:
        """``run`` as a break of the engine's; made once."""
        if name not in self._made:
            self._made[name] = self._engine.eager_on_graph(run, capture_stub=capture_stub)
        return self._made[name]

    def around_attention(
        self,
        original: Call,
        query: Any,
        key_value: Any,
        output: Any,
        layer_id: int,
        compress_ratio: int,
        attn_sink: Any,
        save_kv_cache: bool,
    ) -> Any:
        """AROUND the engine's attention break."""
        args = (query, key_value, output, layer_id, compress_ratio, attn_sink, save_kv_cache)
        store = self._engine.pending_stores.pop(layer_id, None) if self._engine.capturing_range else None
        if not self._engine.capturing_range or (store is None and not self._lean):
            return original(*args)
        attend = self._attend if self._lean else original.__wrapped__  # type: ignore[attr-defined]
        if store is None:
            return self._break("attention", self._run_attention)(attend, *args)
        return self._break("store-attention", self._run_store_and_attention)(store[0], attend, *store[1:], *args)

    def _run_attention(self, attend: Call, *args: Any) -> None:
        attend(*args)

    def _run_store_and_attention(
        self, store: Call, attend: Call, attention: Any, x: Any, positions: Any, qkv_a: Any, *args: Any
    ) -> None:
        self._store_live_rows(store, attention, x, positions, qkv_a)
        attend(*args)

    def _attend(
        self,
        query: Any,
        key_value: Any,
        output: Any,
        layer_id: int,
        compress_ratio: int,
        attn_sink: Any,
        save_kv_cache: bool,
    ) -> None:
        """The attention body on the step's real rows: output [bucket, heads, dim] is written, its padding zeroed."""
        context = self._engine.get_break_context()
        batch = context.forward_batch
        rows = batch.global_num_token_non_padded_cpu
        if rows == 0:
            output.zero_()
            return
        full = rows == query.shape[0]
        result = self._engine.get_attn_backend().forward(
            q=query if full else query[:rows],
            k=key_value,
            v=key_value,
            layer=context.attention_layers[layer_id],
            forward_batch=batch,
            compress_ratio=compress_ratio,
            attn_sink=attn_sink,
            save_kv_cache=save_kv_cache,
        )
        if full:
            output.view(result.shape).copy_(result)
        else:
            output[:rows].view(result.shape).copy_(result)
            output[rows:].zero_()

    def around_tail_kv_store(self, original: Call, attention: Any, x: Any, positions: Any, qkv_a: Any) -> Any:
        """AROUND 0.5.23's break of the K store."""
        if not (self._engine.capturing_range and self._merged):
            return original(attention, x, positions, qkv_a)
        if self._engine.static_slots is not None:
            return self._store_in_graph(type(attention)._compute_kv_to_cache, attention, x, positions, qkv_a)
        store = type(attention)._compute_kv_to_cache
        self._engine.pending_stores[attention.layer_id] = (store, attention, x, positions, qkv_a)
        return None

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
        """AROUND ``MQALayer._compute_kv_to_cache`` (0.5.22)."""
        if not self._engine.capturing_range:
            return original(attention, x, positions, forward_batch, attn_backend, qkv_a=qkv_a, q_rope=q_rope)
        if self._engine.static_slots is not None:
            return self._store_in_graph(original, attention, x, positions, qkv_a)
        if self._merged:
            self._engine.pending_stores[attention.layer_id] = (original, attention, x, positions, qkv_a)
            return None
        return self._break("store", self._store_live_rows)(original, attention, x, positions, qkv_a)

    def _store_in_graph(self, store: Call, attention: Any, x: Any, positions: Any, qkv_a: Any) -> None:
        """Store every row of the bucket inside the segment, into the bank's static slots."""
        engine = self._engine
        slots = engine.static_slots
        if slots is None:
            raise RuntimeError("no static slots: the bank's capture scope sets them")
        backend = _SlotsOf(engine.get_attn_backend(), slots[: x.shape[0]])
        batch = engine.get_break_context().forward_batch
        with engine.outside_range_capture():
            store(attention, x, positions, batch, backend, qkv_a=qkv_a)

    def _store_live_rows(self, store: Call, attention: Any, x: Any, positions: Any, qkv_a: Any) -> None:
        engine = self._engine
        batch = engine.get_break_context().forward_batch
        rows = batch.global_num_token_non_padded_cpu
        if rows == 0:
            return
        if rows != x.shape[0]:
            x, positions = x[:rows], positions[:rows]
            qkv_a = None if qkv_a is None else qkv_a[:rows]
        # Calls inside a break are plain: the mark of a range capture stays set while a warm-up runs it.
        with engine.outside_range_capture():
            store(attention, x, positions, batch, engine.get_attn_backend(), qkv_a=qkv_a)

    def around_low_ratio_sources(self, original: Call, layer: Any, x: Any, q_lora: Any, positions: Any) -> Any:
        """AROUND 0.5.22's break of the sources: the same call, without its capture pass."""
        if not self._engine.capturing_range:
            return original(layer, x, q_lora, positions)
        # The engine's break around a break would be recorded twice: call what it wraps.
        inner = original.__wrapped__  # type: ignore[attr-defined]
        return self._break_for_sources(inner, layer, x, q_lora, positions)

    def around_backend_sources(
        self,
        original: Call,
        backend: Any,
        *,
        layer: Any,
        x: Any,
        q_lora: Any,
        positions: Any,
        forward_batch: Any,
        **parts: bool,
    ) -> Any:
        """AROUND 0.5.22's attention backend: on Blackwell the model calls it without a break in between.

        There the engine captures its sources, from metadata that only a step of its own prefill graph has.
        """
        if not self._engine.capturing_range:
            rows = {"layer": layer, "x": x, "q_lora": q_lora, "positions": positions}
            return original(backend, **rows, forward_batch=forward_batch, **parts)
        return self._break_for_sources(self._ask_backend, layer, x, q_lora, positions, parts)

    def _break_for_sources(self, *args: Any) -> Any:
        return self._break("sources", self._run_sources, capture_stub=_skip)(*args)

    def _run_sources(self, run: Call, *args: Any) -> None:
        # Plain, and unmarked: the mark, which warm-ups set, stands for a step of the engine's prefill graph.
        with self._engine.outside_range_capture(), self._engine.unmarked():
            run(*args)

    def _ask_backend(self, layer: Any, x: Any, q_lora: Any, positions: Any, parts: dict[str, bool]) -> None:
        batch = self._engine.get_break_context().forward_batch
        rows = batch.global_num_token_non_padded_cpu
        if rows:
            q_lora = None if q_lora is None else q_lora[:rows]
            self._engine.get_attn_backend().forward_low_ratio_sources(
                layer=layer, x=x[:rows], q_lora=q_lora, positions=positions[:rows], forward_batch=batch, **parts
            )


class _SlotsOf:
    """An attention backend whose window slots are ``slots``; everything else is the backend's."""

    def __init__(self, backend: Any, slots: Any) -> None:
        self._backend = backend
        self._slots = slots

    def get_swa_out_cache_loc(self, forward_batch: Any) -> Any:
        return self._slots

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_backend"], name)


def _skip(*args: Any) -> None:
    """Stands for the sources while a capture passes over them."""
