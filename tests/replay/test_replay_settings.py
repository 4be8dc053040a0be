"""Other settings and other servers than ``test_replay``'s: each captures its own graphs, a few."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.replay.judge import Judge, same
from tests.replay.server import (
    DECODER_REPLAY,
    DECODER_REPLAY_CAP,
    FULL_LAYER,
    FULL_LAYER_CAP,
    SMALL,
    Servers,
    store_breaks,
)
from tests.replay.story import Story, poisoning

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("lean", ["0", "1"])
@pytest.mark.parametrize(
    ("merged", "backend"),
    [("0", poisoning), ("1", poisoning), ("1", partial(store_breaks, poison=True))],
    ids=["store breaks apart", "store in the graph", "store merged into the attention"],
)
def test_every_kind_of_breaks(servers: Servers, merged: str, backend: Any, lean: str) -> None:
    """Both settings that change the breaks, on the edges of few buckets."""
    environ = {
        FULL_LAYER_CAP: "128",
        DECODER_REPLAY_CAP: "128",
        "SGLANG_DSV4_EAGER_GRAPH_MERGED_KV_STORE": merged,
        "SGLANG_DSV4_EAGER_GRAPH_LEAN_BREAKS": lean,
    }
    server = servers.own(environ, make_backend=backend)
    judge = Judge.of(server)
    for steps in (
        [{"a": 1}, {"b": 64}, {"b": 65}],
        [{"a": 33}, {"a": 10, "b": 9, "c": 45}, {"b": 20, "a": 100}],
        [{"a": 128}, {"a": 129}],
    ):
        story = Story(server, judge)
        for step in steps:
            story.step(step)


@pytest.mark.parametrize(("full", "late"), [("256", "128"), ("64", "256")])
def test_one_bank_without_the_other(servers: Servers, full: str, late: str) -> None:
    """Rows that one bank has no bucket for run eagerly there and replay in the other."""
    server = servers.own({FULL_LAYER_CAP: full, DECODER_REPLAY_CAP: late}, chunked_prefill_size=320)
    story = Story(server, Judge.of(server))
    for step in ({"a": 100, "b": 100}, {"c": 131, "d": 3}, {"a": 30, "d": 31}, {"c": 1}):
        story.step(step)
    assert len(server.served.fallbacks) == 1


def test_without_bounded_replay_one_bank_spans_every_layer(servers: Servers) -> None:
    server = servers.own({FULL_LAYER_CAP: "128"}, bounded_replay=False, make_backend=poisoning)
    bank = server.bank(FULL_LAYER)
    assert (bank.layers.first, bank.layers.last) == (0, len(server.model.layers))
    assert server.bank(DECODER_REPLAY) is None
    for steps in ([{"a": 1}, {"a": 64, "b": 1}], [{"a": 128}, {"a": 33, "b": 40}], [{"a": 129}]):
        story = Story(server, Judge.of(server))
        for step in steps:
            story.step(step)


def test_rows_that_leave_the_model_outlive_the_next_replay(servers: Servers) -> None:
    """Without a tail the last layer's rows are the step's result, and no buffer of the bank's."""
    server = servers.own({FULL_LAYER_CAP: "64"}, bounded_replay=False)
    story = Story(server, Judge.of(server))
    first = server.runner.forward(story.batch({"a": 40}))
    kept = first.pre_head.clone()
    server.runner.forward(story.batch({"b": 50}))
    assert same(first.pre_head, kept)


def test_row_counts_on_the_device(servers: Servers) -> None:
    """Experts mask what lies behind the count: graphs read the bank's own, which each step sets."""
    from sglang_dsv4_graphs.cpu_engine.runner import context_lends_counts

    if not context_lends_counts():
        pytest.skip("0.5.22 takes no count on a CPU")

    def counting(installation: Any) -> Any:
        installation.runtime.engine.counts_padding = lambda: True
        return poisoning(installation)

    server = servers.own(SMALL | {FULL_LAYER_CAP: "128"}, make_backend=counting, device_counts=True)
    counts = {name: server.bank(name)._counts for name in (FULL_LAYER, DECODER_REPLAY)}
    assert None not in counts.values()
    story = Story(server, Judge.of(server))
    for step in ({"a": 70, "b": 3}, {"c": 1}, {"b": 60, "a": 68}):
        story.step(step)
        rows = {FULL_LAYER: sum(step.values()), DECODER_REPLAY: sum(min(128, n) for n in step.values())}
        assert {name: int(c.local) for name, c in counts.items()} == rows
        assert {name: int(c.total) for name, c in counts.items()} == rows


def test_bfloat16(servers: Servers) -> None:
    """The dtype that is served: replay and eager range still agree to the bit."""
    server = servers.own({FULL_LAYER_CAP: "128", DECODER_REPLAY_CAP: "128"}, dtype="bfloat16")
    judge = Judge.of(server)
    story = Story(server, judge)
    for step in ({"a": 70}, {"a": 33, "b": 5}, {"b": 64}):
        server.runner.forward(story.batch(step))
    verdicts = judge.take()
    assert [v.wrong for v in verdicts] == [()] * 6
    # Exactly full: the whole step is the engine's.
    story = Story(server, judge)
    story.run(story.batch({"c": 128}))
