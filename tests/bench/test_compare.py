"""Answers held against each other: equal ones, noisy ones of one kind, and two kinds that differ."""

from __future__ import annotations

import random

from sglang_dsv4_graphs.bench.compare import DISTANCE, Run, chance, chance_together, compared, top_distance


def run(first: float, *tokens: int) -> Run:
    return [list(tokens)], [[[first, 7], [-9.0, 8]]]


def test_equal_answers_are_no_distance_apart() -> None:
    same = [run(-1.0, 1, 2, 3)] * 3
    row = compared(same, same)
    assert (row["tokens"], row["replayed equals eager"], row["eager equals itself"]) == (3, 3, 3)
    assert row["replayed equals eager" + DISTANCE] == 0.0
    assert row["chance"] == {"tokens": 1.0, "log-probabilities": 1.0}


def test_two_kinds_that_differ_are_found_however_little() -> None:
    row = compared([run(-1.0, 1, 2, 3)] * 4, [run(-1.001, 1, 2, 4)] * 4)
    assert (row["replayed equals eager"], row["replayed equals itself"]) == (2, 3)
    assert row["replayed equals eager" + DISTANCE] == 0.001
    # Of 70 ways to deal eight answers, this one and its mirror.
    assert row["chance"] == {"tokens": round(2 / 70, 4), "log-probabilities": round(2 / 70, 4)}


def test_noise_of_one_kind_is_no_difference() -> None:
    draw = random.Random(3)
    rows = []
    for _ in range(40):
        answers = [run(-1 + draw.random(), *(draw.randrange(4) for _ in range(8))) for _ in range(8)]
        rows.append(compared(answers[:4], answers[4:])["chance"])
    for key in ("tokens", "log-probabilities"):
        small = sum(row[key] <= 0.05 for row in rows)
        assert small <= 6, f"{small} of 40 by chance"
        assert sum(row[key] > 0.4 for row in rows) >= 12


def test_what_is_within_both_kinds_counts() -> None:
    """By hand: each kind's own distances, a kind's with itself too, are taken off what is between them."""

    def apart(a: float, b: float) -> float:
        return abs(a - b)

    # As far apart as any deal, beside the same deal with the kinds in turn.
    assert chance([0.0] * 4, [1.0, 2.0, 3.0, 4.0], apart) == round(2 / 70, 4)
    # 0.6 by what is between alone, 0.73 by the mean of distinct pairs.
    assert chance([1.0, 4.0], [0.0, 2.0, 0.0, 3.0], apart) == round(8 / 15, 4)


def test_cases_together_show_what_each_shows_a_little_of() -> None:
    draw = random.Random(7)

    def cases(shift: float) -> list[tuple[list[float], list[float]]]:
        return [([draw.random() for _ in range(4)], [draw.random() + shift for _ in range(4)]) for _ in range(6)]

    def apart(a: float, b: float) -> float:
        return abs(a - b)

    assert chance_together(cases(0.5), apart) < 0.01
    assert all(chance(one, other, apart) > 0.01 for one, other in cases(0.5)), "which no case can show alone"
    alike = [chance_together(cases(0.0), apart, 300) for _ in range(40)]
    assert sum(found <= 0.05 for found in alike) <= 6
    assert sum(found > 0.4 for found in alike) >= 12
    assert chance_together([], apart) == 1.0


def test_answers_without_a_common_token_are_far_apart() -> None:
    assert top_distance([[[-1.0, 1]]], [[[-1.0, 2]]]) is None
    eager, other = [run(-1.0, 1)] * 4, [([[1]], [[[-1.0, 1], [-2.0, 2]]])] * 4
    row = compared(eager, other)
    assert row["replayed equals eager" + DISTANCE] is None
    assert row["chance"] == {"tokens": 1.0, "log-probabilities": round(2 / 70, 4)}
