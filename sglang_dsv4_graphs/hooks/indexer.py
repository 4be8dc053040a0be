"""AROUND hooks on the engine's per-request indexer: the same selection without waiting for the device.

Only inside a replay, which gives its breaks a ``StepShared``; every other step runs the engine's code. Where the
host's numbers do not describe the rows, or the engine selects through DeepGEMM (Blackwell: another order of the
selection), the engine's code runs too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_dsv4_graphs.breaks.row_layout import RequestRows, request_rows, selects_everything
from sglang_dsv4_graphs.breaks.scoring import Scheme, requests, visible_lengths
from sglang_dsv4_graphs.breaks.selection import all_blocks, select_all
from sglang_dsv4_graphs.breaks.shared import StepShared
from sglang_dsv4_graphs.engine.api import Engine

Call = Callable[..., Any]


class IndexerBreaks:
    """Index layers inside a replay."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scheme: Scheme | None = None

    def around_full_topk(self, original: Call, backend: Any, inputs: Any) -> Any:
        """AROUND ``FullTopKIndexer.topk_prefill``."""
        if not self._select_all(backend, inputs, inputs.compress_ratio):
            return original(backend, inputs)
        return None

    def around_publish(self, original: Call, backend: Any, inputs: Any) -> Any:
        """AROUND ``DenseBlocksBackend.publish_prefill``."""
        # Ratio 1: later index layers may be of any ratio, and all of them must come to the same answer here.
        if not self._select_all(backend, inputs, 1, _candidates(backend)):
            return original(backend, inputs)
        lens = visible_lengths(self._shared, inputs.positions, inputs.compress_ratio)
        widest = max((s // inputs.compress_ratio for s in inputs.seq_lens_cpu), default=0)
        blocks = all_blocks(lens, widest, backend.block_size)
        return self._engine.BlockIds(blocks=blocks, rows_per_request=inputs.rows_per_request)

    def around_consume(self, original: Call, backend: Any, inputs: Any, published: Any) -> Any:
        """AROUND ``DenseBlocksBackend.consume_prefill``."""
        if not self._select_all(backend, inputs, 1, _candidates(backend)):
            return original(backend, inputs, published)
        return None

    def around_requests(self, original: Call, **kwargs: Any) -> Any:
        """AROUND ``prefill_requests``."""
        shared, inputs = self._engine.step_shared, kwargs["inputs"]
        layout = None if shared is None else _layout(inputs, inputs.compress_ratio)
        if shared is None or layout is None:
            return original(**kwargs)
        pool, table = kwargs["token_to_kv_pool"], kwargs.get("req_to_token")

        def slots_of(r: RequestRows) -> torch.Tensor:
            return _slots(shared, inputs, table, r)

        return requests(shared, self._engine_scheme(), inputs, pool, layout, slots_of)

    def _select_all(self, backend: Any, inputs: Any, strictest_ratio: int, most: int | None = None) -> bool:
        """Write the selection if no request sees more than the layer selects (and ``most``); whether it did."""
        shared = self._engine.step_shared
        if shared is None or backend.use_deep_gemm_prefill:
            return False
        topk = min(inputs.indexer.index_topk, inputs.out_raw_indices.shape[1])
        topk = topk if most is None else min(topk, most)
        strict = _layout(inputs, strictest_ratio)
        layout = _layout(inputs, inputs.compress_ratio)
        if layout is None or strict is None or not selects_everything(strict, topk):
            return False
        page = inputs.out_page_indices
        slots, starts = inputs.positions, None
        if page is not None:
            if getattr(inputs, "k_slots", None) is None and not _end_to_end(layout):
                return False
            slots = _all_slots(shared, inputs, getattr(backend, "req_to_token", None), layout)
            starts = _starts(shared, inputs, layout)
        lens = visible_lengths(shared, inputs.positions, inputs.compress_ratio)
        select_all(inputs.out_raw_indices, page, lens, slots, starts)
        return True

    @property
    def _shared(self) -> StepShared:
        """What the replay under way shares; asked only inside one."""
        shared = self._engine.step_shared
        if shared is None:
            raise RuntimeError("no replay is under way")
        return shared

    def _engine_scheme(self) -> Scheme:
        if self._scheme is None:
            engine = self._engine
            self._scheme = Scheme(
                engine.RequestScores, engine.ChunkScores, int(engine.score_budget), engine.release != "0.5.22"
            )
        return self._scheme


def _candidates(backend: Any) -> int:
    """Positions that a candidate source's blocks hold: a consumer selects among no others."""
    return int(backend.topk_blocks) * int(backend.block_size)


def _layout(inputs: Any, ratio: int) -> list[RequestRows] | None:
    return request_rows(inputs.rows_per_request, inputs.seq_lens_cpu, ratio, inputs.positions.shape[0])


def _slots(shared: StepShared, inputs: Any, table: torch.Tensor | None, r: RequestRows) -> torch.Tensor:
    """[visible] int64: index-K slots of one request's compressed positions."""
    flat = getattr(inputs, "k_slots", None)  # 0.5.23 gathers them with the step's metadata
    if flat is not None:
        return flat[r.start : r.start + r.visible]
    if table is None:
        raise ValueError("an index layer without slots: neither k_slots nor a request table")
    ratio = inputs.compress_ratio

    def make() -> torch.Tensor:
        # Both indices are vectors: a single number from the device would have to be read first.
        row = inputs.req_pool_indices[r.index : r.index + 1].to(torch.int64)
        at = torch.arange(r.visible, device=row.device) * ratio
        return table[row, at].to(torch.int64) // ratio

    return shared.get(("slots", ratio, r.index, r.visible), make)


def _end_to_end(layout: list[RequestRows]) -> bool:
    """Whether the positions of requests that have rows lie end to end, without those of requests that have none."""
    starts = [0, *(r.start + r.visible for r in layout)]
    return all(r.start == start for r, start in zip(layout, starts, strict=False))


def _all_slots(shared: StepShared, inputs: Any, table: torch.Tensor | None, layout: list[RequestRows]) -> torch.Tensor:
    """[columns] int64: slots of every request's compressed positions, end to end."""
    flat = getattr(inputs, "k_slots", None)
    if flat is not None:
        return flat
    key = ("all-slots", inputs.compress_ratio)
    return shared.get(key, lambda: torch.cat([_slots(shared, inputs, table, r) for r in layout]))


def _starts(shared: StepShared, inputs: Any, layout: list[RequestRows]) -> torch.Tensor | None:
    """[rows] int64: the column at which each row's request begins; None where all begin at 0."""
    if len(layout) == 1 and layout[0].start == 0:
        return None
    rows = inputs.positions.shape[0]

    def make() -> torch.Tensor:
        values = torch.tensor([[r.start, r.end - r.begin] for r in layout], dtype=torch.int64)
        if inputs.positions.is_cuda:
            values = values.pin_memory()
        starts, counts = values.to(inputs.positions.device, non_blocking=True).unbind(1)
        return torch.repeat_interleave(starts, counts, output_size=rows)

    return shared.get(("starts", inputs.compress_ratio, rows), make)
