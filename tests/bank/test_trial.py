"""Where the ladder ends: the bisection tries few buckets, the middle first, and trusts a measured win alone."""

from __future__ import annotations

import pytest

from sglang_dsv4_graphs.bank.trial import Trial, bucket_for_several, largest_winner, worst_rows

LADDER = (64, 128, *range(256, 8193, 256))


def search(buckets: tuple[int, ...], largest_that_wins: int) -> tuple[int, list[int]]:
    tried: list[int] = []

    def run(bucket: int) -> Trial:
        tried.append(bucket)
        return Trial(bucket, bucket - 1, 1.0, 0.9 if bucket <= largest_that_wins else 1.1)

    largest, trials = largest_winner(buckets, run)
    assert [t.bucket for t in trials] == tried
    return largest, tried


@pytest.mark.parametrize(
    ("wins", "largest"),
    [(8192, 8192), (8191, 7680), (4096, 4096), (4095, 3584), (1536, 1536), (1535, 1024), (0, 1024)],
)
def test_every_end_of_the_ladder(wins: int, largest: int) -> None:
    found, tried = search(LADDER, wins)
    assert found == largest
    assert len(tried) <= 5


def test_the_middle_comes_first_as_trials_of_the_top_take_longest() -> None:
    assert search(LADDER, 2560) == (2560, [5120, 3072, 2048, 2560])
    assert search(LADDER, 8192) == (8192, [5120, 7168, 8192])


def test_only_coarse_steps_are_tried_and_an_odd_top() -> None:
    for wins in range(0, 2301, 100):
        found, tried = search((*LADDER[:9], 2000), wins)
        assert set(tried) <= {1536, 2000}
        assert found == (2000 if wins >= 2000 else 1536 if wins >= 1536 else 1024)


@pytest.mark.parametrize("buckets", [(), (64,), (64, 128, 256, 512, 1024)])
def test_short_ladders_are_not_tried(buckets: tuple[int, ...]) -> None:
    assert search(buckets, 0) == (max(buckets, default=0), [])


@pytest.mark.parametrize(("bucket", "rows"), [(64, 1), (128, 65), (256, 129), (8192, 7937)])
def test_the_worst_rows_of_a_bucket(bucket: int, rows: int) -> None:
    assert worst_rows(bucket, LADDER) == rows


@pytest.mark.parametrize(
    ("eager", "replayed", "wins"), [(1.0, 0.9, True), (1.0, 0.945, True), (1.0, 0.955, False), (1.0, 1.1, False)]
)
def test_a_win(eager: float, replayed: float, wins: bool) -> None:
    assert Trial(64, 1, eager, replayed).wins is wins
    # Where the fewest requests that are several tie, more of them win.
    assert Trial(64, 1, eager, replayed, requests=4).wins is (replayed <= eager)


@pytest.mark.parametrize(
    ("few", "largest", "bucket"),
    [
        (2560, 8192, 4096),
        (3840, 8192, 4096),
        (4096, 8192, None),
        (7680, 8192, None),
        (1024, 2048, 2048),
        (2048, 2048, None),
    ],
)
def test_the_bucket_that_several_requests_are_tried_in(few: int, largest: int, bucket: int | None) -> None:
    assert bucket_for_several([b for b in LADDER if b <= largest], few) == bucket
