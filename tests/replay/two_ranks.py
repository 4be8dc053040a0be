"""What two ranks of one tensor-parallel engine do in the tests: scenarios, run one after the other in both processes.

Every scenario is a function of the rank that returns what this rank saw, for JSON. Each brings its own server up, in
the world that the first one joined.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.replay import example_guard
from tests.replay.judge import Judge, same
from tests.replay.server import DECODER_REPLAY, DECODER_REPLAY_CAP, FULL_LAYER, FULL_LAYER_CAP, Server, serving
from tests.replay.story import Story
from tests.replay.sweeps import Clock, out_of_memory, watched_backend

WAIT_S = 10
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
            found["pads"].append(list(bank._query_pad.shape))
            for bucket in bank.buckets:
                recording = bank.recording(bucket)
                keep = [*bank.owned_tensors(), *server.weights()]
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
        eager=lambda rows: 1.0 if rank == 0 and rows > 130 else 3.0,
        replayed=lambda rows: 2.0,
        free=lambda: (rank + 1) << 30,
    )
    with small_trials(clock), up({DECODER_REPLAY_CAP: "128"}) as server:
        return {"buckets": buckets(server)} | steps(server, {"a": 60})


def one_trial_fails(rank: int, up: Any) -> dict[str, Any]:
    """The others must not race without it: a range has collectives, in which they would wait."""
    clock = Clock(eager=lambda rows: 3.0, replayed=lambda rows: 2.0)
    fails = out_of_memory((FULL_LAYER, 320)) if rank == 1 else out_of_memory()
    with small_trials(clock), up({DECODER_REPLAY_CAP: "128"}, make_backend=watched_backend([], fails)) as server:
        return {"buckets": buckets(server)} | steps(server, {"a": 60})


def one_rank_never_comes(rank: int, up: Any) -> dict[str, Any]:
    """Last of all: the ranks part here."""
    from sglang_dsv4_graphs.bank.ranks import Ranks

    def never(self: Any, report: str) -> list[str]:
        raise ZeroDivisionError("this rank broke down")

    began = time.monotonic()
    breaking = patch.object(Ranks, "gather", never) if rank == 1 else nullcontext()
    with breaking, up(SETTINGS, graphs=False) as server:
        return {
            "seconds": time.monotonic() - began,
            "ready": server.served.ready,
            "stand_down": server.served.stand_down,
        }


SCENARIOS = (
    everything_fine,
    one_capture_fails,
    one_buffer_moves,
    ranks_differ_in_speed_and_memory,
    one_trial_fails,
    one_rank_never_comes,
)


@contextmanager
def small_trials(clock: Clock) -> Iterator[None]:
    from sglang_dsv4_graphs.bank import trial
    from sglang_dsv4_graphs.hooks import start

    with patch.object(trial, "ALWAYS", 64), patch.object(trial, "COARSE", 64), patch.object(start, "Device", clock):
        yield


def main() -> None:
    """``python -m tests.replay.two_ranks RANK PORT FILE SCENARIO...``: results of this rank, as JSON, into FILE."""
    rank, port, file, *wanted = sys.argv[1:]
    from sglang_dsv4_graphs.bank.ranks import Ranks
    from sglang_dsv4_graphs.cpu_engine.process import World
    from sglang_dsv4_graphs.hooks import start

    found: dict[str, Any] = {}
    up = partial(serving, world=World(int(rank), 2, int(port)))
    with patch.object(start, "Ranks", partial(Ranks, wait=timedelta(seconds=WAIT_S))):
        for scenario in SCENARIOS:
            if scenario.__name__ not in wanted:
                continue
            try:
                found[scenario.__name__] = scenario(int(rank), up)
            except BaseException:
                # The other rank may wait for this one: what comes after proves nothing.
                found[scenario.__name__] = {"error": traceback.format_exc()}
                break
            finally:
                Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
