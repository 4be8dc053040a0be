"""The engine's own graphs of the late layers (0.5.23), beside this plugin's sweep.

It captures them on first use after a full-chunk step, which is inside a request, and counts on them in its prefill
graph's break. So the startup tells it of a full chunk: where our bank serves the late layers, for the break to call
us; where it does not, for the engine to capture now.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from sglang_dsv4_graphs.bank.engram import has_engram
from sglang_dsv4_graphs.engine.facts import TAIL_ROWS_PER_REQUEST

if TYPE_CHECKING:
    from sglang_dsv4_graphs.bank.sweep import Startup


def open_engine_tail(startup: Startup) -> None:
    """Tell the engine's tail runner that a full chunk has run: its break in prefill graphs then calls us."""
    model = startup.served.model
    tail = getattr(model, "decoder_replay_tail", None)
    # The engine's tail runs no Engram: it asserts that there is none.
    if tail is not None and not has_engram(model, model.late_layer_start, model.end_layer):
        tail.runner.ready(startup.largest_step)


def drive_engine_tail(startup: Startup) -> None:
    """Let the engine capture its own tail graphs now, where they stay in charge.

    Reports a full chunk and runs one small step.
    """
    model, dummies = startup.served.model, startup.dummies
    tail = getattr(model, "decoder_replay_tail", None)
    if tail is None or any(b.buckets and b.layers.first == model.late_layer_start for b in startup.banks):
        return
    if has_engram(model, model.late_layer_start, model.end_layer):
        return  # the engine's graphs cannot have one
    open_engine_tail(startup)
    with startup.served.forced(lambda step: []):
        startup.run(partial(dummies.batch, min(TAIL_ROWS_PER_REQUEST, dummies.most_rows)), dummies.run)
