"""What two ranks of one tensor-parallel engine do in the tests: scenarios, run one after the other in both processes.

Every scenario is a function of the rank that returns what this rank saw, for JSON. Each brings its own server up, in
the world that the first one joined.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

from sglang_dsv4_graphs.extend import hookimpl
from sglang_dsv4_graphs.hooks import start
from tests.replay import example_guard
from tests.replay.judge import Judge, same
from tests.replay.server import DECODER_REPLAY, DECODER_REPLAY_CAP, FULL_LAYER, FULL_LAYER_CAP, Server, serving
from tests.replay.story import Story
from tests.replay.sweeps import Clock, out_of_memory, watched_backend

WAIT_S = 60
# A chunk with a bucket of its own, whose trial is the first.
LARGE = 320
# Heads and their width, as the kernels take a query.
PADDED = (64, 128)
SETTINGS = {FULL_LAYER_CAP: "128", DECODER_REPLAY_CAP: "128"}


def buckets(server: Server) -> dict[str, list[int]]:
    banks = {name: server.bank(name) for name in (FULL_LAYER, DECODER_REPLAY)}
    return {name: list(bank.buckets) for name, bank in banks.items() if bank is not None}


def steps(server: Server, *plan: dict[str, int]) -> dict[str, Any]:
    """Run compared steps; what replayed, and the last step's rows as a number that both ranks can compare."""
    story = Story(server, Judge.of(server))
    for step in plan:
        story.step(step)
    batch = story.batch({"z": 33})
    return {
        "replays": sorted(map(str, server.served.replays)),
        "rows": server.runner.forward(batch).tail.double().sum().item(),
    }


def log_of(server: Server, *words: str) -> list[str]:
    return server.log.having(*words)


def everything_fine(rank: int, up: Any) -> dict[str, Any]:
    """Replays with collectives in their segments, and the TP-padded query buffer that a bank owns."""
    with up(SETTINGS) as server:
        found: dict[str, Any] = {"buckets": buckets(server), "unowned": [], "pads": []}
        for name in (FULL_LAYER, DECODER_REPLAY):
            bank = server.bank(name)
            found["pads"].append([list(t.shape) for t in bank.owned_tensors() if t.shape[1:] == PADDED])
            for bucket in bank.buckets:
                recording = bank.recording(bucket)
                keep = [*bank.owned_tensors(), *server.guarded(bank)]
                found["unowned"] += [str(r) for r in recording.external_reads(keep)]
                recording.poison(keep)
        return found | steps(server, {"a": 60}, {"a": 33, "b": 2}, {"c": 128})


def one_capture_fails(rank: int, up: Any) -> dict[str, Any]:
    fails = out_of_memory((FULL_LAYER, 64), (DECODER_REPLAY, 128)) if rank == 1 else out_of_memory()
    with up(SETTINGS, make_backend=watched_backend([], fails)) as server:
        found = {"buckets": buckets(server), "log": log_of(server, "capture-failed")}
        return found | steps(server, {"a": 60}, {"a": 33, "b": 2})


def one_buffer_moves(rank: int, up: Any) -> dict[str, Any]:
    example_guard.workspace = None
    example_guard.grow(64)
    with up(SETTINGS, extensions=[example_guard]) as server:
        story = Story(server, Judge.of(server))
        story.step({"a": 60})
        if rank == 1:
            example_guard.grow(128)
        batch = story.batch({"a": 30})
        right = server.eager_tail(batch)
        tail, replays, _ = server.new_counts(lambda: server.runner.forward(batch).tail)
        return {
            "buckets": buckets(server),
            "replays": list(replays),
            "right": same(tail, right),
            "log": log_of(server, "moved-buffer"),
        }


def ranks_differ_in_speed_and_memory(rank: int, up: Any) -> dict[str, Any]:
    """Rank 1 finds that replays pay everywhere, and has other amounts of memory free."""
    clock = Clock(
        eager=lambda rows: 1.0 if rank == 0 and rows > 120 else 3.0,
        replayed=lambda rows: 2.0,
        free=lambda: (rank + 8) << 30,
    )
    with small_trials(clock), up({DECODER_REPLAY_CAP: "128"}, chunked_prefill_size=LARGE) as server:
        return {"buckets": buckets(server)} | steps(server, {"a": 60})


def one_trial_fails(rank: int, up: Any) -> dict[str, Any]:
    """The others must not race without it: a range has collectives, in which they would wait."""
    clock = Clock(eager=lambda rows: 3.0, replayed=lambda rows: 2.0)
    fails = out_of_memory((FULL_LAYER, LARGE)) if rank == 1 else out_of_memory()
    backend = watched_backend([], fails)
    with (
        small_trials(clock),
        up({DECODER_REPLAY_CAP: "128"}, make_backend=backend, chunked_prefill_size=LARGE) as server,
    ):
        return {"buckets": buckets(server)} | steps(server, {"a": 60})


def one_has_no_room(rank: int, up: Any) -> dict[str, Any]:
    """Rank 1's memory is nearly gone when the late layers' turn comes."""
    events: list[Any] = []
    clock = Clock(
        eager=lambda rows: 3.0,
        replayed=lambda rows: 2.0,
        free=lambda: (100 << 20) if rank == 1 and (FULL_LAYER, 64) in events else 8 << 30,
    )
    with patch.object(start, "Device", clock), up(SETTINGS, make_backend=watched_backend(events)) as server:
        return {"buckets": buckets(server), "log": log_of(server, "capture-failed")} | steps(server, {"a": 60})


def one_cannot_begin(rank: int, up: Any) -> dict[str, Any]:
    """Its dummy step cannot be built; the other must not run the growing forward, in which it would wait."""
    from sglang_dsv4_graphs.bank.dummies import Dummies

    with patch.object(Dummies, "_input_ids", lambda *args: 1 / 0) if rank == 1 else nullcontext():
        return stood_down(up)


class FailsAtStartup:
    """An extension whose startup fails on one rank, after the banks' or (``first``) before any of them."""

    def __init__(self, rank: int, first: bool) -> None:
        self.fails, self.first, self.banks = rank == 1, first, []

    @hookimpl(wrapper=True)
    def dsv4_graphs_startup(self, startup: Any) -> Any:
        self.banks = startup.banks
        if self.fails and self.first:
            raise OSError("no licence")
        done = yield
        self.banks = list(startup.banks)
        if self.fails:
            raise OSError("no licence")
        return done


def one_fails_before_any_capture(rank: int, up: Any) -> dict[str, Any]:
    return stood_down(up, FailsAtStartup(rank, first=True))


def one_fails_after_every_capture(rank: int, up: Any) -> dict[str, Any]:
    return stood_down(up, FailsAtStartup(rank, first=False))


def stood_down(up: Any, *extensions: FailsAtStartup) -> dict[str, Any]:
    """A server whose startup fails: both ranks say the same, and serve eagerly together."""
    with up(SETTINGS, extensions=extensions, graphs=False) as server:
        batch = Story(server, Judge.of(server)).batch({"z": 33})
        rows = server.runner.forward(batch).tail.double().sum().item()
        return {
            "ready": server.served.ready,
            "stand_down": server.served.stand_down,
            "log": log_of(server, " eager "),
            "retired": [(b.name, list(b.buckets), b.retired) for e in extensions for b in e.banks],
            "rows": rows,
        }


SCENARIOS = (
    everything_fine,
    one_capture_fails,
    one_buffer_moves,
    ranks_differ_in_speed_and_memory,
    one_trial_fails,
    one_has_no_room,
    one_cannot_begin,
    one_fails_before_any_capture,
    one_fails_after_every_capture,
)


@contextmanager
def small_trials(clock: Clock) -> Iterator[None]:
    from sglang_dsv4_graphs.bank import trial

    with patch.object(trial, "ALWAYS", 64), patch.object(trial, "COARSE", 64), patch.object(start, "Device", clock):
        yield


def run(rank: int, port: int) -> dict[str, Any]:
    """In a fresh process, beside the other rank's: what this rank saw in every scenario."""
    from torch import distributed

    from sglang_dsv4_graphs.bank import ranks
    from sglang_dsv4_graphs.cpu_engine.process import World

    ranks.WAIT = timedelta(seconds=WAIT_S)  # read when a group is made
    found: dict[str, Any] = {}
    up = partial(serving, world=World(rank, 2, port))
    for scenario in SCENARIOS:
        print(f"rank {rank}: {scenario.__name__}", flush=True)  # where a rank hangs that is ended
        try:
            found[scenario.__name__] = scenario(rank, up)
        except BaseException:
            # The other rank may wait for this one: what comes after proves nothing.
            found[scenario.__name__] = {"error": traceback.format_exc()}
            break
    # A rank that ends takes its connections with it, and the other may still read its last message. Nothing of the
    # interpreter's end is waited for either, as a fresh process ends without it: its order is not the same on both.
    with suppress(RuntimeError):
        distributed.monitored_barrier(timeout=timedelta(seconds=WAIT_S))
    return found
