"""Two ranks of one tensor-parallel engine: whatever happens to one, both replay the same, and no wait is endless."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.fresh import in_fresh_processes
from tests.replay import two_ranks
from tests.replay.server import DECODER_REPLAY, FULL_LAYER

pytestmark = pytest.mark.engine

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found() -> list[dict[str, dict[str, Any]]]:
    """What each of two ranks saw in every scenario."""
    from sglang_dsv4_graphs.cpu_engine.process import free_port

    port = free_port()
    ended = in_fresh_processes(two_ranks.run, [(0, port), (1, port)])
    for rank, finished in enumerate(ended):
        for scenario in two_ranks.SCENARIOS:
            name = scenario.__name__
            assert name in finished.value, f"rank {rank} did not come to {name}:\n{finished.output[-3000:]}"
            assert "error" not in finished.value[name], f"rank {rank}, {name}:\n{finished.value[name]['error']}"
    return [finished.value for finished in ended]


def of(found: list[dict[str, dict[str, Any]]], scenario: str) -> Found:
    return [by_scenario[scenario] for by_scenario in found]


def test_both_replay_and_agree(found: Any) -> None:
    one, other = of(found, "everything_fine")
    assert one["buckets"] == other["buckets"] == {FULL_LAYER: [64, 128], DECODER_REPLAY: [128]}
    # Half of the heads each, padded to the width of the kernels, in one buffer for all buckets of a bank.
    assert one["pads"] == other["pads"] == [[[128, 64, 128]]] * 2
    assert one["unowned"] == other["unowned"] == []
    assert one["replays"] == other["replays"] != []
    assert one["rows"] == other["rows"]


def test_a_capture_that_fails_on_one(found: Any) -> None:
    one, other = of(found, "one_capture_fails")
    assert one["buckets"] == other["buckets"] == {FULL_LAYER: [128], DECODER_REPLAY: []}
    # Rank 0 writes the log, and names the rank.
    reasons = [re.search(r'reason="(.*)"', line) for line in one["log"]]
    assert [r and r[1] for r in reasons] == ["rank 1: OutOfMemoryError: CUDA out of memory."] * 2
    assert other["log"] == []
    assert one["replays"] == other["replays"] != []
    assert one["rows"] == other["rows"]


def test_a_buffer_that_moves_on_one(found: Any) -> None:
    one, other = of(found, "one_buffer_moves")
    for rank in (one, other):
        assert rank["buckets"] == {FULL_LAYER: [], DECODER_REPLAY: []}
        assert (rank["replays"], rank["right"], len(rank["log"])) == ([], True, 2)
    assert all("a guarded buffer moved on rank 1" in line for line in one["log"])
    assert all("rank=1" in line and "buffer=my-workspace moved" in line for line in other["log"])


def test_ranks_that_find_different_things_pay(found: Any) -> None:
    one, other = of(found, "ranks_differ_in_speed_and_memory")
    assert one["buckets"] == other["buckets"] == {FULL_LAYER: [64, 128], DECODER_REPLAY: [128]}
    assert one["rows"] == other["rows"]


def test_a_trial_that_fails_on_one(found: Any) -> None:
    one, other = of(found, "one_trial_fails")
    assert one["buckets"] == other["buckets"] == {FULL_LAYER: [64, 128, 256], DECODER_REPLAY: [128]}
    assert one["rows"] == other["rows"]


def test_a_rank_that_has_no_room(found: Any) -> None:
    one, other = of(found, "one_has_no_room")
    assert one["buckets"] == other["buckets"] == {FULL_LAYER: [64, 128], DECODER_REPLAY: []}
    (line,) = one["log"]
    assert "bank=decoder-replay rows=128 kept=0 " in line
    assert "rank 1 has 0.10 GiB free, a capture of 128 rows takes 0.25" in line
    assert one["rows"] == other["rows"]


@pytest.mark.parametrize(
    ("scenario", "why"),
    [
        ("one_cannot_begin", "ZeroDivisionError: division by zero"),
        ("one_fails_before_any_capture", "OSError: no licence"),
        ("one_fails_after_every_capture", "OSError: no licence"),
    ],
)
def test_a_startup_that_fails_on_one(found: Any, scenario: str, why: str) -> None:
    one, other = of(found, scenario)
    for rank in (one, other):
        assert (rank["ready"], rank["stand_down"]) == (False, f"startup failed: rank 1: {why}")
    assert one["log"] == [f'dsv4-graphs: eager reason="startup failed: rank 1: {why}"']
    assert other["log"] == []
    assert one["rows"] == other["rows"]  # eager steps with the engine's own collectives


def test_no_graph_is_left_of_a_startup_that_failed(found: Any) -> None:
    for rank in of(found, "one_fails_after_every_capture"):
        reason = "startup failed: rank 1: OSError: no licence"
        assert rank["retired"] == [[name, [], reason] for name in (FULL_LAYER, DECODER_REPLAY)]
