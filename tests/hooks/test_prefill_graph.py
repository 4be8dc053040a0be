"""Late layers inside the engine's prefill graphs: always out through the break, and there on our bank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from sglang_dsv4_graphs.hooks.prefill_graph import PrefillGraphTail


class TailBank:
    def __init__(self, *, charge: bool = True, done: Any = ("residual", "pre", [])) -> None:
        self.charge, self.done = charge, done
        self.ran: list[Any] = []

    def in_charge(self, served: Any) -> bool:
        return self.charge

    def run_tail(self, *args: Any) -> Any:
        self.ran.append(args)
        return self.done


class TailLayers:
    """The engine's tail of one model: layers 1 and 2."""

    def __init__(self, *, engram: bool = False) -> None:
        layers = [SimpleNamespace(engram="engram"), SimpleNamespace(), SimpleNamespace(engram=engram or None)]
        self._model = SimpleNamespace(late_layer_start=1, end_layer=3, layers=layers)
        self.eager: list[dict[str, Any]] = []

    def _run_layers_eagerly(self, **kwargs: Any) -> str:
        self.eager.append(kwargs)
        return "eager"


def served(*, may: bool = True, ready: bool = True) -> Any:
    return SimpleNamespace(may_replay_tails=may, ready=ready)


def make(of: Any, bank: TailBank | None = None) -> PrefillGraphTail:
    def served_of(model: Any) -> Any:
        assert model.end_layer == 3
        return of

    return PrefillGraphTail(served_of, bank or TailBank())


def needs_2048(tail_layers: Any, tail: Any, *, num_tokens: int) -> bool:
    return tail is not None and num_tokens >= 2048


@pytest.mark.parametrize(
    ("of", "tokens", "out"),
    [
        (served(), 64, True),
        (served(), 4096, True),
        (served(ready=False), 64, True),  # asked while the engine captures, before our startup
        (served(may=False), 64, False),
        (served(may=False), 4096, True),
        (None, 64, False),
        (None, 4096, True),
    ],
)
def test_which_shapes_break_out(of: Any, tokens: int, out: bool) -> None:
    assert make(of).around_breaks_out(needs_2048, TailLayers(), "tail", num_tokens=tokens) is out


def test_whatever_else_the_engine_refuses_stays_refused() -> None:
    assert make(served()).around_breaks_out(needs_2048, TailLayers(), None, num_tokens=64) is False


def test_an_engram_in_the_tail_stays_in_the_block() -> None:
    """The engine's break asserts that there is none, at every size."""
    assert make(served()).around_breaks_out(needs_2048, TailLayers(engram=True), "tail", num_tokens=64) is False


KWARGS: dict[str, Any] = {
    "state": "state",
    "positions": "positions",
    "input_ids": "ids",
    "input_ids_global": "global ids",
    "forward_batch": "batch",
    "capture_dspark": False,
}


def test_the_tail_runs_on_our_bank() -> None:
    of, bank, layers = served(), TailBank(), TailLayers()
    result = make(of, bank).around_run(None, layers, **KWARGS, out_rows="rows")  # type: ignore[arg-type]
    assert result == ("residual", "pre", [])
    assert bank.ran == [(of, "state", "positions", "ids", "batch")]
    assert layers.eager == []


def test_a_tail_without_a_bucket_runs_eagerly() -> None:
    bank, layers = TailBank(done=None), TailLayers()
    assert make(served(), bank).around_run(None, layers, **KWARGS, out_rows="rows", dp_rows=None) == "eager"  # type: ignore[arg-type]
    assert layers.eager == [KWARGS]


@pytest.mark.parametrize(
    ("of", "bank", "dp_rows"),
    [
        (None, TailBank(), None),
        (served(ready=False), TailBank(), None),
        (served(), TailBank(charge=False), None),
        (served(), TailBank(), 3),
    ],
    ids=["unknown model", "not ready", "bank not in charge", "DP rows"],
)
def test_where_the_engines_own_graphs_stay(of: Any, bank: TailBank, dp_rows: int | None) -> None:
    layers = TailLayers()
    given = {**KWARGS, "dp_rows": dp_rows, "out_rows": "rows"}

    def original(tail_layers: Any, **kwargs: Any) -> Any:
        assert tail_layers is layers
        return kwargs

    assert make(of, bank).around_run(original, layers, **given) == given
    assert bank.ran == []
