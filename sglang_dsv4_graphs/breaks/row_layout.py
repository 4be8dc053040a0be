"""Which rows of a step belong to which request, from what the host knows.

The engine's per-request indexer asks the device (unique request ids, their rows, their longest length), and each
answer waits for everything that was launched before: some forty times a step. The scheduler built the step, so the
host has all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestRows:
    """One request in a step: its rows ``[begin, end)``, the compressed positions ``visible`` at its newest row, and
    the column ``start`` at which they begin among all requests' positions laid end to end."""

    index: int
    begin: int
    end: int
    visible: int
    start: int


def request_rows(
    rows_per_request: Sequence[int] | None, seq_lens: Sequence[int] | None, ratio: int, rows: int
) -> list[RequestRows] | None:
    """Requests of a step that have rows, in row order; None where the host's numbers do not describe the rows.

    Args:
        rows_per_request: query rows of each request; a request may have none.
        seq_lens: tokens of each request's context up to and including its newest row.
        ratio: tokens per compressed position.
        rows: query rows of the step.
    """
    if rows_per_request is None or seq_lens is None or len(rows_per_request) != len(seq_lens):
        return None
    if sum(rows_per_request) != rows:
        return None
    found: list[RequestRows] = []
    begin = start = 0
    for index, (count, length) in enumerate(zip(rows_per_request, seq_lens, strict=True)):
        visible = length // ratio
        if count:
            found.append(RequestRows(index, begin, begin + count, visible, start))
        begin += count
        start += visible
    return found


def selects_everything(requests: Sequence[RequestRows], topk: int) -> bool:
    """Whether every request sees at most ``topk`` compressed positions, so that a top-k selects them all."""
    return all(r.visible <= topk for r in requests)
