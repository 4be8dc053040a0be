"""The address guard: a moved buffer is an error, never a replay.

A captured kernel reads by address. Inputs and outputs belong to the bank, but some buffers it reads are other
people's: a workspace that a library grows on a larger step, a weight that an update replaced. After such a move
a replay reads freed memory and the text stays plausible (ai-dynamo #13328, sglang #37606). So the address of
each such buffer is recorded when a graph is captured, and compared before it is replayed.

Does not detect a buffer that is rewritten in place: that is what buffers are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch


class GuardedBuffer(NamedTuple):
    """One buffer that captured kernels read by address and the bank does not own.

    ``tensor`` returns the current one (None while there is none). It is called when a graph is captured and before
    its replays: before each if ``cheap``, else only before the first after a weight update. If it raises before a
    replay, the buffer counts as moved.
    """

    name: str
    tensor: Callable[[], torch.Tensor | None]
    cheap: bool = True


class Weight(NamedTuple):
    """A weight by the slot that holds it: an update may move its storage or put another tensor into the slot."""

    name: str
    slots: dict[str, Any]
    key: str

    def tensor(self) -> torch.Tensor | None:
        return self.slots.get(self.key)


class MovedBufferError(RuntimeError):
    """A buffer that a captured graph reads lies elsewhere now; names bank, bucket, buffer and both addresses.

    ``problem`` says why its present address is unknown, if it is.
    """

    def __init__(
        self,
        bank: str,
        bucket: int,
        buffer: str,
        captured: int | None,
        current: int | None,
        problem: Exception | None = None,
    ) -> None:
        self.bank, self.bucket, self.buffer = bank, bucket, buffer
        now = _hex(current) if problem is None else f"nobody knows where ({type(problem).__name__}: {problem})"
        super().__init__(
            f"bank={bank} bucket={bucket} buffer={buffer} moved: captured at {_hex(captured)}, now at {now}; "
            "a replay would read freed memory"
        )


def _hex(address: int | None) -> str:
    return "nowhere" if address is None else hex(address)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class Addresses(NamedTuple):
    """Addresses of all guarded buffers at one moment, in the guard's order."""

    buffers: tuple[int | None, ...]


class AddressGuard:
    """Records and compares the addresses of what one bank's graphs read and others own.

    Weights lie where they lay when the guard was made, for every bucket; buffers where they lay when the bucket was
    captured. What is not cheap to ask for is compared in the first check of each bucket after ``weights_changed``.
    """

    def __init__(self, buffers: Iterable[GuardedBuffer], weights: Sequence[Weight] = ()) -> None:
        self._buffers = tuple(buffers)
        self._cheap = tuple((i, b) for i, b in enumerate(self._buffers) if b.cheap)
        self._weights = tuple(weights)
        self._slots = [w.slots for w in self._weights]
        self._keys = [w.key for w in self._weights]
        self._weight_addresses = [_address(w.tensor()) for w in self._weights]
        self._updates = 0
        # By bucket: how many updates there had been when everything was last compared.
        self._compared: dict[int, int] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Guarded buffers by name, weights apart."""
        return tuple(b.name for b in self._buffers)

    def addresses(self) -> Addresses:
        """Where everything lies now."""
        return Addresses(tuple(_address(b.tensor()) for b in self._buffers))

    def weights_changed(self) -> None:
        """The engine has loaded, moved or derived weights anew: the next check of each bucket compares everything."""
        self._updates += 1

    def check(self, captured: Addresses, *, bank: str, bucket: int, everything: bool = False) -> None:
        """Compare with the addresses at capture: all weights and cheap buffers; the rest if due or ``everything``.

        Raises:
            MovedBufferError: for the first that differs, or whose probe raises.
        """
        everything = everything or self._compared.get(bucket, 0) != self._updates
        for i, b in enumerate(self._buffers) if everything else self._cheap:
            _compare(bank, bucket, b.name, b.tensor, captured.buffers[i])
        if self._any_weight_moved():
            for weight, address in zip(self._weights, self._weight_addresses, strict=True):
                _compare(bank, bucket, weight.name, weight.tensor, address)
        if everything:
            self._compared[bucket] = self._updates

    def _any_weight_moved(self) -> bool:
        # No Python code per weight: there are several hundred. A slot that is gone or holds no tensor raises.
        try:
            now = list(map(torch.Tensor.data_ptr, map(getitem, self._slots, self._keys)))
        except Exception:
            return True
        return now != self._weight_addresses


def _compare(bank: str, bucket: int, name: str, probe: Callable[[], torch.Tensor | None], captured: int | None) -> None:
    """Raise ``MovedBufferError`` unless ``probe``'s tensor lies at ``captured``."""
    try:
        now = _address(probe())
    except Exception as e:  # whatever an extension's probe or a tensor without memory raises: not known to be in place
        raise MovedBufferError(bank, bucket, name, captured, None, e) from e
    if now != captured:
        raise MovedBufferError(bank, bucket, name, captured, now)
