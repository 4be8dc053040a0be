"""What tests put into a sweep: a backend that notes and fails, a clock of their own, trials of small buckets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tests.replay.server import DECODER_REPLAY, FULL_LAYER

# What happened, and at how many rows.
Event = tuple[str, int]


def watched_backend(
    events: list[Event], fails: Callable[[str, int], Exception | None] = lambda bank, rows: None
) -> Any:
    """Makes a tape that notes what it records; ``fails`` gives what to raise at a bank's capture of some rows."""

    def make(installation: Any) -> Any:
        from sglang_dsv4_graphs.bank.tape import TapeBackend

        class Watched(TapeBackend):
            def record(self, body: Any, *, warmups: int = 2) -> Any:
                recording = super().record(body, warmups=warmups)
                # The full-width range takes no pre-mix in, and of the bank's it is the first.
                rows = recording.outputs[0].shape[0]
                bank = FULL_LAYER if body.__closure__ and takes_no_pre(body) else DECODER_REPLAY
                events.append((bank, rows))
                error = fails(bank, rows)
                if error is not None:
                    raise error
                return recording

        return Watched(installation.runtime.engine.current_capture_var)

    return make


def takes_no_pre(body: Any) -> bool:
    (inputs,) = (c.cell_contents for c in body.__closure__ if type(c.cell_contents).__name__ == "RangeInputs")
    return inputs.pre is None


def watch_steps(events: list[Event]) -> Callable[[Any], None]:
    """Notes every step's rows, when its metadata is built."""

    def prepare(runner: Any) -> None:
        backend = runner.attn_backend
        build = backend.init_forward_metadata

        def noted(batch: Any) -> None:
            events.append(("step", batch.input_ids.shape[0]))
            build(batch)

        backend.init_forward_metadata = noted

    return prepare


def out_of_memory(*at: Event) -> Callable[[str, int], Exception | None]:
    def fails(bank: str, rows: int) -> Exception | None:
        import torch

        return torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB") if (bank, rows) in at else None

    return fails


class Clock:
    """A device whose eager runs take ``eager(rows)`` seconds and whose replays ``replayed(rows)``.

    Each request after the first takes an eager run ``each`` seconds more.
    """

    is_cuda = True

    def __init__(
        self,
        eager: Callable[[int], float],
        replayed: Callable[[int], float],
        free: Callable[[], int] = lambda: 8 << 30,
        each: float = 0.0,
    ) -> None:
        self._eager, self._replayed, self._free, self._each = eager, replayed, free, each
        self.raced: list[tuple[str, int]] = []
        self.requests: list[int] = []

    def __call__(self, device: str) -> Clock:
        return self

    def free_bytes(self) -> int:
        return self._free()

    def room_bytes(self) -> int:
        return self._free()

    def release(self) -> None: ...

    def synchronize(self) -> None: ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def seconds(self, call: Callable[[], object]) -> float:
        cells = {name: c.cell_contents for name, c in zip(call.__code__.co_freevars, call.__closure__, strict=True)}
        kind = "replayed" if "bucket" in cells else "eager"
        rows, requests = cells["live"].rows, cells["batch"].batch_size
        call()
        self.raced.append((kind, rows))
        self.requests.append(requests)
        # The first of each kind is slow, as first runs are.
        slow = 100.0 if self.raced.count((kind, rows)) == 1 else 0.0
        return slow + (self._replayed(rows) if kind == "replayed" else self._eager(rows) + self._each * (requests - 1))
