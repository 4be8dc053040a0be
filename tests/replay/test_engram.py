"""Engram: hashes of a request's last tokens, which every step extends, feed some layers from a table.

The hash reads and writes per-request history, so it is a break, and a step may hash once only: a second time would
take this step's own last tokens for the ones before it.
"""

from __future__ import annotations

import pytest

from tests.replay.judge import Judge, same
from tests.replay.models import fill_engram, with_engram
from tests.replay.server import DECODER_REPLAY, DECODER_REPLAY_CAP, FULL_LAYER, FULL_LAYER_CAP, SMALL, Servers
from tests.replay.story import Story, poisoning

pytestmark = pytest.mark.engine

# 0.5.22's late layers begin at 5 in this model, 0.5.23's at 4, and 4 cannot carry one.
BEFORE_THE_TAIL, ACROSS, IN_THE_TAIL = (1, 3), (1, 5), (5, 6)
STORIES = [
    [{"a": 60}, {"a": 1}, {"a": 2, "b": 1}],
    [{"a": 1, "b": 2}, {"b": 64, "a": 61}, {"a": 100, "c": 9}],
    [{"a": 256}, {"a": 64}],
]


def test_engram_before_the_tail(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    with_engram(monkeypatch, BEFORE_THE_TAIL)
    server = servers.own(SMALL, prepare=fill_engram, make_backend=poisoning)
    for steps in STORIES:
        story = Story(server, Judge.of(server))
        for step in steps:
            story.step(step)


def test_the_history_matters(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proof that the stories can fail: the same tokens behind other ones give other rows."""
    with_engram(monkeypatch, BEFORE_THE_TAIL)
    server = servers.own({FULL_LAYER_CAP: "64", DECODER_REPLAY_CAP: "128"}, prepare=fill_engram)
    story = Story(server, Judge.of(server))
    story.step({"a": 20})
    batch, state = story.batch({"a": 9}), server.state()
    right = server.runner.forward(batch).tail.clone()
    server.load_state(state)
    assert same(server.runner.forward(batch).tail, right)
    server.load_state(state)
    server.model.engram_hasher.history[batch.req_pool_indices] += 1
    assert float((server.runner.forward(batch).tail - right).abs().max()) > 1e-2


@pytest.mark.parametrize("layers", [ACROSS, IN_THE_TAIL])
def test_engram_in_the_tail(servers: Servers, monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...]) -> None:
    """Their hashes come from all rows, of which the tail has the last: nothing is captured, and every step is right."""
    with_engram(monkeypatch, layers)
    server = servers.own(SMALL, prepare=fill_engram, graphs=False)
    assert server.log.having("eager reason=", "Engram in the late layers")
    for steps in STORIES:
        story = Story(server, Judge.of(server))
        for step in steps:
            story.run(story.batch(step))


def test_engram_without_a_tail(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    with_engram(monkeypatch, ACROSS)
    server = servers.own(SMALL, bounded_replay=False, prepare=fill_engram)
    assert server.bank(DECODER_REPLAY) is None
    for steps in STORIES:
        story = Story(server, Judge.of(server))
        for step in steps:
            story.step(step)


def test_engram_where_the_full_width_layers_are_the_engines(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    with_engram(monkeypatch, BEFORE_THE_TAIL)
    server = servers.own({FULL_LAYER_CAP: "0", DECODER_REPLAY_CAP: "256"}, prepare=fill_engram)
    assert server.bank(FULL_LAYER) is None
    for steps in STORIES:
        story = Story(server, Judge.of(server))
        for step in steps:
            story.step(step)
