"""Views of the model: what the engine's loop sees changes, the model does not.

``run`` below reads a model as the engine's loop does: range, layer table, Engram, the call of 0.5.23 or of 0.5.22.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dsv4_graphs.bank.views import ModelView, PassThrough, RangeEntry, StateInjector, Takeover, step_view


class Layer:
    """A layer that writes down its own number; ``engram`` marks those before which the loop does more."""

    def __init__(self, number: int, engram: object = None) -> None:
        self.number, self.engram = number, engram
        self.weight = f"weight {number}"

    def __call__(
        self, *, positions: Any, hidden_states: Any, input_ids: Any, forward_batch: Any, zero: Any = None
    ) -> Any:
        forward_batch.calls.append(self.number)
        return [*hidden_states, self.number]

    def forward_hc_pre_from_prev(
        self, *, positions: Any, state: Any, input_ids: Any, forward_batch: Any, zero: Any = None
    ) -> Any:
        forward_batch.calls.append(self.number)
        return [*state, self.number]


class Model:
    start_layer, end_layer = 0, 6

    def __init__(self) -> None:
        self.layers = [Layer(i, engram="engram" if i in (1, 2) else None) for i in range(6)]
        self.hasher = "hasher"


@pytest.fixture(params=["0.5.23", "0.5.22"])
def style(request: pytest.FixtureRequest) -> str:
    return request.param


def run(model: Any, style: str, hidden: Any = ()) -> tuple[Any, SimpleNamespace]:
    batch = SimpleNamespace(calls=[], engrams=[], hasher=model.hasher)
    for i in range(model.start_layer, model.end_layer):
        layer = model.layers[i]
        if layer.engram is not None:
            batch.engrams.append(i)
        common = {"positions": "positions", "input_ids": "ids", "forward_batch": batch, "zero": 0}
        if style == "0.5.23":
            hidden = layer(hidden_states=hidden, **common)
        else:
            hidden = layer.forward_hc_pre_from_prev(state=hidden, **common)
    return hidden, batch


def handing(state: Any, batch: Any) -> Any:
    batch.handed = state
    return state


def bank(name: str) -> tuple[Any, list[Any]]:
    """A range's run, and what it was called with."""
    seen: list[Any] = []

    def run_range(state: Any, positions: Any, input_ids: Any, batch: Any) -> Any:
        seen.append((list(state), positions, input_ids, batch))
        return [*state, name]

    return run_range, seen


def test_the_plain_model(style: str) -> None:
    hidden, batch = run(Model(), style)
    assert hidden == batch.calls == [0, 1, 2, 3, 4, 5]
    assert batch.engrams == [1, 2]


@pytest.mark.parametrize(
    ("first", "last", "hidden"),
    [
        (0, 4, ["bank", 4, 5]),
        (2, 4, [0, 1, "bank", 4, 5]),
        (4, 6, [0, 1, 2, 3, "bank"]),
        (0, 6, ["bank"]),
        (3, 4, [0, 1, 2, "bank", 4, 5]),
    ],
)
def test_a_range_runs_once_in_place_of_its_layers(style: str, first: int, last: int, hidden: list[Any]) -> None:
    model = Model()
    run_range, seen = bank("bank")
    view = step_view(model, model.layers, [Takeover(first, last, run_range)], handing)
    result, batch = run(view, style)
    assert result == hidden
    assert batch.calls == [i for i in range(6) if not first <= i < last]
    assert seen == [(list(range(first)), "positions", "ids", batch)]
    # Engram of a banked layer is the bank's matter.
    assert batch.engrams == [i for i in (1, 2) if not first <= i < last]


def test_only_0_5_23_hands_a_state_over() -> None:
    model = Model()
    view = step_view(model, model.layers, [Takeover(0, 4, bank("bank")[0])], handing)
    assert run(view, "0.5.23")[1].handed == ["bank"]
    assert not hasattr(run(view, "0.5.22")[1], "handed")


def test_two_ranges_in_one_step(style: str) -> None:
    model = Model()
    takeovers = [Takeover(0, 3, bank("full")[0], {"hasher": None}), Takeover(3, 6, bank("late")[0])]
    result, batch = run(step_view(model, model.layers, takeovers, handing), style)
    assert result == ["full", "late"]
    assert batch.hasher is None


def test_a_takeover_of_nothing_only_overrides(style: str) -> None:
    model = Model()
    view = step_view(model, model.layers, [Takeover.of_nothing(hasher=None, end_layer=3)], handing)
    result, batch = run(view, style)
    assert result == [0, 1, 2]
    assert batch.hasher is None


def test_the_model_and_its_table_stay_as_they_are(style: str) -> None:
    model = Model()
    before = (list(model.layers), dict(vars(model)))
    view = step_view(model, model.layers, [Takeover(1, 5, bank("bank")[0], {"hasher": None})], handing)
    run(view, style)
    assert (list(model.layers), dict(vars(model))) == before
    assert run(model, style)[0] == [0, 1, 2, 3, 4, 5]
    assert view.layers is not model.layers


def test_a_view_passes_everything_else_through() -> None:
    model = Model()
    view = ModelView(model, end_layer=3, layers=[])
    assert (view.start_layer, view.end_layer, view.layers, view.hasher) == (0, 3, [], "hasher")
    model.hasher = "another"  # live, not copied
    assert view.hasher == "another"
    with pytest.raises(AttributeError, match="nothing"):
        _ = view.nothing
    assert ModelView(model, hasher=None).hasher is None


def test_stand_ins_answer_as_their_layer_without_its_engram() -> None:
    layer = Layer(1, engram="engram")
    for stand_in in (
        PassThrough(layer),
        RangeEntry(layer, bank("bank")[0], handing),
    ):
        assert stand_in.weight == "weight 1"
        assert stand_in.engram is None
        with pytest.raises(AttributeError):
            _ = stand_in.nothing


def test_a_pass_through_returns_the_very_object(style: str) -> None:
    state = object()
    arguments = {"positions": 0, "input_ids": 0, "forward_batch": 0}
    through = PassThrough(Layer(1))
    given = {"hidden_states": state} if style == "0.5.23" else {"state": state}
    call = through if style == "0.5.23" else through.forward_hc_pre_from_prev
    assert call(**given, **arguments) is state


def test_an_injected_state_replaces_what_enters(style: str) -> None:
    """A captured late range: the loop enters with a bare residual, its first layer needs the pre-mix too."""
    model = Model()
    layers = list(model.layers)
    layers[3] = StateInjector(layers[3], ["state"], handing)
    view = ModelView(model, layers=layers, start_layer=3)
    result, batch = run(view, style, hidden=["bare residual"])
    assert result == ["state", 3, 4, 5]
    assert batch.calls == [3, 4, 5]
    assert getattr(batch, "handed", None) == (["state"] if style == "0.5.23" else None)


class Rows:
    """A state whose residual can be rewritten."""

    def __init__(self, residual: str, pre: str | None = None) -> None:
        self.residual, self.pre = residual, pre

    def with_residual(self, residual: str) -> Rows:
        return Rows(residual, self.pre)


@pytest.mark.parametrize(("engram", "residual"), [(None, "entering"), ("engram", "with Engram")])
def test_an_injected_state_keeps_what_an_engram_added(engram: object, residual: str) -> None:
    """0.5.22's late layers may begin with one: the loop runs it on the residual, then the pre-mix is added."""
    seen: list[Rows] = []
    layer = SimpleNamespace(engram=engram, forward_hc_pre_from_prev=lambda *, state: seen.append(state))
    injector = StateInjector(layer, Rows("entering", "pre"), handing)
    assert injector.engram is engram
    injector.forward_hc_pre_from_prev(state=Rows("with Engram" if engram else "entering"))
    assert [(s.residual, s.pre) for s in seen] == [(residual, "pre")]
