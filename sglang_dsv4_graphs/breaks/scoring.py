"""The per-request scores of an index layer without asking the device anything.

Stands in for the engine's generator of the same rows and scores: its ``RequestScores`` and ``ChunkScores`` come out
equal bit for bit, but rows are slices known from the host instead of indices found by the device, index keys are
unpacked in one launch, and what all layers of a replay share is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_dsv4_graphs.breaks.kernels import INDEX_DIM, dequantize_index_keys, holds_index_keys
from sglang_dsv4_graphs.breaks.row_layout import RequestRows
from sglang_dsv4_graphs.breaks.shared import StepShared

# Below this many keys the engine does not align the score's width.
ALIGN_FROM, ALIGN_TO = 1024, 64
# Masks are shared between layers up to this many elements (bytes).
LARGEST_SHARED_MASK = 16 << 20


@dataclass(frozen=True)
class Scheme:
    """What of the engine the scores need: its result types and the byte budget of one chunk of scores."""

    request_scores: Callable[..., Any]
    chunk_scores: Callable[..., Any]
    budget_bytes: int
    # 0.5.23 pads the keys of long contexts to whole tiles; 0.5.22 does not.
    aligns: bool


def visible_lengths(shared: StepShared, positions: torch.Tensor, ratio: int) -> torch.Tensor:
    """[rows] int64: compressed positions each row sees; made once a replay and ratio."""
    return shared.get(("lens", ratio, positions.shape[0]), lambda: (positions + 1) // ratio)


def requests(
    shared: StepShared,
    scheme: Scheme,
    inputs: Any,
    pool: Any,
    layout: Sequence[RequestRows],
    slots_of: Callable[[RequestRows], torch.Tensor],
) -> Iterator[tuple[Any, Iterator[Any]]]:
    """Requests that see something, each with its chunks of scores; clears the selection first."""
    inputs.reset_outputs()
    indexer, ratio, positions = inputs.indexer, inputs.compress_ratio, inputs.positions
    freqs = shared.get(("freqs", inputs.freqs_cis.data_ptr(), positions.shape[0]), lambda: inputs.freqs_cis[positions])
    queries = indexer.queries(inputs.q_lora, freqs)
    weights = indexer.head_weights(inputs.x)
    lens = visible_lengths(shared, positions, ratio)
    for r in layout:
        if r.visible == 0:
            continue
        slots = slots_of(r)
        keys = index_keys(pool, inputs.layer_id, slots, indexer, scheme.aligns)
        columns = shared.get(("columns", r.visible), lambda r=r: torch.arange(r.visible, device=positions.device))  # type: ignore[misc]
        request = scheme.request_scores(
            lc=r.visible,
            k=min(indexer.index_topk, r.visible),
            columns=columns,
            tok=slice(r.begin, r.end),
            lens=lens[r.begin : r.end],
            slots=slots,
        )
        yield request, _chunks(shared, scheme, indexer, queries, weights, keys, lens, columns, r, ratio)


def _chunks(
    shared: StepShared,
    scheme: Scheme,
    indexer: Any,
    queries: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    lens: torch.Tensor,
    columns: torch.Tensor,
    r: RequestRows,
    ratio: int,
) -> Iterator[Any]:
    """Scores of one request, as many rows at a time as the budget holds."""
    width = keys.shape[0] if scheme.aligns else r.visible
    most = max(1, scheme.budget_bytes // (queries.shape[1] * width * 2))
    for begin in range(r.begin, r.end, most):
        end = min(begin + most, r.end)
        own = lens[begin:end]
        scores = indexer.scores(queries[begin:end], keys, weights[begin:end])[:, : r.visible]
        hidden = _hidden(shared, own, columns, (ratio, begin, end, r.visible))
        yield scheme.chunk_scores(
            rows=slice(begin - r.begin, end - r.begin),
            tok=slice(begin, end),
            lens=own,
            scores=scores.masked_fill(hidden, -torch.inf),
        )


def _hidden(shared: StepShared, lens: torch.Tensor, columns: torch.Tensor, key: tuple[int, ...]) -> torch.Tensor:
    """[rows, columns] bool: positions that a row does not see yet."""

    def make() -> torch.Tensor:
        return columns[None, :] >= lens[:, None]

    if lens.shape[0] * columns.shape[0] > LARGEST_SHARED_MASK:
        return make()
    return shared.get(("hidden", *key), make)


def index_keys(pool: Any, layer_id: int, slots: torch.Tensor, indexer: Any, aligns: bool) -> torch.Tensor:
    """[at least len(slots), head dim] index keys, zero past the slots' own where the engine aligns."""
    count = slots.shape[0]
    table = pool.get_index_k_with_scale_buffer(layer_id)
    align = aligns and count >= ALIGN_FROM
    rows = -(-count // ALIGN_TO) * ALIGN_TO if align else count
    if indexer.index_head_dim == INDEX_DIM and table is not None and holds_index_keys(table):
        return dequantize_index_keys(table, slots, rows)
    keys = pool.get_low_ratio_index_k_dequant(layer_id, slots)
    if rows != count and keys.is_cuda and keys.dtype == torch.bfloat16:
        keys = torch.nn.functional.pad(keys, (0, 0, 0, rows - count))
    return keys
