"""The selection of a short context: all of it.

An index layer scores every compressed position that a row sees and keeps the best ``index_topk`` (512). A row that
sees no more keeps them all, whatever they score, and the engine sorts what it keeps: the selection is 0, 1, 2, … and
no score was needed. That holds for prompts of up to 512 times the layer's ratio, the commonest prefill steps of all.
"""

from __future__ import annotations

import torch

from sglang_dsv4_graphs.breaks.kernels import select_visible


def select_all(
    raw: torch.Tensor,
    page: torch.Tensor | None,
    lens: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor | None,
) -> None:
    """Write the selection of rows that keep everything they see.

    Args:
        raw: [at least rows, width] int32, out: request-local compressed positions, -1 padded; further rows get -1.
        page: the same as pool slots, out, or None if nobody reads them.
        lens: [rows] int64, compressed positions each row sees, at most ``width``.
        slots: [columns] int64, pool slot of each compressed position, request by request.
        starts: [rows] int64, the first column of each row's request; None for one request.
    """
    if raw.is_cuda:
        select_visible(raw, page, lens, slots, starts)
        return
    rows, width = lens.shape[0], raw.shape[1]
    columns = torch.arange(width, device=raw.device)
    visible = columns < lens[:, None]
    raw.fill_(-1)
    raw[:rows] = torch.where(visible, columns, -1).to(torch.int32)
    if page is None:
        return
    page.fill_(-1)
    if slots.shape[0]:
        at = columns if starts is None else columns + starts[:, None]
        picked = slots[at.clamp_max(slots.shape[0] - 1).expand(rows, width)]
        page[:rows, :width] = torch.where(visible, picked, -1).to(torch.int32)


def all_blocks(lens: torch.Tensor, widest: int, block_size: int) -> torch.Tensor:
    """Ids of every block that holds a visible position, -1 padded: [rows, blocks of ``widest`` positions] int32."""
    ids = torch.arange(-(-widest // block_size), device=lens.device)
    return torch.where(ids * block_size < lens[:, None], ids, -1).to(torch.int32)
