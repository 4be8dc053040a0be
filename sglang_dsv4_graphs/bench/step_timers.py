"""Timers around every part of a replayed step, inside the serving process, while a breakdown is on.

Nothing of this is there otherwise: the timers are put on the live objects (runner, attention backend, served model,
banks, recordings) and taken away again. Times are of the host: a launch returns before the GPU has worked. At the end
of each forward the GPU is waited for, so that what the client sees can be split without remainder.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import torch

from sglang_dsv4_graphs.bank.bank import Bank
from sglang_dsv4_graphs.bank.sweep import Startup
from sglang_dsv4_graphs.bench.patches import Call, Patches
from sglang_dsv4_graphs.bench.recordings import break_kind, merged_store_owner, time_parts

# Of a step: (part,). Of a bank: (bank, part), and for breaks (bank, "break", kind).
FORWARD, METADATA, LOOP, DRAIN = ("forward",), ("metadata",), ("loop",), ("drain",)
_EMPTY_CALLS, _EMPTY_ROUNDS = 2000, 5


class Stopwatch:
    """Nanoseconds and counts by key, of the step that is under way."""

    def __init__(self) -> None:
        self.spent: dict[Hashable, list[int]] = defaultdict(lambda: [0, 0])

    def timed(self, key: Hashable, call: Call) -> Call:
        """``call`` with its time added to ``key``."""
        clock, spent = time.perf_counter_ns, self.spent

        def run(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return call(*args, **kwargs)
            finally:
                entry = spent[key]
                entry[0] += 1
                entry[1] += clock() - start

        return run


class StepTimers:
    """Timers on one server, from construction to ``cancel``."""

    def __init__(self, startup: Startup, runner: Any) -> None:
        self._watch = Stopwatch()
        self._patches = Patches()
        self._steps: list[dict[str, Any]] = []
        served = startup.served
        try:
            self._patches.wrap(runner, "forward", self._around_forward)
            self._wrap(runner.attn_backend, "init_forward_metadata", METADATA)
            self._wrap(served, "run_loop", LOOP)
            stores: set[int] = set()
            for bank in startup.banks:
                if bank.buckets:
                    self._put_on_bank(bank, served._manager.get_plugin(bank.name), stores)
        except Exception:
            self._patches.undo()
            raise

    def cancel(self) -> None:
        self._patches.undo()

    def steps(self) -> list[dict[str, Any]]:
        """Every extend step that ran: its rows and, per part, how often and how many microseconds."""
        return self._steps

    def overhead_us(self) -> float:
        """What a timer costs around a call that does nothing, beyond the call, each at its best of some rounds."""

        def nothing() -> None: ...

        timed = Stopwatch().timed("empty", nothing)
        with_timer, without = (min(_seconds(call) for _ in range(_EMPTY_ROUNDS)) for call in (timed, nothing))
        return round((with_timer - without) / _EMPTY_CALLS * 1e6, 4)

    def _wrap(self, owner: Any, name: str, key: Hashable) -> None:
        self._patches.wrap(owner, name, lambda call: self._watch.timed(key, call))

    def _put_on_bank(self, bank: Bank, keeper: Any, stores: set[int]) -> None:
        """``keeper`` is the plugin that serves from ``bank``: its choice of a bucket holds the guard's check."""
        name = bank.name
        self._wrap(keeper, "usable_bucket", (name, "guard"))
        self._wrap(keeper, "replay", (name, "range"))
        self._wrap(keeper, "leave", (name, "hand-off"))
        self._wrap(bank, "copy_in", (name, "copy-in"))

        def segment(call: Call) -> Call:
            return self._watch.timed((name, "segments"), call)

        def broken(call: Call, break_call: Call) -> Call:
            return self._watch.timed((name, "break", break_kind(break_call)), call)

        for bucket in bank.buckets:
            recording = bank.recording(bucket)
            time_parts(recording, self._patches, segment, broken)
            owner = merged_store_owner(recording)
            if owner is not None and id(owner) not in stores:
                stores.add(id(owner))
                self._wrap(owner, "_store_live_rows", ("store",))

    def _around_forward(self, forward: Call) -> Call:
        def run(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not batch.forward_mode.is_extend():
                return forward(batch, *args, **kwargs)
            self._watch.spent.clear()
            output = self._watch.timed(FORWARD, forward)(batch, *args, **kwargs)
            if torch.cuda.is_available():
                self._watch.timed(DRAIN, torch.cuda.current_stream().synchronize)()
            spent = {key: (count, ns / 1e3) for key, (count, ns) in self._watch.spent.items()}
            self._steps.append({"rows": int(batch.input_ids.shape[0]), "spent": readable(spent)})
            return output

        return run


def readable(spent: dict[Any, tuple[int, float]]) -> list[dict[str, Any]]:
    """Keys and times as rows that JSON can hold."""
    rows = []
    for key, (count, us) in spent.items():
        bank, part, kind = {1: (None, key[0], None), 2: (*key, None), 3: key}[len(key)]
        rows.append({"bank": bank, "part": part, "kind": kind, "count": count, "us": round(us, 2)})
    return rows


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    for _ in range(_EMPTY_CALLS):
        call()
    return time.perf_counter() - start
