"""Engram in a replayed step: the loop hashes, once and on the step's own rows; ranges are given the ids.

Hashing reads the history of each request and commits the step's last tokens to it, so it must run exactly once per
step, whichever banks take part. It also reads positions and KV slots, which are not padded to a bucket. So it is no
part of a range: a step's view of the model has a hasher that keeps what it returned, and the ids enter a range as
static rows beside the residual streams.
"""

from __future__ import annotations

from typing import Any

import torch


class StepHasher:
    """The model's hasher for one step; ``ids`` [rows, Engram layers, hash columns] once it has hashed."""

    def __init__(self, hasher: Any) -> None:
        self._hasher = hasher
        self.ids: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        self.ids = self._hasher(input_ids, forward_batch)
        return self.ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_hasher"], name)


class GivenHashes:
    """Stands for the hasher while a range's body runs: the ids of its rows are known, and nothing is committed."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._ids = ids

    def __call__(self, input_ids: torch.Tensor, forward_batch: Any = None) -> torch.Tensor:
        """The given ids.

        Raises:
            ValueError: if they are not those of ``input_ids``' rows.
        """
        if input_ids.shape[0] != self._ids.shape[0]:
            raise ValueError(f"{self._ids.shape[0]} rows of hash ids were given, {input_ids.shape[0]} rows need them")
        return self._ids

    def new_hash_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """0.5.23 asks for a buffer and has a break fill it: here it is full already."""
        return self(input_ids)


def around_hash_break(original: Any, hasher: Any, input_ids: Any, *out: Any) -> Any:
    """AROUND the engine's break of the hash: given ids need no break, and hash nothing.

    0.5.23 passes the buffer that ``new_hash_ids`` made; 0.5.22 takes the ids as the result.
    """
    if isinstance(hasher, GivenHashes):
        return hasher(input_ids)
    return original(hasher, input_ids, *out)


def has_engram(model: Any, first: int, last: int) -> bool:
    """Whether a layer of ``[first, last)`` carries an Engram."""
    return any(getattr(model.layers[i], "engram", None) is not None for i in range(first, last))


def staged_by_scheduler(model: Any, first: int, last: int) -> bool:
    """Whether the scheduler stages the Engram rows of a layer of ``[first, last)`` (0.5.23, host tables).

    It stages the whole step's rows, in their order: a range on the tail's rows cannot take its own from them.
    """
    engrams = (getattr(model.layers[i], "engram", None) for i in range(first, last))
    return any(getattr(getattr(e, "embed", None), "staged_by_scheduler", False) for e in engrams)
