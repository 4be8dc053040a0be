"""Engram: hashes of a request's last tokens, which every step extends, feed some layers from a table.

The engine's loop hashes, on the step's own rows, and commits to the history; a replayed range is given the ids. So a
step leaves the history that the engine leaves, whichever banks take part in it.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.replay.judge import Judge, same
from tests.replay.models import fill_engram, with_engram
from tests.replay.server import (
    CHUNK,
    DECODER_REPLAY,
    DECODER_REPLAY_CAP,
    FULL_LAYER,
    FULL_LAYER_CAP,
    SMALL,
    Server,
    Servers,
)
from tests.replay.story import Step, Story, poisoning

pytestmark = pytest.mark.engine

# 0.5.22's late layers begin at 5 in this model, 0.5.23's at 4, and 4 cannot carry one.
BEFORE_THE_TAIL, ACROSS, IN_THE_TAIL = (1, 3), (1, 5), (6,)

STORIES: list[list[Step]] = [
    [{"a": 60}, {"a": 1}, {"a": 2, "b": 1}],  # continued one token at a time: the history is all there is
    [{"a": 61, "b": 3}, {"b": 40, "c": 21, "a": 1}, {"c": 100, "b": 99}],  # odd prefixes, several requests
    [{"a": 256}, {"a": 256}, {"a": 88}],  # chunks of a long prompt
    [{"a": 64}, {"b": 128}, {"a": 65, "b": 128}],  # full buckets, and one row more
]


# Of the module's scope, so that pytest runs all tests of one placement in a row and they share its server.
@pytest.fixture(scope="module")
def placement(request: pytest.FixtureRequest) -> tuple[int, ...]:
    layers: tuple[int, ...] = request.param
    return layers


@pytest.fixture
def server(servers: Servers, placement: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> Server:
    """One server per placement of Engram layers."""
    with_engram(monkeypatch, placement)
    server = servers.shared(f"engram {placement}", SMALL, prepare=filled, make_backend=poisoning)
    if not hasattr(server, "history_of_startup"):
        server.history_of_startup = live_history(server).clone()  # type: ignore[attr-defined]
    return server


@pytest.mark.parametrize("retired", [False, True])
def test_the_engines_tail_graphs_take_no_engram(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, retired: bool
) -> None:
    """They assert that there is none: with our bank retired, late layers run as in any eager step."""
    with_engram(monkeypatch, IN_THE_TAIL)
    server, told = hearing(servers, SMALL)
    assert CHUNK not in told
    tail = server.model.decoder_replay_tail
    tail.runner._warm = True
    if retired:
        server.bank(DECODER_REPLAY).retire("for once")
    batch = Story(server, Judge.of(server)).batch({"a": 60})
    _, replays, _ = server.new_counts(lambda: server.runner.forward(batch))
    assert ((DECODER_REPLAY, 128) in replays) is not retired


def hearing(servers: Servers, settings: dict[str, str]) -> tuple[Server, list[int]]:
    """A server with Engram, and the step sizes of which its startup told the engine's tail runner."""
    told: list[int] = []

    def prepare(runner: Any) -> None:
        filled(runner)
        tail = getattr(runner.model.model, "decoder_replay_tail", None)
        if tail is None:
            pytest.skip("0.5.22 has no tail graphs")
        tail.runner.ready = lambda rows: told.append(rows) or False

    return servers.own(settings, prepare=prepare), told


def filled(runner: Any) -> None:
    """Engram as loaded, with something in every request's history: a dummy step must not touch it."""
    fill_engram(runner)
    history = runner.model.model.engram_hasher.history
    history.copy_(history.new_full(history.shape, 77))


def live_history(server: Server) -> Any:
    """The history of request slots, without the row that padding writes."""
    hasher = server.model.engram_hasher
    return hasher.history[: hasher.pad_row]


placements = pytest.mark.parametrize("placement", [BEFORE_THE_TAIL, ACROSS, IN_THE_TAIL], indirect=True)


@placements
def test_startup_leaves_no_history_that_a_request_could_see(server: Server) -> None:
    assert server.log.having("capture-failed") == []
    assert (server.bank(FULL_LAYER).buckets, server.bank(DECODER_REPLAY).buckets) == ((64, 128, 256), (128, 256))
    assert (server.history_of_startup == 77).all()  # type: ignore[attr-defined]


@placements
@pytest.mark.parametrize("steps", STORIES, ids=range(len(STORIES)))
def test_steps(server: Server, steps: list[Step]) -> None:
    story = Story(server, Judge.of(server))
    live_history(server).zero_()
    for step in steps:
        story.step(step)


@placements
def test_the_history_is_committed_once_and_exactly(server: Server) -> None:
    """With the ids of the engine's own step, to the bit, and read again by the next."""
    story = Story(server, Judge.of(server))
    hasher = server.model.engram_hasher
    for step in ({"a": 45, "b": 7}, {"b": 1, "a": 1}, {"c": 130, "a": 3}):
        batch = story.batch(step)
        before = server.state()
        with server.plugin_off():
            server.runner.forward(batch)
        right = hasher.history.clone()
        server.load_state(before)
        calls = counted(hasher)
        with calls:
            _, replays, _ = server.new_counts(lambda batch=batch: server.runner.forward(batch))
        assert len(replays) == 2
        assert calls.rows == [sum(step.values())]
        assert same(hasher.history, right)
        for name in step:
            request = story.requests[name]
            assert hasher.history[request.slot].tolist() == request.tokens[request.done - 2 : request.done]


class counted:
    """Within it, the rows of every call of the hasher."""

    def __init__(self, hasher: Any) -> None:
        self._hasher = hasher
        self.rows: list[int] = []

    def __enter__(self) -> None:
        forward = self._hasher.forward

        def noted(input_ids: Any, batch: Any) -> Any:
            self.rows.append(input_ids.shape[0])
            return forward(input_ids, batch)

        self._hasher.forward = noted

    def __exit__(self, *error: object) -> None:
        del self._hasher.forward


@placements
def test_the_hash_is_felt(server: Server) -> None:
    """Another history gives other rows, replayed as eager: the ids of a replay are the step's."""
    story = Story(server, Judge.of(server))
    live_history(server).zero_()
    story.step({"a": 33})
    batch, state = story.batch({"a": 2}), server.state()
    one = server.runner.forward(batch).tail.clone()
    server.load_state(state)
    live_history(server).fill_(7)
    other = server.runner.forward(batch).tail.clone()
    assert not same(one, other)
    server.load_state(state)
    assert same(server.runner.forward(batch).tail, one)


@placements
def test_predecessors_that_the_scheduler_supplies(server: Server) -> None:
    """A server's batches bring the tokens before each request: the history's own row may be of another request."""
    import torch

    story = Story(server, Judge.of(server))
    live_history(server).zero_()
    story.step({"a": 70, "b": 20})
    for step in ({"a": 5, "b": 60}, {"b": 1}):
        batch = story.batch(step)
        tokens = [r.tokens[: r.done - n][-2:] for r, n in ((story.requests[k], n) for k, n in step.items())]
        batch.engram_history = torch.tensor(tokens, dtype=torch.int32)
        live_history(server).fill_(9)
        replays, fallbacks, _ = story.run(batch)
        assert (len(replays), fallbacks) == (2, {})


@pytest.mark.parametrize("layers", [BEFORE_THE_TAIL, ACROSS, IN_THE_TAIL])
@pytest.mark.parametrize(("full", "late"), [("0", "128"), ("128", "0")])
def test_one_bank_alone(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...], full: str, late: str
) -> None:
    """The loop's own layers and a bank's take their ids from one hash."""
    with_engram(monkeypatch, layers)
    server = servers.own({FULL_LAYER_CAP: full, DECODER_REPLAY_CAP: late}, prepare=fill_engram)
    story = Story(server, Judge.of(server))
    for step in ({"a": 61}, {"a": 3, "b": 50}, {"c": 128}):
        replays, _, _ = story.run(story.batch(step))
        assert len(replays) == 1


def test_rows_that_the_scheduler_stages_keep_late_layers_eager(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stages the whole step's rows: the late layers' own are not to be found among them."""

    def staged(runner: Any) -> None:
        fill_engram(runner)
        for layer in runner.model.model.layers:
            if layer.engram is not None and layer.layer_id >= runner.model.model.late_layer_start:
                layer.engram.embed.staged_by_scheduler = True

    with_engram(monkeypatch, ACROSS)
    server = servers.own(SMALL, prepare=staged)
    assert server.bank(DECODER_REPLAY) is None
    assert server.log.having("skipped", "bank=decoder-replay", "staged by the scheduler")
    story = Story(server, Judge.of(server))
    replays, _, _ = story.run(story.batch({"a": 61}))
    assert list(replays) == [(FULL_LAYER, 64)]


def test_without_bounded_replay(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    with_engram(monkeypatch, ACROSS)
    server = servers.own({FULL_LAYER_CAP: "128"}, bounded_replay=False, prepare=fill_engram)
    story = Story(server, Judge.of(server))
    for step in ({"a": 61}, {"a": 3, "b": 50}, {"c": 128}):
        story.step(step)
