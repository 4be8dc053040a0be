"""What one step's attention reads, built once before its layers run.

Like the engine's own metadata this is a snapshot of the step: its rows' requests and positions, the slots of
each row's window, of each request's compressed rows, and of what the step writes. Later steps make another
object. Whoever still holds an old one computes with an old step, which is what tests must be able to see.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sglang_dsv4_graphs.cpu_engine.config import SWA_WINDOW
from sglang_dsv4_graphs.cpu_engine.pool import CpuKVPool


@dataclass(frozen=True)
class Segment:
    """One request's rows in a step: rows ``start`` to ``end``, and its compressed slots per ratio."""

    request: int
    start: int
    end: int
    seq_len: int
    compressed_slots: dict[int, Tensor]


@dataclass
class CoreMetadata:
    """Slots and positions, one entry per row; ``selection`` is written during the step by its indexers."""

    positions: Tensor
    raw_out_loc: Tensor
    swa_out_cache_loc: Tensor
    swa_page_indices: Tensor
    segments: list[Segment]
    selection: dict[int, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.positions.shape[0]

    def sparse_page_indices(self, compress_ratio: int) -> Tensor:
        """Slots of the compressed rows each row attends to, -1 where there are fewer."""
        return self.selection[compress_ratio]


@dataclass
class StepMetadata:
    """The engine's per-step metadata object: the fields that the model and this backend touch."""

    core_attn_metadata: CoreMetadata
    low_ratio_req_indices: Tensor
    low_ratio_pos_i64: Tensor
    # The TP-padded query rows; the model grows it and marks it once a graph holds it.
    q_pad_buffer: Tensor | None = None
    q_pad_captured: bool = False
    # Per row, the compressed groups that the candidate source lets later indexers score.
    candidate_metadata: Tensor | None = None
    late_layer_tail: Any = None
    prefill_graph_tail: bool = False

    @property
    def core_metadata(self) -> CoreMetadata:
        return self.core_attn_metadata


def build_metadata(
    *,
    pool: CpuKVPool,
    req_to_token: Tensor,
    req_pool_indices: list[int],
    seq_lens: list[int],
    extend_lens: list[int],
    positions: Tensor,
    out_cache_loc: Tensor,
    index_topk: int,
    window_floor: Tensor | None = None,
) -> StepMetadata:
    """Snapshot a step whose requests run ``extend_lens`` rows each.

    ``window_floor`` [rows] is the first position a row's window may reach (None: the plain window).
    """
    rows = sum(extend_lens)
    positions = positions[:rows].long()
    segments: list[Segment] = []
    start = 0
    for request, seq_len, length in zip(req_pool_indices, seq_lens, extend_lens, strict=True):
        slots = {
            ratio: req_to_token[request, ratio - 1 : seq_len - seq_len % ratio : ratio].long()
            for ratio in pool.present_ratios
        }
        segments.append(Segment(request, start, start + length, seq_len, slots))
        start += length
    row_requests = torch.repeat_interleave(torch.tensor(req_pool_indices), torch.tensor(extend_lens))
    out_cache_loc = out_cache_loc[:rows].clone()
    core = CoreMetadata(
        positions=positions,
        raw_out_loc=out_cache_loc,
        swa_out_cache_loc=pool.translate_loc_from_full_to_swa(out_cache_loc).to(torch.int32),
        swa_page_indices=_window_slots(pool, req_to_token, row_requests, positions, window_floor),
        segments=segments,
        selection={r: torch.full((rows, index_topk), -1, dtype=torch.int64) for r in pool.present_ratios},
    )
    return StepMetadata(core, row_requests.long(), positions)


def _window_slots(
    pool: CpuKVPool, req_to_token: Tensor, requests: Tensor, positions: Tensor, floor: Tensor | None
) -> Tensor:
    """Window slots [rows, SWA_WINDOW] of each row's last positions, -1 before the floor."""
    at = positions.unsqueeze(1) - torch.arange(SWA_WINDOW)
    first = torch.zeros_like(positions) if floor is None else floor.long()
    outside = at < first.unsqueeze(1)
    slots = req_to_token[requests.long().unsqueeze(1), at.clamp_min(0)]
    return pool.translate_loc_from_full_to_swa(slots).masked_fill(outside, -1)
