"""A sweep over a small model: a device whose memory is counted, a second rank that is scripted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_dsv4_graphs.bank.bank import Bank
from sglang_dsv4_graphs.bank.guard import AddressGuard
from sglang_dsv4_graphs.bank.ranks import Ranks
from sglang_dsv4_graphs.bank.sweep import Startup
from sglang_dsv4_graphs.bank.tape import TapeBackend
from tests.bank.small_model import LATE, TAIL_ROWS, SmallDummies, World

BUCKETS = (4, 8, 16)


class FakeDevice:
    """A device whose free memory falls by 100 bytes a look; plenty of it."""

    def __init__(self, *, is_cuda: bool = False) -> None:
        self.is_cuda = is_cuda
        self.free, self.releases, self.streams = 100 << 30, 0, []
        self.times: Callable[[int], float] = lambda call: 0.0
        self.timed = self.waits = 0

    def free_bytes(self) -> int:
        self.free -= 100
        return self.free

    def room_bytes(self) -> int:
        return self.free

    def release(self) -> None:
        self.releases += 1

    def synchronize(self) -> None:
        self.waits += 1

    def seconds(self, call: Callable[[], object]) -> float:
        call()
        self.timed += 1
        return self.times(self.timed)

    def on(self, stream: Any) -> Any:
        self.streams.append(stream)
        return torch.no_grad()


class OtherRank(Ranks):
    """Rank 0 of two; ``says`` is what the other one answers to (kind, text) of this one's message."""

    def __init__(self, says: Callable[[str, str], tuple[str, str] | None] = lambda kind, text: None) -> None:
        super().__init__(0, 2)
        self.says = says
        self.messages: list[tuple[str, str]] = []

    def swap(self, message: str) -> list[str]:
        kind, depth, place, text = message.split("\x1f", 3)
        self.messages.append((kind, text))
        answer = self.says(kind, text) or (kind, text)
        return [message, "\x1f".join((answer[0], depth, place, answer[1]))]

    def inside(self, part: Callable[[], Any]) -> Any:
        """What ``part`` returns inside a section, as everything of a sweep runs."""
        found: list[Any] = []
        failure = self.together("startup", lambda: found.append(part()))
        if failure is not None:
            raise failure.error or AssertionError(str(failure))
        return found[0]


class Sweep:
    """A sweep over a small world; ``fails`` maps rows to what their capture raises."""

    def __init__(
        self,
        world: World,
        *,
        strict: bool = False,
        ranks: Ranks | None = None,
        chunk: int | None = 16,
        cuda: bool = False,
        store_in_graph: bool = False,
    ) -> None:
        self.world, self.dummies, self.device = world, SmallDummies(world), FakeDevice(is_cuda=cuda)
        self.ranks = ranks or Ranks(0, 1)
        self.guards: list[tuple[int, int]] = []
        self.startup = Startup(
            served=world.served,
            dummies=self.dummies,  # type: ignore[arg-type]
            backend=TapeBackend(world.engine.capture_var, poison=True),
            make_guard=self.make_guard,
            ranks=self.ranks,
            device=self.device,  # type: ignore[arg-type]
            chunk_size=chunk,
            strict=strict,
            store_in_graph=store_in_graph,
        )

    def make_guard(self, first: int, last: int) -> AddressGuard:
        self.guards.append((first, last))
        return AddressGuard([])

    def captured(
        self, first: int = 0, last: int = LATE, fails: dict[int, Exception] | None = None, **options: Any
    ) -> Bank:
        self.startup.grow()
        self.startup.open()
        bank = self.startup.make_bank("full-layer", first, last, BUCKETS)
        real = bank.capture

        def capture(rows: int, *args: Any) -> Any:
            if fails and rows in fails:
                raise fails[rows]
            return real(rows, *args)

        bank.capture = capture  # type: ignore[method-assign]
        length = TAIL_ROWS if first == LATE else None
        self.startup.capture_all(bank, lambda rows: self.dummies.batch(rows, length), **options)
        return bank


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")
