"""The compressors and indexers of the ratio-1 and ratio-2 source layers.

Projections, pooling, norms and scores are the engine's own modules. What surrounds them here is what makes
them depend on the step: pairs that span two steps, slots that the step writes, keys that earlier steps wrote.
They run in breaks, so they may read the host.

Left out is the engine's FP4 rounding, which turns a rounding difference of the input into a visible one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_dsv4_graphs.cpu_engine.kernels import rms_normalize, rotate
from sglang_dsv4_graphs.cpu_engine.metadata import StepMetadata
from sglang_dsv4_graphs.cpu_engine.pool import CpuKVPool

_NEVER = float("-inf")


def compress(layer: Any, x: Tensor, meta: StepMetadata, pool: CpuKVPool) -> None:
    """Write the compressed rows (and index keys) that the rows ``x`` complete."""
    rows = x.shape[0]
    pos = meta.low_ratio_pos_i64[:rows]
    kv, score = layer.compressor.project(x)
    slots = meta.core_attn_metadata.raw_out_loc[:rows].long()
    if layer.compress_ratio == 2:
        partner_kv, partner_score = _partners(layer.layer_id, kv, score, meta, pool)
        kv = layer.compressor.pool_pairs(
            torch.stack([partner_kv, kv], dim=1).float(), torch.stack([partner_score, score], dim=1).float()
        )
        # A pair is complete at its second token, and carries the position of its first.
        second = pos % 2 == 1
        kv, slots, pos = kv[second], slots[second], pos[second] - 1
    _write(layer, kv, slots, pos, pool)


def _partners(layer_id: int, kv: Tensor, score: Tensor, meta: StepMetadata, pool: CpuKVPool) -> tuple[Tensor, Tensor]:
    """The previous token's projections for each row: of this step, or pending since an earlier one."""
    rows = kv.shape[0]
    pending = pool.pending[layer_id]
    partner_kv, partner_score = kv.roll(1, 0).clone(), score.roll(1, 0).clone()
    carried: list[tuple[int, Tensor]] = []
    for segment in meta.core_attn_metadata.segments:
        if segment.start >= rows:
            continue
        partner_kv[segment.start] = pending[segment.request, 0]
        partner_score[segment.start] = pending[segment.request, 1]
        last = min(segment.end, rows) - 1
        carried.append((segment.request, torch.stack([kv[last], score[last]]).float()))
    # Every read of the pending half comes before every write of the next one.
    for request, half in carried:
        pending[request] = half
    return partner_kv, partner_score


def _write(layer: Any, kv: Tensor, slots: Tensor, pos: Tensor, pool: CpuKVPool) -> None:
    if not kv.shape[0]:
        return
    norm = layer.compressor.norm
    latent = rms_normalize(kv, norm.eps, norm.weight)
    indexer = layer.indexer
    if indexer is not None and indexer.owns_k:
        # Index keys come from the latent before it is rotated.
        key = rms_normalize(latent @ indexer.wk.weight.float().t(), indexer.k_norm.eps, indexer.k_norm.weight)
        pool.index_keys[layer.layer_id][slots] = _rotate_tail(key, layer, pos)
    rows = _rotate_tail(latent, layer, pos)
    cache = pool.compressed[layer.layer_id]
    cache[slots] = rows.to(cache.dtype)


def _rotate_tail(x: Tensor, layer: Any, pos: Tensor) -> Tensor:
    tail = rotate(x[..., -layer.rope_head_dim :], layer.freqs_cis, pos)
    return torch.cat([x[..., : -layer.rope_head_dim].float(), tail], dim=-1)


def select(
    layer: Any,
    x: Tensor,
    q_lora: Tensor,
    meta: StepMetadata,
    pool: CpuKVPool,
    *,
    block_size: int,
    blocks: int,
) -> None:
    """Publish, per row, which compressed rows this layer and its readers attend to.

    A candidate source also publishes the groups of its best blocks; later index sources score only those.
    """
    rows, ratio, indexer = x.shape[0], layer.compress_ratio, layer.indexer
    core = meta.core_attn_metadata
    candidates = meta.candidate_metadata
    if indexer.is_candidate_source:
        width = max((s.seq_len // ratio for s in core.segments), default=0)
        candidates = meta.candidate_metadata = torch.zeros(core.rows, width, dtype=torch.bool)
    elif indexer.uses_candidates and candidates is None:
        raise RuntimeError(f"layer {layer.layer_id} scores candidates that no layer of this step published")
    scores_of = _scores(layer, x, q_lora, meta, pool)
    out = core.selection[ratio]
    out.fill_(-1)
    for segment in core.segments:
        at = slice(segment.start, min(segment.end, rows))
        groups = segment.compressed_slots[ratio]
        if at.start >= at.stop or not groups.shape[0]:
            continue
        scores = scores_of(at, groups)
        if candidates is not None and indexer.is_candidate_source:
            candidates[at, : groups.shape[0]] = _best_blocks(scores, block_size=block_size, blocks=blocks)
        elif candidates is not None and indexer.uses_candidates:
            # An older step's mask may have another width: what it does not know is no candidate.
            known = torch.nn.functional.pad(candidates[at], (0, groups.shape[0] - candidates.shape[1]))
            scores = scores.masked_fill(~known, _NEVER)
        best, chosen = _top(scores, out.shape[1])
        out[at, : chosen.shape[1]] = groups[chosen].masked_fill(best == _NEVER, -1)


def _scores(
    layer: Any, x: Tensor, q_lora: Tensor, meta: StepMetadata, pool: CpuKVPool
) -> Callable[[slice, Tensor], Tensor]:
    """A function of a request's rows and compressed slots: scores [rows, groups], -inf for later groups."""
    indexer, ratio = layer.indexer, layer.compress_ratio
    queries, _ = indexer.wq_b(q_lora)
    queries = queries.view(x.shape[0], indexer.n_local_heads, indexer.index_head_dim)
    queries = _rotate_tail(queries, layer, meta.low_ratio_pos_i64[: x.shape[0]])
    weights = indexer.head_weights(x).float()
    keys = pool.index_keys[pool.source_of(layer.layer_id)]
    positions = meta.core_attn_metadata.positions

    def scores_of(at: slice, groups: Tensor) -> Tensor:
        last_of_group = torch.arange(1, groups.shape[0] + 1) * ratio - 1
        scores = indexer.scores(queries[at], keys[groups], weights[at])
        return scores.masked_fill(last_of_group > positions[at].unsqueeze(1), _NEVER)

    return scores_of


def _top(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` best scores of each row and where; of equals (often exact zeros) the earlier one."""
    best, order = scores.sort(dim=1, descending=True, stable=True)
    return best[:, :count], order[:, :count]


def _best_blocks(scores: Tensor, *, block_size: int, blocks: int) -> Tensor:
    """Which groups [rows, groups] lie in a row's ``blocks`` best blocks of ``block_size`` groups."""
    groups = scores.shape[1]
    padded = torch.nn.functional.pad(scores, (0, -groups % block_size), value=_NEVER)
    by_block = padded.unflatten(1, (-1, block_size)).amax(2)
    best = _top(by_block, blocks)[1]
    chosen = torch.zeros_like(by_block, dtype=torch.bool).scatter_(1, best, True)
    return chosen.repeat_interleave(block_size, dim=1)[:, :groups]
