"""The model with a few attributes replaced, so that the engine's own layer loop drives a bank.

The engine's loop holds what is hard to copy right: embedding order, Engram, the tail switch, the source KV
write, exits. It is called unchanged, but with a view of the model as ``self``: a layer table in which a banked
range starts with an entry that runs the bank and continues with pass-throughs, or, for a capture, a table and a
range cut to the bank's. Everything not replaced is the model's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# What a range entry calls: (state, positions, input_ids, forward_batch) -> state.
RunRange = Callable[[Any, Any, Any, Any], Any]
# Makes a state what the next layer takes: (state, forward_batch) -> hand-over.
HandOver = Callable[[Any, Any], Any]


class ModelView:
    """``model`` with ``overrides`` in front of its attributes. Reads only: a view is never written through."""

    def __init__(self, model: Any, **overrides: Any) -> None:
        self.__dict__.update(overrides)
        self.__dict__["_viewed_model"] = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_viewed_model"], name)


class _StandIn:
    """A layer's place in the table; what the loop reads of a layer is the real one's, its Engram apart."""

    engram: Any = None

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)


class PassThrough(_StandIn):
    """A layer that its range's entry has already run."""

    def __call__(self, *, hidden_states: Any, **_: Any) -> Any:
        return hidden_states

    def forward_hc_pre_from_prev(self, *, state: Any, **_: Any) -> Any:
        return state


class RangeEntry(_StandIn):
    """The first layer of a banked range: runs the whole range.

    0.5.23 calls a layer with ``hidden_states`` and expects what the next layer takes; 0.5.22 calls
    ``forward_hc_pre_from_prev`` with ``state``.
    """

    def __init__(self, layer: Any, run: RunRange, hand_over: HandOver) -> None:
        super().__init__(layer)
        self._run = run
        self._hand_over = hand_over

    def __call__(self, *, positions: Any, hidden_states: Any, input_ids: Any, forward_batch: Any, **_: Any) -> Any:
        state = self._run(hidden_states, positions, input_ids, forward_batch)
        return self._hand_over(state, forward_batch)

    def forward_hc_pre_from_prev(
        self, *, positions: Any, state: Any, input_ids: Any, forward_batch: Any, **_: Any
    ) -> Any:
        return self._run(state, positions, input_ids, forward_batch)


class StateInjector(_StandIn):
    """The first layer of a captured late range: the loop enters with a bare residual, this adds the pre-mix.

    On 0.5.22 that layer may carry an Engram, which the loop runs on the residual before it calls the layer; 0.5.23's
    model refuses one there.
    """

    def __init__(self, layer: Any, state: Any, hand_over: HandOver) -> None:
        super().__init__(layer)
        self._state = state
        self._hand_over = hand_over
        self.engram = getattr(layer, "engram", None)

    def __call__(self, *, hidden_states: Any, forward_batch: Any, **kwargs: Any) -> Any:
        handed = self._hand_over(self._state, forward_batch)
        return self._layer(hidden_states=handed, forward_batch=forward_batch, **kwargs)

    def forward_hc_pre_from_prev(self, *, state: Any, **kwargs: Any) -> Any:
        injected = self._state if self.engram is None else self._state.with_residual(state.residual)
        return self._layer.forward_hc_pre_from_prev(state=injected, **kwargs)


@dataclass
class Takeover:
    """A bank's part in one step: layers ``[first, last)`` and what else of the model it replaces.

    ``run`` None takes no layer over, only ``overrides`` apply.
    """

    first: int
    last: int
    run: RunRange | None
    overrides: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_nothing(cls, **overrides: Any) -> Takeover:
        return cls(0, 0, None, overrides)


def step_view(model: Any, layers: list[Any], takeovers: list[Takeover], hand_over: HandOver) -> ModelView:
    """The model as the loop sees it in a step in which ``takeovers`` run."""
    table = list(layers)
    overrides: dict[str, Any] = {}
    taken: set[int] = set()
    for t in takeovers:
        overrides.update(t.overrides)
        if t.run is None:
            continue
        table[t.first] = RangeEntry(layers[t.first], t.run, hand_over)
        taken.update(range(t.first, t.last))
        table[t.first + 1 : t.last] = [PassThrough(layer) for layer in layers[t.first + 1 : t.last]]
    collected = getattr(model, "dspark_layers_to_capture", None)
    if collected and taken:
        # A range collects the hidden states of its own layers; the loop must not collect them again.
        overrides["dspark_layers_to_capture"] = [i for i in collected if i not in taken]
    return ModelView(model, layers=table, **overrides)
