"""Two ranks of one tensor-parallel engine: whatever happens to one, both replay the same, and no wait is endless."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.replay.server import DECODER_REPLAY, FULL_LAYER
from tests.replay.two_ranks import WAIT_S

pytestmark = pytest.mark.engine

TIMEOUT_S = 200
Found = list[dict[str, Any]]


def run_two(folder: Path, *scenarios: str) -> list[dict[str, dict[str, Any]]]:
    """Run ``scenarios`` in two processes; what each rank saw, by scenario."""
    from sglang_dsv4_graphs.cpu_engine.process import free_port

    port = str(free_port())
    files = [folder / f"rank{rank}" for rank in range(2)]
    command = [sys.executable, "-m", "tests.replay.two_ranks"]
    with (folder / "output").open("w") as output:
        ranks = [
            subprocess.Popen(
                [*command, str(rank), port, str(files[rank]), *scenarios],
                cwd=Path(__file__).parents[2],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]
        try:
            for process in ranks:
                process.wait(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    tail = (folder / "output").read_text()[-3000:]
    for rank, by_scenario in enumerate(found):
        for name in scenarios:
            assert name in by_scenario, f"rank {rank} did not come to the end of {name}:\n{tail}"
            assert "error" not in by_scenario[name], f"rank {rank}, {name}:\n{by_scenario[name]['error']}"
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    return run_two(
        tmp_path_factory.mktemp("ranks"),
        "everything_fine",
        "one_capture_fails",
        "one_buffer_moves",
        "ranks_differ_in_speed_and_memory",
        "one_rank_never_comes",
    )


def of(found: list[dict[str, dict[str, Any]]], scenario: str) -> Found:
    return [by_scenario[scenario] for by_scenario in found]


def test_both_replay_and_agree(found: Any) -> None:
    one, other = of(found, "everything_fine")
    assert one["buckets"] == other["buckets"] == {FULL_LAYER: [64, 128], DECODER_REPLAY: [128]}
    # Half of the heads each, padded to the width of the kernels, in one buffer for all buckets of a bank.
    assert one["pads"] == other["pads"] == [[128, 64, 128]] * 2
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
    assert all("moved on another rank" in line for line in one["log"])
    assert all("rank=1" in line and "buffer=my-workspace moved" in line for line in other["log"])


def test_ranks_that_find_different_things_pay(found: Any) -> None:
    one, other = of(found, "ranks_differ_in_speed_and_memory")
    assert one["buckets"] == other["buckets"] == {FULL_LAYER: [64, 128], DECODER_REPLAY: [128]}
    assert one["rows"] == other["rows"]


def test_a_rank_that_never_comes(found: Any) -> None:
    one, other = of(found, "one_rank_never_comes")
    assert not one["ready"]
    assert not other["ready"]
    assert other["stand_down"] == "startup failed: ZeroDivisionError: this rank broke down"
    assert re.match(rf"startup failed: RankError: rank 0 waited {WAIT_S} s: .*[Rr]anks? 1", one["stand_down"])
    assert one["seconds"] < 60 + 3 * WAIT_S


def test_a_trial_that_fails_on_one(tmp_path: Path) -> None:
    """In processes of its own: ranks that wait for each other here would stop the others, too."""
    one, other = of(run_two(tmp_path, "one_trial_fails"), "one_trial_fails")
    assert one["buckets"] == other["buckets"] == {FULL_LAYER: [64, 128, 256], DECODER_REPLAY: [128]}
    assert one["rows"] == other["rows"]
