"""The engine's request window (encoder SWA bounded replay) under the CPU attention stand-in.

The window is the engine's own: its rows and their tags, its layouts, its workspace and its check of the history. Only
the copies of packed rows are torch here, where the engine has GPU kernels, and a row is one vector.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch

from sglang_dsv4_graphs.cpu_engine.attention import CpuAttentionBackend, attend
from sglang_dsv4_graphs.cpu_engine.config import SWA_WINDOW
from sglang_dsv4_graphs.cpu_engine.kernels import norm_rope
from sglang_dsv4_graphs.cpu_engine.pool import CpuKVPool

PAGE = 16


def put_window(runner: Any, monkeypatch: Any, scope: ExitStack) -> None:
    """Give ``runner`` a request window, before its startup; the engine's switch is on until ``scope`` ends."""
    from sglang.srt.mem_cache import dsv41_request_window as engine
    from sglang.srt.runtime_context import get_exec

    scope.enter_context(get_exec().features.override(enable_encoder_swa_bounded_replay=True))
    if hasattr(engine, "copy_packed_rows"):  # 0.5.23; 0.5.22's ``commit`` calls the same copy
        monkeypatch.setattr(engine, "commit_packed_rows", commit_rows)
    monkeypatch.setattr(engine, "copy_packed_tokens", copy_rows)
    pool, backend = runner.token_to_kv_pool, runner.attn_backend
    requests, layers = runner.max_running_requests + 1, len(pool.swa)

    def make_pool(size: int, count: int) -> Any:
        buffers = [torch.zeros(size, pool.swa[0].shape[1], dtype=pool.swa[0].dtype) for _ in range(count)]
        return SimpleNamespace(size=size, kv_buffer=buffers, kv_layout=None)

    pool.__class__, backend.__class__ = WindowPool, WindowBackend
    pool.request_window = engine.RequestWindow(
        make_pool,
        num_slots=requests,
        layers=layers,
        page_size=PAGE,
        capacity=SWA_WINDOW,
        workspace_rows=(requests + 1) * SWA_WINDOW + runner.server_args.chunked_prefill_size,
    )


def copy_rows(src: Any, dst: Any, src_loc: Any, dst_loc: Any, **_: Any) -> None:
    dst[dst_loc.long()] = src[src_loc.long()]


def commit_rows(src: Any, dst: Any, tags: Any, rows: Any, *, capacity: int, **_: Any) -> None:
    keep = rows.commit_mask
    at = (rows.req * capacity + rows.pos % capacity)[keep]
    dst[at] = src[rows.write_loc.long()[keep]]
    tags[at] = rows.pos[keep]


class WindowPool(CpuKVPool):
    """The pool with the window's rows in place of rows by slot."""

    request_window: Any = None

    def set_swa_key_buffer_radix_fused_norm_rope(
        self,
        layer_id: int,
        swa_loc: Any,
        kv: Any,
        kv_weight: Any,
        eps: float,
        freqs_cis: Any,
        positions: Any,
        q: Any = None,
    ) -> None:
        assert kv.shape[0] == swa_loc.shape[0] == positions.shape[0]
        workspace = self.request_window.buffer(layer_id)
        workspace[swa_loc.long()] = norm_rope(kv, kv_weight, eps, freqs_cis, positions).to(workspace.dtype)

    def reset(self) -> None:
        super().reset()
        self.request_window.tags.fill_(-1)
        self.request_window.prepared = None

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.request_window.prepared = None

    def _buffers(self) -> dict[str, Any]:
        window = self.request_window
        rows = {f"window.{i}": t[: window.rows] for i, t in enumerate(window.state.kv_buffer)}
        return {**super()._buffers(), **rows, "window.tags": window.tags.t()[: window.rows]}


class WindowBackend(CpuAttentionBackend):
    """Activates a layout wherever the engine's backend does, and attends over the workspace."""

    @property
    def _window(self) -> Any:
        return self.token_to_kv_pool.request_window

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._window.activate(self._layout)

    @property
    def _layout(self) -> Any:
        return self._step.core_attn_metadata.request_window_layout  # type: ignore[attr-defined]

    def _build(self, batch: Any, extend_lens: list[int], **tail: Any) -> Any:
        import inspect

        from sglang.srt.mem_cache.dsv41_request_window import window_layout

        meta, window = super()._build(batch, extend_lens, **tail), self._window
        zero = {"zero_row": window.zero_row} if "zero_row" in inspect.signature(window_layout).parameters else {}
        core: Any = meta.core_attn_metadata
        layout = window_layout(
            meta.low_ratio_req_indices,
            core.positions,
            capacity=window.capacity,
            floor=tail.get("window_floor"),
            num_groups=len(extend_lens),
            **zero,
        )
        core.request_window_layout = layout
        core.swa_out_cache_loc, core.swa_page_indices = layout.write_loc, layout.indices
        return meta

    def enter_late_layer_tail(self, forward_batch: Any) -> Any:
        saved = super().enter_late_layer_tail(forward_batch)
        self._window.activate(self._layout)
        return saved

    def get_swa_out_cache_loc(self, forward_batch: Any) -> Any:
        self._window.activate(self._layout)
        return self._layout.write_loc

    def forward(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, compress_ratio: int, attn_sink: Any, **_: Any
    ) -> Any:
        core, pool, window = self._step.core_attn_metadata, self.token_to_kv_pool, self._window
        at = core.swa_page_indices
        assert at.shape[0] == q.shape[0], "the breaks give the step's rows"
        keys, present = window.buffer(layer.layer_id)[at.clamp_min(0).long()], at >= 0
        if compress_ratio:
            chosen = core.sparse_page_indices(compress_ratio)
            compressed = pool.rows(pool.compressed[pool.source_of(layer.layer_id)], chosen)
            keys, present = torch.cat([keys, compressed], dim=1), torch.cat([present, chosen >= 0], dim=1)
        out = attend(q.float(), keys.float(), present, attn_sink.float(), layer.scaling).to(q.dtype)
        window.commit(layer.layer_id)
        return out
