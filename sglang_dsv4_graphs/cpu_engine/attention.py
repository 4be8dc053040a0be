"""An attention backend that depends on the step exactly as the engine's does.

The model's layers stay the engine's; at an attention break they ask this object. It reads the step's
metadata, the pools and the request table at the time of the call, so a call with a stale batch, stale rows
or stale slots gives other numbers. Switching to the late-layer tail, and the source KV that is written
before it, follow the engine's rules of either version, with the engine's own tail layout and tail object.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dsv4_graphs.cpu_engine import sources
from sglang_dsv4_graphs.cpu_engine.config import SWA_WINDOW
from sglang_dsv4_graphs.cpu_engine.metadata import StepMetadata, build_metadata
from sglang_dsv4_graphs.cpu_engine.pool import CpuKVPool

_BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"


def attend(q: Tensor, keys: Tensor, present: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Softmax attention of each row over its own keys and a sink; keys are values too. Float32.

    q [rows, heads, dim], keys [rows, n, dim], present [rows, n], sink [heads] -> [rows, heads, dim].
    """
    scores = torch.bmm(q, keys.transpose(1, 2)) * scale
    scores = scores.masked_fill(~present.unsqueeze(1), float("-inf"))
    top = torch.maximum(scores.amax(-1), sink)
    weights = torch.exp(scores - top.unsqueeze(-1))
    total = weights.sum(-1) + torch.exp(sink - top)
    return torch.bmm(weights, keys) / total.unsqueeze(-1)


class CpuAttentionBackend:
    """The engine's attention backend as far as the model and a prefill step use it. Extends only."""

    # The low-ratio sources break, as on a GPU without their in-graph form.
    low_ratio_prefill_graph = False
    kv_index_translator = None
    encoder_row_floor = None

    def __init__(
        self,
        *,
        pool: CpuKVPool,
        req_to_token_pool: Any,
        config: Any,
        bounded_replay: bool,
        device: str = "cpu",
    ) -> None:
        import importlib

        engine = importlib.import_module(_BACKEND)
        self._tail_type = engine.LateLayerTail
        self._tail_layout = engine.late_layer_tail_layout
        # 0.5.22: layers before the tail publish what it reads. 0.5.23: the tail's first layer does.
        self._carries_into_tail = not hasattr(engine.DeepseekV4AttnBackend, "write_tail_source_kv")
        self._config = config
        self.device = torch.device("cpu")
        self.enable_decoder_swa_bounded_replay = bounded_replay
        self.token_to_kv_pool = pool
        self.req_to_token_pool = req_to_token_pool
        self.forward_metadata: StepMetadata | None = None
        self.tail_forward_metadata: StepMetadata | None = None
        self.tail_source_kv_layer_id: int | None = None
        self.prefill_graph_replay_batch: Any = None

    @property
    def req_to_token(self) -> Tensor:
        return self.req_to_token_pool.req_to_token

    @property
    def _step(self) -> StepMetadata:
        if self.forward_metadata is None:
            raise RuntimeError("no metadata: init_forward_metadata has not run for this step")
        return self.forward_metadata

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Snapshot the step ``forward_batch``, and its tail under bounded replay."""
        if not forward_batch.forward_mode.is_extend_without_speculative():
            raise NotImplementedError(f"only extends run here, not {forward_batch.forward_mode}")
        self.forward_metadata = self._build(forward_batch, forward_batch.extend_seq_lens_cpu)
        self.tail_forward_metadata = (
            self._build_late_layer_tail_metadata(forward_batch) if self.enable_decoder_swa_bounded_replay else None
        )

    def _build(self, batch: Any, extend_lens: list[int], **tail: Any) -> StepMetadata:
        inputs = {"positions": batch.positions, "out_cache_loc": batch.out_cache_loc} | tail
        return build_metadata(
            pool=self.token_to_kv_pool,
            req_to_token=self.req_to_token,
            req_pool_indices=batch.req_pool_indices.tolist(),
            seq_lens=batch.seq_lens_cpu.tolist(),
            extend_lens=list(extend_lens),
            index_topk=self._config.index_topk,
            **inputs,
        )

    def _build_late_layer_tail_metadata(self, forward_batch: Any) -> StepMetadata:
        extend_lens = forward_batch.extend_seq_lens_cpu
        indices, tail_lens, floor = self._tail_layout(
            extend_lens_cpu=extend_lens,
            seq_lens_cpu=forward_batch.seq_lens_cpu.tolist(),
            tail_len=SWA_WINDOW,
            device=self.device,
        )
        meta = self._build(
            forward_batch,
            tail_lens,
            positions=forward_batch.positions[indices],
            out_cache_loc=forward_batch.out_cache_loc[indices],
            window_floor=floor,
        )
        meta.late_layer_tail = self._tail_type(
            token_indices=indices,
            positions=meta.low_ratio_pos_i64.to(forward_batch.positions.dtype),
            extend_seq_lens=torch.tensor(tail_lens, dtype=torch.int32),
            extend_seq_lens_cpu=tail_lens,
            swa_out_cache_loc=meta.core_attn_metadata.swa_out_cache_loc,
            contiguous_start=extend_lens[0] - tail_lens[0] if len(extend_lens) == 1 else None,
        )
        return meta

    def enter_late_layer_tail(self, forward_batch: Any) -> StepMetadata:
        """Switch to the tail's metadata; the return value goes back to ``exit_late_layer_tail``."""
        full, tail = self._step, self.tail_forward_metadata
        if tail is None:
            raise RuntimeError("no tail metadata for this step")
        if self._carries_into_tail:
            rows = tail.late_layer_tail.rows
            for ratio, selected in full.core_attn_metadata.selection.items():
                tail.core_attn_metadata.selection[ratio].copy_(rows(selected))
            if full.candidate_metadata is not None:
                tail.candidate_metadata = rows(full.candidate_metadata)
        self.forward_metadata = tail
        return full

    def exit_late_layer_tail(self, saved: StepMetadata, forward_batch: Any) -> None:
        """Switch back."""
        self.forward_metadata = saved
        self.tail_source_kv_layer_id = None

    def write_tail_source_kv(self, *, layer: Any, x: Tensor, positions: Tensor, forward_batch: Any) -> None:
        """Write the tail source's compressed rows for every row of the step; its own pass then skips them."""
        if x.shape[0] > 0:
            self.forward_low_ratio_sources(
                layer=layer,
                x=x,
                q_lora=None,
                positions=positions,
                forward_batch=forward_batch,
                run_indexer=False,
            )
        self.tail_source_kv_layer_id = layer.layer_id

    def forward_low_ratio_sources(
        self,
        *,
        layer: Any,
        x: Tensor,
        q_lora: Tensor | None,
        positions: Tensor,
        forward_batch: Any,
        run_compressor: bool = True,
        run_indexer: bool = True,
    ) -> None:
        """Run a source layer's compressor and indexer on the step's live rows."""
        meta = self._step
        rows = min(meta.core_attn_metadata.rows, positions.shape[0])
        if layer.compressor is not None and run_compressor and layer.layer_id != self.tail_source_kv_layer_id:
            sources.compress(layer, x[:rows], meta, self.token_to_kv_pool)
        if layer.indexer is not None and run_indexer:
            if q_lora is None:
                raise ValueError(f"layer {layer.layer_id}: the indexer needs q_lora")
            sources.select(
                layer,
                x[:rows],
                q_lora[:rows],
                meta,
                self.token_to_kv_pool,
                block_size=self._config.candidate_block_size,
                blocks=self._config.candidate_topk_blocks,
            )

    def get_swa_out_cache_loc(self, forward_batch: Any) -> Tensor:
        """The window slots that the rows of this call write."""
        meta = self._step
        if meta.late_layer_tail is not None:
            return meta.late_layer_tail.swa_out_cache_loc
        cached, live = meta.core_attn_metadata.swa_out_cache_loc, forward_batch.out_cache_loc
        if cached.shape[0] == live.shape[0]:
            return cached
        return self.token_to_kv_pool.translate_loc_from_full_to_swa(live).to(torch.int32)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        compress_ratio: int,
        attn_sink: Tensor,
        save_kv_cache: bool = False,
        **_: Any,
    ) -> Tensor:
        """Attention of ``q`` [rows, heads, dim] over each row's window, its selected rows and the sink.

        Raises:
            ValueError: for more rows than the step's metadata has: padding got here as if it were real.
        """
        if k is not v or save_kv_cache:
            raise NotImplementedError("keys are values here, and the model has stored them")
        core, pool = self._step.core_attn_metadata, self.token_to_kv_pool
        rows = q.shape[0]
        if rows > core.rows:
            raise ValueError(f"{rows} rows attend, the step has {core.rows}")
        slots = core.swa_page_indices[:rows]
        keys, present = pool.rows(pool.swa[layer.layer_id], slots), slots >= 0
        if compress_ratio:
            chosen = core.sparse_page_indices(compress_ratio)[:rows]
            compressed = pool.rows(pool.compressed[pool.source_of(layer.layer_id)], chosen)
            keys, present = torch.cat([keys, compressed], dim=1), torch.cat([present, chosen >= 0], dim=1)
        return attend(q.float(), keys.float(), present, attn_sink.float(), layer.scaling).to(q.dtype)
