"""Whose memory a tape reads: its own, a break's, or somebody else's who may free it.

A CUDA graph that reads a freed buffer gives wrong numbers only when the allocator has handed the memory on,
which tests never see: on the CPU a Python reference kept the buffer alive. So the tape notes for each storage
who owns it, and can fill everything that a CUDA graph could not rely on with values that show.

Owners of a storage:

- *segment*: allocated by an operation of a segment. Holds nothing between replays.
- *bridge*: a new tensor that a break returned. The engine's wrapper keeps it and copies each replay's result
  into it, so it is alive; but whether a break made it or a cache it only returned is not known, so it is
  never poisoned.
- *constant*: a Python number that became a 0-dim tensor. A kernel parameter on a GPU, never poisoned.
- *foreign*: everything else: weights, static inputs, what a warm-up left, and what a break stored somewhere
  instead of returning it. Valid only if somebody keeps it.

A foreign storage counts as read if an operation of a segment reads it, or writes only part of it, before one
wrote the whole of it (``copy_``, ``fill_``, ``zero_``, ``out=`` on a tensor that spans the storage), or if it
is an argument of a break: the engine holds those weakly on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch

from sglang_dsv4_graphs.bank.tape_ops import Site

# Bytes that poison a storage. All ones is a NaN in every float format that has one, but the "fnuz" ones;
# 0x3f3f... is far outside every index range as an int16, int32 or int64, and leaves room to be added to.
_NAN_BYTE, _FNUZ_NAN_BYTE, _INT_BYTE = 0xFF, 0x80, 0x3F
_FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Owner(Enum):
    SEGMENT = "segment"
    BRIDGE = "bridge"
    CONSTANT = "constant"


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of ``tensor``'s storage, valid while something holds the storage."""
    return tensor.untyped_storage()._cdata


class _Block:
    """A storage and the type it was first used as."""

    def __init__(self, tensor: torch.Tensor, owner: Owner | None) -> None:
        self.storage = tensor.untyped_storage()
        self.dtype = tensor.dtype
        self.owner = owner
        self._flipped: torch.Tensor | None = None

    def poison(self) -> None:
        content = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        if self.dtype is torch.bool:
            # The first flip is kept: flipping a flip would give the true values back.
            if self._flipped is None:
                self._flipped = content ^ 1
            content.copy_(self._flipped)
        elif self.dtype in _FNUZ:
            content.fill_(_FNUZ_NAN_BYTE)
        elif self.dtype.is_floating_point or self.dtype.is_complex:
            content.fill_(_NAN_BYTE)
        else:
            content.fill_(_INT_BYTE)


@dataclass(frozen=True)
class ExternalRead:
    """A foreign tensor that the recording reads: the first reading operation and its place."""

    tensor: torch.Tensor
    operation: str
    segment: int
    site: Site

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def __str__(self) -> str:
        what = f"{self.dtype}{list(self.shape)} read by {self.operation}"
        return f"{what} in segment {self.segment} at {self.site}"


class Ledger:
    """The storages of one recording. Holds each storage that it knows, so that identities stay unique."""

    def __init__(self) -> None:
        self._owned: dict[int, _Block] = {}
        self._foreign: dict[int, tuple[_Block, ExternalRead]] = {}
        self._overwritten: dict[int, torch.UntypedStorage] = {}

    def own(self, tensor: torch.Tensor, owner: Owner) -> None:
        """Note who made ``tensor``'s storage, unless it is known already."""
        key = storage_key(tensor)
        if key not in self._owned and key not in self._foreign:
            self._owned[key] = _Block(tensor, owner)

    def owner(self, tensor: torch.Tensor) -> Owner | None:
        block = self._owned.get(storage_key(tensor))
        return None if block is None else block.owner

    def read(self, tensor: torch.Tensor, operation: str, segment: int, site: Site) -> None:
        """Note that an operation needs what ``tensor`` holds."""
        key = storage_key(tensor)
        if key in self._owned or key in self._overwritten or key in self._foreign or tensor.numel() == 0:
            return
        self._foreign[key] = (_Block(tensor, None), ExternalRead(tensor.detach(), operation, segment, site))

    def overwrite(self, tensor: torch.Tensor) -> None:
        """Note that an operation replaces what ``tensor`` holds."""
        storage = tensor.untyped_storage()
        if tensor.numel() * tensor.element_size() >= storage.nbytes():
            self._overwritten[storage._cdata] = storage

    def external_reads(self, keep: Iterable[torch.Tensor]) -> list[ExternalRead]:
        kept = {storage_key(t) for t in keep}
        return [read for key, (_, read) in self._foreign.items() if key not in kept]

    def poison_own(self) -> None:
        for block in self._owned.values():
            if block.owner is Owner.SEGMENT:
                block.poison()

    def poison_foreign(self, keep: Iterable[torch.Tensor]) -> None:
        kept = {storage_key(t) for t in keep}
        for key, (block, _) in self._foreign.items():
            if key not in kept:
                block.poison()
