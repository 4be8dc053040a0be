"""Which rows of a step pair up in a ratio-2 compressor, found once a replay.

A compressed position pools two tokens. The second's partner is the row before it if that is the same request's token
before; else it was carried over from an earlier step in the request's ring of pending halves. All of this follows
from requests, positions and padding, which the layers of a range have in common: only the halves themselves differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# A position of no slot: the pool keeps an empty row for it.
_NOWHERE = -1


@dataclass(frozen=True, slots=True)
class PairRows:
    """``inside`` [rows, 1] bool: the partner is the row before. ``read`` and ``write`` [rows] int64: rows of the pool
    of pending halves, where a partner carried over lies and where a row's own half goes."""

    inside: torch.Tensor
    read: torch.Tensor
    write: torch.Tensor


def pair_rows(state: Any, req: torch.Tensor, pos: torch.Tensor, pad: torch.Tensor) -> PairRows:
    """The pairs of a step's rows.

    Args:
        state: the engine's pool of pending halves of any layer of this ratio; its ring size counts.
        req: [rows] int64, request slots.
        pos: [rows] int64, positions; those of a request ascend by one.
        pad: [rows] bool, rows of no request.
    """
    real = ~pad
    inside = torch.zeros_like(pad)
    inside[1:] = (req[1:] == req[:-1]) & (pos[1:] - pos[:-1] == 1) & real[1:] & real[:-1]
    kept, ring = real, state.ring_size
    if pos.shape[0] > ring:
        # A row that the same request overwrites in this very step: two writes to one slot would be unordered.
        superseded = (req[ring:] == req[:-ring]) & real[ring:]
        kept = real.clone()
        kept[:-ring] &= ~superseded
    translate = state.translate_from_req_position_to_state_loc
    return PairRows(
        inside=inside[:, None],
        read=translate(req, (pos - 1).masked_fill(pad, _NOWHERE)),
        write=translate(req, pos.masked_fill(~kept, _NOWHERE)),
    )


def partners(rows: PairRows, state: Any, own: Any) -> Any:
    """The partner's half of each row; the rows' own halves become pending.

    Args:
        rows: from ``pair_rows``, of a step in which this state has not been written yet.
        state: the engine's pool of pending halves of one layer.
        own: the engine's ``KVAndScore`` of the rows, [rows, 2 * dim].
    """
    carried = state.get_state_by_state_loc(rows.read)
    found = torch.where(rows.inside, own.kv_score.roll(1, 0), carried.kv_score)
    state.set_state_by_state_loc(rows.write, own)
    return type(own)(found)
