"""A wrong row is found among rows that differ from run to run, and noise alone is no wrong row."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bench.apart import rows_apart  # noqa: E402

ROWS = 300


def answers(seed: int, count: int = 8):
    """Rows that all differ a little and now and then a lot, as where another expert is chosen."""
    draw = torch.Generator().manual_seed(seed)
    right = torch.randn(ROWS, 2, 8, generator=draw)
    found = []
    for _ in range(count):
        flips = (torch.rand(ROWS, 1, 1, generator=draw) < 0.1) * 8.0
        found.append(right + 0.01 * torch.randn(ROWS, 2, 8, generator=draw) + flips)
    return found


@pytest.mark.parametrize("seed", range(6))
def test_one_wrong_row_among_rows_that_flip(seed: int) -> None:
    right = answers(seed)
    wrong = [t.clone() for t in right[4:]]
    for t in wrong:
        t[137] += 20.0
    found = rows_apart(right[:4], wrong)
    assert found["row"] == 137
    assert found["widest"] > found["widest_by_chance"]
    assert found["chance"] == round(1 / 35, 4)


def test_noise_is_no_wrong_row() -> None:
    found = [rows_apart(noise[:4], noise[4:]) for noise in map(answers, range(40))]
    assert {f["answers"] for f in found} == {8}
    small = sum(f["chance"] <= 0.03 for f in found)
    assert small <= 5, f"{small} of 40 by chance"


def test_equal_answers_have_no_gap() -> None:
    same = answers(2, 1) * 4
    found = rows_apart(same[:2], same[2:])
    assert (found["widest"], found["widest_by_chance"], found["chance"]) == (0.0, 0.0, 1.0)


def test_no_number_is_as_far_as_can_be() -> None:
    right = answers(3)
    wrong = [t.clone() for t in right[4:]]
    for t in wrong:
        t[5, 0, 0] = float("nan")
    found = rows_apart(right[:4], wrong)
    assert (found["row"], found["chance"]) == (5, round(1 / 35, 4))
    assert found["widest"] > 1e20
