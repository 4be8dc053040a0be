"""Ranks that must decide alike, as real processes: everybody learns every report, and who is missing has a name."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.ranks import RankError, Ranks  # noqa: E402

WAIT = timedelta(seconds=2)
TIMEOUT_S = 180


def run_ranks(size: int, function: Callable[..., Any], folder: Path) -> list[Any]:
    """What ``function(rank, size)`` returned in each of ``size`` processes with a gloo group."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.SimpleQueue()
    store = str(folder / "store")
    processes = [spawn.Process(target=_enter, args=(function, rank, size, store, results)) for rank in range(size)]
    for p in processes:
        p.start()
    deadline = time.monotonic() + TIMEOUT_S
    for p in processes:
        p.join(max(0.0, deadline - time.monotonic()))
    codes = [p.exitcode for p in processes]
    for p in processes:
        p.kill()
    assert codes == [0] * size
    return [value for _, value in sorted(results.get() for _ in range(size))]


def _enter(function: Callable[..., Any], rank: int, size: int, store: str, results: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    results.put((rank, function(rank, size)))


def reports_and_absences(rank: int, size: int) -> dict[str, Any]:
    import torch.distributed as dist

    together, without_1, without_0, alone_0, alone_1 = (dist.new_group(list(range(size))) for _ in range(5))
    ranks = Ranks(rank, size, together, WAIT)
    found: dict[str, Any] = {
        "fine": ranks.gather(""),
        "one fails": ranks.gather("OutOfMemoryError: no room" if rank == 1 else ""),
        "differ": ranks.gather(f"report of {rank}"),
        "any": [ranks.any(problem) for problem in (False, rank == 0, rank == 1, True, False)],
    }
    for name, group, missing in (("without 1", without_1, 1), ("without 0", without_0, 0)):
        if rank != missing:
            start = time.monotonic()
            try:
                found[name] = Ranks(rank, size, group, WAIT).gather("here")
            except RankError as error:
                found[name] = (str(error), time.monotonic() - start)
        dist.barrier(group=together)
    for group, waiting in ((alone_0, 0), (alone_1, 1)):
        if rank == waiting:
            start = time.monotonic()
            try:
                found["alone"] = Ranks(rank, size, group, WAIT).any(True)
            except RankError as error:
                found["alone"] = (str(error), time.monotonic() - start)
        dist.barrier(group=together)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(2, reports_and_absences, tmp_path_factory.mktemp("ranks"))


def test_all_learn_every_report_in_rank_order(found: list[Any]) -> None:
    for rank in (0, 1):
        assert found[rank]["fine"] == ["", ""]
        assert found[rank]["one fails"] == ["", "OutOfMemoryError: no room"]
        assert found[rank]["differ"] == ["report of 0", "report of 1"]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_rank_is_named_within_the_wait(found: list[Any], missing: int) -> None:
    waiting = 1 - missing
    text, seconds = found[waiting][f"without {missing}"]
    start = f"rank {waiting} waited 2 s: "
    assert text.startswith(start)
    assert f"rank {missing}" in text.removeprefix(start).lower()
    assert seconds < 10 * WAIT.total_seconds()


def test_all_learn_of_a_problem_on_any(found: list[Any]) -> None:
    for rank in (0, 1):
        assert found[rank]["any"] == [False, True, True, True, False]


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_step_waits_no_longer_than_the_wait(found: list[Any], waiting: int) -> None:
    text, seconds = found[waiting]["alone"]
    assert text.startswith(f"rank {waiting} waited 2 s in a step: ")
    assert seconds < 10 * WAIT.total_seconds()


def test_one_rank_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(dist, "monitored_barrier", None)
    monkeypatch.setattr(dist, "all_reduce", None)
    monkeypatch.setattr(dist, "isend", None)
    assert Ranks(0, 1).gather("alone") == ["alone"]
    assert Ranks(0, 1).any(True) is True
    assert Ranks(0, 1).any(False) is False


def test_the_wait_is_longer_than_a_kernels_compilation() -> None:
    from sglang_dsv4_graphs.bank import ranks

    assert timedelta(seconds=60) < ranks.WAIT <= timedelta(minutes=10)
    assert Ranks(0, 1)._wait == ranks.WAIT
