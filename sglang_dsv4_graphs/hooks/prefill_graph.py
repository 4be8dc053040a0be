"""Late layers of prefill-graph steps: the engine's own break, on our graphs.

With ``--cuda-graph-backend-prefill breakable`` the engine captures whole steps. From 0.5.23 on it can run the late
layers of such a step as one eager break on the tail's exact rows, but only for shapes of 2048 tokens and more, and
with graphs that it captures inside a request. Here every shape breaks out, so that a block's padding never costs
a full-size tail, and the break replays the decoder-replay bank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from sglang_dsv4_graphs.bank.engram import has_engram
from sglang_dsv4_graphs.bank.served import ServedModel

# Above any shape: passes the engine's own minimum.
_ANY_SHAPE = 1 << 30


class TailBank(Protocol):
    """What the break needs of the decoder-replay bank."""

    def in_charge(self, served: ServedModel) -> bool: ...

    def run_tail(
        self, served: ServedModel, state: Any, positions: Any, input_ids: Any, batch: Any
    ) -> tuple[Any, Any, list[Any]] | None: ...


class PrefillGraphTail:
    """AROUND hooks on the engine's ``DecoderReplayTail``."""

    def __init__(self, served_of: Callable[[Any], ServedModel | None], bank: TailBank) -> None:
        self._served_of = served_of
        self._bank = bank

    def around_breaks_out(self, original: Callable[..., Any], tail_layers: Any, tail: Any, *, num_tokens: int) -> Any:
        """AROUND ``breaks_out_of_prefill_graph``: whatever the engine would refuse for size breaks out too.

        Asked while the engine captures, before our own startup: a server that stands down later keeps the break
        and the engine's graphs in it.
        """
        model = tail_layers._model
        served = self._served_of(model)
        if served is None or not served.may_replay_tails:
            return original(tail_layers, tail, num_tokens=num_tokens)
        if has_engram(model, model.late_layer_start, model.end_layer):
            # The engine's break runs no Engram: it asserts that there is none.
            return original(tail_layers, tail, num_tokens=num_tokens)
        return original(tail_layers, tail, num_tokens=_ANY_SHAPE)

    def around_run(self, original: Callable[..., Any], tail_layers: Any, **kwargs: Any) -> Any:
        """AROUND ``run``: the tail's rows through our bank; the engine's graphs only where ours never serve."""
        served = self._served_of(tail_layers._model)
        ours = served is not None and served.ready and self._bank.in_charge(served)
        if served is None or not ours or kwargs.get("dp_rows") is not None:
            return original(tail_layers, **kwargs)
        done = self._bank.run_tail(
            served, kwargs["state"], kwargs["positions"], kwargs["input_ids"], kwargs["forward_batch"]
        )
        if done is not None:
            return done
        # More rows than our largest bucket: eager, as the engine runs a tail that has no graph.
        eager = {k: v for k, v in kwargs.items() if k not in ("out_rows", "dp_rows")}
        return tail_layers._run_layers_eagerly(**eager)
