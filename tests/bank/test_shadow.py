"""Shadow mode: the first steps are compared exactly, differences are logged, and the eager rows go on."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.layer_range import RangeInputs, RangeOutputs  # noqa: E402
from sglang_dsv4_graphs.bank.shadow import Shadow, largest_difference  # noqa: E402
from sglang_dsv4_graphs.log import RankLog  # noqa: E402

NAN, INF = float("nan"), float("inf")


def outputs(residual: list[float], pre: list[float] | None = None, aux: list[float] | None = None) -> RangeOutputs:
    return RangeOutputs(*(None if v is None else torch.tensor(v) for v in (residual, pre, aux)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "other", "largest"),
    [
        (outputs([1, 2], [3], [4]), outputs([1, 2], [3], [4]), 0.0),
        (outputs([1, 2]), outputs([1, 2.5]), 0.5),
        (outputs([1, 2], [3]), outputs([1, 2], [5]), 2.0),
        (outputs([1, 2], [3], [4]), outputs([1.25, 2], [3.5], [1]), 3.0),
        (outputs([NAN]), outputs([NAN]), 0.0),
        (outputs([NAN]), outputs([1]), INF),
        (outputs([1]), outputs([NAN]), INF),
        (outputs([INF]), outputs([INF]), 0.0),
        (outputs([INF]), outputs([-INF]), INF),
        (outputs([]), outputs([]), 0.0),
        (outputs([1], None), outputs([1], None), 0.0),
    ],
)
def test_largest_difference(one: RangeOutputs, other: RangeOutputs, largest: float) -> None:
    found = largest_difference(one, other)
    assert found == largest or (largest == INF and found > 1e30)


def test_low_precision_is_compared_without_rounding() -> None:
    one = RangeOutputs(torch.tensor([256.0], dtype=torch.bfloat16), None)
    assert largest_difference(one, RangeOutputs(torch.tensor([258.0], dtype=torch.bfloat16), None)) == 2.0


def served() -> Any:
    return SimpleNamespace(log=RankLog())


def batch(*prefixes: int) -> Any:
    return SimpleNamespace(extend_prefix_lens_cpu=list(prefixes))


@pytest.mark.parametrize(
    ("prefixes", "wanted"), [((0,), True), ((2, 4), True), ((3,), False), ((2, 1), False), ((), True)]
)
def test_an_odd_prefix_is_not_repeated(prefixes: tuple[int, ...], wanted: bool) -> None:
    assert Shadow(1, served()).wanted(batch(*prefixes)) is wanted


def test_a_batch_without_prefixes_is_compared() -> None:
    assert Shadow(1, served()).wanted(SimpleNamespace(extend_prefix_lens_cpu=None))


def test_off() -> None:
    assert not Shadow(0, served()).wanted(batch(0))


class StaticBank:
    """Returns static buffers that its next run overwrites, as a bank does."""

    name = "full-layer"

    def __init__(self, differ_at: int = -1) -> None:
        self.static = torch.zeros(3)
        self.runs, self.differ_at = 0, differ_at

    def replay(self) -> RangeOutputs:
        self.static.fill_(self.runs)
        return RangeOutputs(self.static, None)

    def run_eagerly(self, bucket: int, live: RangeInputs, batch: Any) -> RangeOutputs:
        assert (bucket, live, batch) == (64, LIVE, "batch")
        self.static.fill_(self.runs + (0.5 if self.runs == self.differ_at else 0))
        self.runs += 1
        return RangeOutputs(self.static, None)


LIVE = RangeInputs(torch.zeros(3, 1), None, torch.zeros(3), torch.zeros(3))


def test_differences_are_found_in_buffers_that_both_write(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sglang_dsv4_graphs")
    bank, shadow = StaticBank(differ_at=1), Shadow(3, served())
    for step in range(3):
        assert shadow.wanted(batch(0))
        result = shadow.compare(bank, 64, LIVE, "batch", bank.replay())  # type: ignore[arg-type]
        # The step goes on with the rows that are known right.
        assert result.residual.tolist() == [step + (0.5 if step == 1 else 0)] * 3
        assert (shadow.compared, shadow.differed) == (step + 1, int(step >= 1))
    assert not shadow.wanted(batch(0))
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("ERROR", "dsv4-graphs: shadow rank=0 bank=full-layer bucket=64 rows=3 largest_difference=0.5"),
        ("INFO", "dsv4-graphs: shadow bank=full-layer compared=3 differed=1"),
    ]
