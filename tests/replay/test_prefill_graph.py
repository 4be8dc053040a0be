"""Steps that the engine's prefill graph takes: captured once, their late layers in a break that replays our bank.

The captured step and the replayed ones differ in everything: requests, lengths, prefixes, tokens, slots. A replayed
step equals the engine's eager one to rounding (the shape pads its matrix products), and stores the same KV.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.replay.judge import distance
from tests.replay.server import DECODER_REPLAY, SMALL, Server, Servers, tape_backend
from tests.replay.story import ROUNDING, Step, Story
from tests.replay.test_dspark import forward, speculating

pytestmark = pytest.mark.engine
SHAPE = 256
BREAKABLE = {"cuda_graph_backend_prefill": "breakable"}


class Quiet:
    """A judge of nothing: the outer graph pads more than a bank does."""

    def take(self) -> list[Any]:
        return []


def captured(server: Server) -> Any:
    from tests.replay.outer_graph import OuterGraph

    graph = OuterGraph(server, SHAPE)
    story = Story(server, Quiet(), seed=99)  # type: ignore[arg-type]
    # The engine captures before our startup: the break must be there although no bank is yet.
    server.served.ready = False
    graph.capture(story.batch({"x": 200, "y": 56}), tape_backend)
    server.served.ready = True
    return graph


def replay(server: Server, graph: Any, batch: Any) -> Any:
    """``batch`` through the outer graph, and what the bank counted."""
    tail = getattr(server.model, "decoder_replay_tail", None)
    if tail is not None:
        # 0.5.23's runner hears of a full chunk from ``open_engine_tail``. Here it would capture in eager steps,
        # and where our bank is not in charge; that needs a GPU.
        tail.runner._warm = bool(server.bank(DECODER_REPLAY).buckets)
    try:
        return server.new_counts(lambda: graph.replay(batch))
    finally:
        if tail is not None:
            tail.runner._warm = False


@pytest.fixture
def outer(servers: Servers) -> tuple[Server, Any]:
    server = servers.shared("prefill graph", SMALL, **BREAKABLE)
    if not hasattr(server, "outer"):
        server.outer = captured(server)  # type: ignore[attr-defined]
    return server, server.outer  # type: ignore[attr-defined]


def step(server: Server, graph: Any, story: Story, of: Step) -> tuple[dict[Any, int], dict[Any, int]]:
    """Run ``of`` through the graph and eagerly without the plugin; compare; what the bank counted."""
    batch = story.batch(of)
    before = server.state()
    with server.plugin_off():
        eager = server.runner.forward(batch)
    eager_kept = server.kept_now()
    server.load_state(before)
    (hidden, pre_head), replays, fallbacks = replay(server, graph, batch)
    assert hidden.shape == eager.tail.shape
    assert distance(hidden, eager.tail) <= ROUNDING
    assert distance(pre_head, eager.pre_head[eager.tail_rows]) <= ROUNDING
    for name, tensor in server.kept().items():
        written = eager_kept[name].flatten(1).abs().sum(1) > 0
        written[0] = False  # the slot that padding writes
        assert not written.any() or distance(tensor[written], eager_kept[name][written]) <= ROUNDING, name
    return replays, fallbacks


STORIES: dict[str, list[Step]] = {
    "fewer rows": [{"a": 1}, {"a": 100}],
    "more rows, no padding": [{"a": 256}],
    "several requests": [{"a": 20, "b": 7, "c": 31}, {"d": 200, "e": 30}],
    "prefixes": [{"a": 61}, {"a": 40, "b": 3}, {"b": 1, "a": 2, "c": 150}],
    "chunks": [{"a": 256}, {"a": 256}, {"a": 88}],
}


@pytest.mark.parametrize("steps", STORIES.values(), ids=STORIES.keys())
def test_late_layers_replay_inside_the_outer_graph(outer: tuple[Server, Any], steps: list[Step]) -> None:
    server, graph = outer
    story = Story(server, Quiet())  # type: ignore[arg-type]
    for of in steps:
        rows = sum(min(128, n) for n in of.values())
        replays, fallbacks = step(server, graph, story, of)
        assert (replays, fallbacks) == ({(DECODER_REPLAY, 128 if rows <= 128 else 256): 1}, {})


def test_a_bank_that_is_retired_leaves_them_eager(servers: Servers) -> None:
    server = servers.own(SMALL, **BREAKABLE)
    graph = captured(server)
    server.bank(DECODER_REPLAY).retire("for once")
    story = Story(server, Quiet())  # type: ignore[arg-type]
    for of in ({"a": 60}, {"a": 3, "b": 50}):
        assert step(server, graph, story, of)[0] == {}


def test_multimodal_input_runs_them_eagerly(outer: tuple[Server, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    server, graph = outer
    story = Story(server, Quiet())  # type: ignore[arg-type]
    batch = story.batch({"a": 60})
    monkeypatch.setattr(type(batch), "contains_mm_inputs", lambda self: True)
    _, replays, fallbacks = replay(server, graph, batch)
    assert (replays, fallbacks) == ({}, {(DECODER_REPLAY, "multimodal input"): 1})


@pytest.mark.parametrize(
    "layers", [[1, 3], [6], [5, 6], [0, 2, 6]], ids=["before the tail", "in it", "two in it", "on both sides"]
)
def test_collected_hidden_states(servers: Servers, layers: list[int]) -> None:
    """Early layers' come out of the outer graph, late ones' out of our bank, in order."""
    server = servers.own(SMALL, prepare=speculating(layers), **BREAKABLE)
    story = Story(server, Quiet(), seed=99)  # type: ignore[arg-type]

    def batch_of(of: Step) -> Any:
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

        batch = story.batch(of)
        batch.spec_algorithm, batch.capture_hidden_mode = server.runner.spec_algorithm, CaptureHiddenMode.FULL
        return batch

    from tests.replay.outer_graph import OuterGraph

    graph = OuterGraph(server, SHAPE)
    server.served.ready = False
    graph.capture(batch_of({"x": 200, "y": 56}), tape_backend)
    server.served.ready = True
    for of in ({"a": 60}, {"a": 3, "b": 150}):
        batch, before = batch_of(of), server.state()
        with server.plugin_off():
            right = forward(server, batch)
        server.load_state(before)
        found, replays, fallbacks = replay(server, graph, batch)
        assert (len(replays), fallbacks) == (1, {})
        for ours, engines in zip(found, right, strict=True):
            assert ours.shape == engines.shape
            assert distance(ours, engines) <= ROUNDING


def test_multimodal_input_has_the_engine_capture_nothing_in_a_request(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5.23 alone replays its tail graphs in such a step; beside our bank it is not to make them in a request."""
    server = servers.own(SMALL)
    tail = getattr(server.model, "decoder_replay_tail", None)
    if tail is None:
        pytest.skip("0.5.22 has no tail graphs")
    ran: list[Any] = []

    def run(*, live: Any, forward_batch: Any, body: Any, **kwargs: Any) -> Any:
        ran.append(forward_batch)
        return body(live, forward_batch)

    monkeypatch.setattr(tail.runner, "run", run)
    monkeypatch.setattr(tail.runner, "_warm", True)
    batch = Story(server, Quiet()).batch({"a": 60})  # type: ignore[arg-type]
    monkeypatch.setattr(type(batch), "contains_mm_inputs", lambda self: True)
    before = server.state()
    with server.plugin_off():
        alone = server.runner.forward(batch)
    assert len(ran) == 1
    server.load_state(before)
    beside = server.runner.forward(batch)
    assert len(ran) == 1
    assert distance(beside.tail, alone.tail) <= ROUNDING


def test_a_server_that_stands_down_keeps_the_engines_path(servers: Servers) -> None:
    """Asked while the engine captures, before our startup: the reason is known by then."""
    server = servers.own(SMALL, startup=False, **BREAKABLE)
    server.served.stand_down = "for once"
    seen: list[Any] = []
    engine = server.installation.runtime.engine
    with engine.enable_breakable():
        block = server.served.in_prefill_graph
        if block is None:
            assert engine.has("tail_run")  # 0.5.23: tests/hooks/test_prefill_graph.py
            return
        from types import SimpleNamespace

        seen = block(SimpleNamespace(served=server.served))  # type: ignore[arg-type]
    assert seen == []
