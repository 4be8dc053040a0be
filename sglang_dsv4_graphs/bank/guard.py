"""The address guard: a moved buffer is an error, never a replay.

A captured kernel reads by address. Inputs and outputs belong to the bank, but some buffers it reads are other
people's: a workspace that a library grows on a larger step, a weight that an update replaced. After such a move
a replay reads freed memory and the text stays plausible (ai-dynamo #13328, sglang #37606). So the address of
each such buffer is recorded when a graph is captured, and compared before it is replayed.

Does not detect a buffer that is rewritten in place: that is what buffers are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

# Weights compared before one replay; all of them come round in some dozen steps.
WEIGHTS_PER_CHECK = 48


class GuardedBuffer(NamedTuple):
    """One buffer that captured kernels read by address and the bank does not own.

    ``tensor`` returns the current one (None while there is none); it is called before every replay if ``cheap``,
    else only when a graph was captured and when all addresses are checked.
    """

    name: str
    tensor: Callable[[], torch.Tensor | None]
    cheap: bool = True


class Weight(NamedTuple):
    """A weight by the slot that holds it: an update may move its storage or put another tensor into the slot."""

    name: str
    slots: Mapping[str, torch.Tensor | None]
    key: str

    def address(self) -> int | None:
        return _address(self.slots.get(self.key))


class MovedBufferError(RuntimeError):
    """A buffer that a captured graph reads lies elsewhere now; names bank, bucket, buffer and both addresses."""

    def __init__(self, bank: str, bucket: int, buffer: str, captured: int | None, current: int | None) -> None:
        self.bank, self.bucket, self.buffer = bank, bucket, buffer
        super().__init__(
            f"bank={bank} bucket={bucket} buffer={buffer} moved: captured at {_hex(captured)}, now at "
            f"{_hex(current)}; a replay would read freed memory"
        )


def _hex(address: int | None) -> str:
    return "nowhere" if address is None else hex(address)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Addresses(NamedTuple):
    """Addresses of all guarded buffers at one moment, in the guard's order."""

    buffers: tuple[int | None, ...]


class AddressGuard:
    """Records and compares addresses. ``weights`` are checked in rotation, everything else before every replay."""

    def __init__(self, buffers: Iterable[GuardedBuffer], weights: Sequence[Weight] = ()) -> None:
        self._buffers = tuple(buffers)
        self._cheap = tuple((i, b) for i, b in enumerate(self._buffers) if b.cheap)
        self._weights = tuple(weights)
        self._weight_addresses = tuple(w.address() for w in self._weights)
        self._turn = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Guarded buffers by name, weights apart."""
        return tuple(b.name for b in self._buffers)

    def addresses(self) -> Addresses:
        """Where everything lies now."""
        return Addresses(tuple(_address(b.tensor()) for b in self._buffers))

    def check(self, captured: Addresses, *, bank: str, bucket: int, everything: bool = False) -> None:
        """Compare with the addresses at capture; cheap buffers and a share of the weights unless ``everything``.

        Raises:
            MovedBufferError: for the first that differs.
        """
        buffers = enumerate(self._buffers) if everything else self._cheap
        for i, b in buffers:
            now = _address(b.tensor())
            if now != captured.buffers[i]:
                raise MovedBufferError(bank, bucket, b.name, captured.buffers[i], now)
        self._check_weights(bank, bucket, len(self._weights) if everything else WEIGHTS_PER_CHECK)

    def _check_weights(self, bank: str, bucket: int, count: int) -> None:
        total = len(self._weights)
        for _ in range(min(count, total)):
            i = self._turn
            self._turn = (i + 1) % total
            weight = self._weights[i]
            now = weight.address()
            if now != self._weight_addresses[i]:
                raise MovedBufferError(bank, bucket, weight.name, self._weight_addresses[i], now)
