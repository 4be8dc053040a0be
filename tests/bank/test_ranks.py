"""Ranks that must decide alike, as real processes: everybody learns every report, and who is missing has a name."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank import ranks as WAITS  # noqa: E402
from sglang_dsv4_graphs.bank.ranks import Failure, RankError, Ranks  # noqa: E402
from tests.bank.processes import a_group, run_ranks  # noqa: E402

WAIT = timedelta(seconds=2)


def shown(failure: Failure | None) -> str:
    return "" if failure is None else f"{failure}{' (own)' if failure.error else ''}"


# Where a rank fails in a part that meets three times: before meeting 0, 1, 2, or after the last (3).
POINTS = range(4)


def a_part(ranks: Ranks, fails_at: int | None, seen: list[int]) -> None:
    for point in POINTS:
        if point == fails_at:
            raise ValueError(f"at {point}")
        if point < len(POINTS) - 1:
            ranks.rendezvous()
            seen.append(point)


def every_interleaving(rank: int, size: int) -> dict[str, Any]:
    """Ranks that fail at any two points, alone, together, in nested parts, and errors that somebody swallows."""
    ranks = Ranks(rank, size, a_group(size), WAIT)
    found: dict[str, Any] = {}
    for points in product((None, *POINTS), repeat=size):
        seen: list[int] = []
        failure = ranks.together("part", lambda p=points, s=seen: a_part(ranks, p[rank], s))
        found[str(points)] = (shown(failure), len(seen))

    def nested() -> None:
        found["inner"] = shown(ranks.together("inner", lambda: a_part(ranks, 1 if rank == 1 else None, [])))
        found["after"] = shown(ranks.together("inner", lambda: a_part(ranks, None, [])))

    found["outer"] = shown(ranks.together("outer", nested))

    def outer_fails() -> None:
        if rank == 1:
            raise ValueError("outside")
        ranks.together("inner", lambda: a_part(ranks, None, []))
        raise AssertionError("the section around this one is over")

    found["outer fails"] = shown(ranks.together("outer", outer_fails))

    def told() -> None:
        with suppress(Exception), ranks.telling():
            a_part(ranks, 2 if rank == 0 else None, [])

    found["told and swallowed"] = shown(ranks.together("told", told))
    found["another way"] = shown(ranks.together("other", lambda: [ranks.rendezvous() for _ in range(1 + rank)]))
    notes: list[list[str]] = []
    found["fine"] = shown(ranks.together("notes", lambda: notes.append(ranks.rendezvous(f"note of {rank}"))))
    found["notes"] = notes[0]
    found["long"] = shown(ranks.together("long", lambda: [][0] if rank else exec("raise ValueError('é' * 5000)")))
    found["still"] = shown(ranks.together("part", lambda: a_part(ranks, None, [])))
    return found


def absences(rank: int, size: int) -> dict[str, Any]:
    """Ranks that do not come, or come too late, to a meeting or to a step; the engine's own group goes on."""
    import torch.distributed as dist

    engine, asking = dist.new_group(list(range(size))), Ranks(rank, size, a_group(size))
    found: dict[str, Any] = {"who": [asking.who(problem) for problem in (False, rank == 0, rank == 1, True, False)]}
    for missing in (1, 0):
        ranks = Ranks(rank, size, a_group(size), WAIT, WAIT)

        def part(ranks: Ranks = ranks, missing: int = missing) -> None:
            if rank == missing:
                time.sleep(WAIT.total_seconds() * 1.5)
            ranks.rendezvous()

        for ask in ("meeting", "again"):
            start = time.monotonic()
            try:
                ranks.together("part", part)
            except RankError as error:
                found[f"{ask} without {missing}"] = (str(error), time.monotonic() - start)
        steps = Ranks(rank, size, a_group(size), WAIT, WAIT)
        if rank != missing:
            start = time.monotonic()
            try:
                steps.who(True)
            except RankError as error:
                found[f"step without {missing}"] = (str(error), time.monotonic() - start)
        dist.barrier(group=engine)
    sums = torch.ones(1)
    dist.all_reduce(sums, group=engine)
    found["engine"] = sums.item()
    return found


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(2, every_interleaving, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(2, absences, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("points", list(product((None, *POINTS), repeat=2)), ids=str)
def test_a_part_is_over_on_all_ranks_at_once(met: list[Any], points: tuple[int | None, int | None]) -> None:
    failing = [p for p in points if p is not None]
    for rank in (0, 1):
        text, meetings = met[rank][str(points)]
        if not failing:
            assert (text, meetings) == ("", 3)
            continue
        first = min(failing)
        culprit = points.index(first)
        own = " (own)" if points[rank] == first else ""
        assert text == f"rank {culprit}: ValueError: at {first}{own}"
        assert meetings == first  # nobody waits for more meetings than took place


def test_three_ranks_agree_too(tmp_path: Path) -> None:
    found = run_ranks(3, every_interleaving, tmp_path)
    for points in product((None, *POINTS), repeat=3):
        texts = {of[str(points)][0].removesuffix(" (own)") for of in found}
        assert len(texts) == 1, points
        assert (texts == {""}) is (set(points) == {None})
    assert [of["still"] for of in found] == [""] * 3


def test_sections_nest(met: list[Any]) -> None:
    for rank in (0, 1):
        assert met[rank]["inner"].startswith("rank 1: ValueError: at 1")
        assert (met[rank]["after"], met[rank]["outer"]) == ("", "")  # the startup goes on without that bucket
        assert met[rank]["outer fails"].startswith("rank 1: ValueError: outside")


def test_an_error_that_was_told_counts_though_somebody_swallowed_it(met: list[Any]) -> None:
    assert [met[rank]["told and swallowed"] for rank in (0, 1)] == ["rank 0: ValueError: at 2"] * 2


def test_ranks_at_different_points_do_not_go_on(met: list[Any]) -> None:
    reason = "rank 0: ranks took different ways: rank 0 at done of 'other', rank 1 at meet of 'other'"
    assert [met[rank]["another way"].removesuffix(" (own)") for rank in (0, 1)] == [reason] * 2


def test_notes_come_in_rank_order_and_long_words_are_cut(met: list[Any]) -> None:
    for rank in (0, 1):
        assert (met[rank]["fine"], met[rank]["notes"]) == ("", ["note of 0", "note of 1"])
        assert met[rank]["long"].startswith("rank 0: ValueError: éééé")
        assert met[rank]["still"] == ""


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_rank_is_named_within_the_wait(lost: list[Any], missing: int) -> None:
    waiting = 1 - missing
    text, seconds = lost[waiting][f"meeting without {missing}"]
    assert text == f"rank {waiting} waited 2 s: nothing came from rank {missing}"
    assert seconds < 10 * WAIT.total_seconds()
    # Once lost, nobody waits again.
    again, at_once = lost[waiting][f"again without {missing}"]
    assert (again, at_once < 1) == (text, True)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_late_gives_itself_up(lost: list[Any], late: int) -> None:
    """It may find a message of a peer that has left: going on with that would part the ranks."""
    text, _ = lost[late][f"meeting without {late}"]
    assert re.match(rf"rank {late} comes after [3-9]\.\d s: others wait 2 s and may have left", text)


def test_all_learn_on_which_rank_a_buffer_moved(lost: list[Any]) -> None:
    for rank in (0, 1):
        assert lost[rank]["who"] == [None, 0, 1, 1, None]


@pytest.mark.parametrize("missing", [0, 1])
def test_a_step_waits_no_longer_than_its_wait(lost: list[Any], missing: int) -> None:
    text, seconds = lost[1 - missing][f"step without {missing}"]
    assert text.startswith(f"rank {1 - missing} waited up to 2 s in a prefill step for the other ranks to say whether ")
    assert seconds < 10 * WAIT.total_seconds()


def test_an_expired_wait_leaves_the_engines_group_alone(lost: list[Any]) -> None:
    assert [lost[rank]["engine"] for rank in (0, 1)] == [2.0, 2.0]


def test_one_rank_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    for name in ("new_group", "all_reduce", "isend"):
        monkeypatch.setattr(dist, name, None)
    ranks = Ranks.of(0, [0])
    assert ranks.rendezvous("alone") == ["alone"]
    assert (ranks.who(True), ranks.who(False)) == (0, None)
    assert ranks.together("part", lambda: None) is None
    failure = ranks.together("part", lambda: [][0])
    assert str(failure) == "rank 0: IndexError: list index out of range"

    def handled() -> None:
        with suppress(IndexError), ranks.telling():
            [][0]

    assert ranks.together("part", handled) is None


def test_ranks_meet_inside_sections_only() -> None:
    with pytest.raises(RuntimeError, match=r"call together\(\) first"):
        Ranks(0, 2).rendezvous()


def test_a_missing_member_bounds_the_making_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "new_group", lambda members, **options: made.append(options))
    Ranks.of(1, [0, 1])
    assert made[0]["timeout"] == WAITS.WAIT


def test_waits_are_longer_than_compilation_and_a_steps_is_over_before_the_watchdog() -> None:
    compilation, watchdog = timedelta(seconds=60), timedelta(seconds=300)
    assert compilation < WAITS.WAIT <= timedelta(minutes=10)
    assert compilation < WAITS.STEP_WAIT < watchdog / 2
    assert (Ranks(0, 1)._wait, Ranks(0, 1)._step_wait) == (WAITS.WAIT, WAITS.STEP_WAIT)
