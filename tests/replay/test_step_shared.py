"""What breaks share lives as long as one replay: the next has another, and nobody else has one."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dsv4_graphs.breaks.shared import StepShared
from tests.replay.judge import Judge
from tests.replay.server import DECODER_REPLAY, DECODER_REPLAY_CAP, FULL_LAYER_CAP, SMALL, Server, Servers
from tests.replay.story import Story
from tests.replay.test_prefill_graph import BREAKABLE, captured, replay

pytestmark = pytest.mark.engine

ONE_BUCKET = {FULL_LAYER_CAP: "64", DECODER_REPLAY_CAP: "128"}
LEAN = "SGLANG_DSV4_EAGER_GRAPH_LEAN_BREAKS"


def watch(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any]]:
    """(layer, what is shared) of every call of the attention, and of the sources, of layers that have them."""
    engine, backend = server.installation.runtime.engine, server.runner.attn_backend
    seen: list[tuple[int, Any]] = []

    def noting(original: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            seen.append((kwargs["layer"].layer_id, engine.step_shared))
            return original(*args, **kwargs)

        return noted

    for name in ("forward", "forward_low_ratio_sources"):
        monkeypatch.setattr(backend, name, noting(getattr(backend, name)))
    return seen


def test_each_replay_shares_an_object_of_its_own(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    server = servers.shared("lean", ONE_BUCKET)
    engine, story = server.installation.runtime.engine, Story(server, Judge.of(server))
    assert engine.step_shared is None  # captures and the rehearsal are over
    story.judge.quiet = True
    seen = watch(server, monkeypatch)
    late, held = server.model.late_layer_start, []
    for step in ({"a": 61}, {"a": 30, "b": 9}, {"a": 30, "b": 9}):
        batch = story.batch(step)
        seen.clear()
        _, replays, _ = server.new_counts(lambda batch=batch: server.runner.forward(batch))
        assert len(replays) == 2
        assert engine.step_shared is None
        # 0.5.23 writes the tail's source KV between the ranges, in no replay.
        of_ranges = [(layer, shared) for layer, shared in seen if shared is not None]
        assert {layer for layer, _ in of_ranges} == set(range(len(server.model.layers)))
        assert {layer for layer, shared in seen if shared is None} <= {late}
        full = [shared for layer, shared in of_ranges if layer < late]
        tail = [shared for layer, shared in of_ranges if layer >= late]
        for of_replay in (full, tail):
            assert isinstance(of_replay[0], StepShared)
            assert all(shared is of_replay[0] for shared in of_replay)
            held.append(of_replay[0])
    # All are held, so that none lies where one before it lay.
    assert len({id(shared) for shared in held}) == 6


def test_other_steps_share_nothing(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the engine alone, and with more rows than a bucket: values of one layer must not serve the next step."""
    server = servers.shared("lean", ONE_BUCKET)
    story = Story(server, Judge.of(server))
    seen = watch(server, monkeypatch)
    with server.plugin_off():
        server.runner.forward(story.batch({"a": 40}))
    _, replays, _ = server.new_counts(lambda: server.runner.forward(story.batch({"a": 100, "b": 60})))
    assert replays == {}
    assert {layer for layer, _ in seen} == set(range(len(server.model.layers)))
    assert {shared for _, shared in seen} == {None}


def test_a_replay_that_fails_leaves_nothing(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    server = servers.shared("lean", ONE_BUCKET)
    story, state = Story(server, Judge.of(server)), server.runner.state()
    story.judge.quiet = True
    seen: list[Any] = []

    def failing(**kwargs: Any) -> Any:
        seen.append(server.installation.runtime.engine.step_shared)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(server.runner.attn_backend, "forward", failing)
        with pytest.raises(ZeroDivisionError):
            server.runner.forward(story.batch({"a": 40}))
    assert isinstance(seen[0], StepShared)
    assert server.installation.runtime.engine.step_shared is None
    server.runner.load_state(state)


def test_the_switch_turns_it_off(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    server = servers.own(ONE_BUCKET | {LEAN: "0"})
    story = Story(server, Judge.of(server))
    story.judge.quiet = True
    seen = watch(server, monkeypatch)
    _, replays, _ = server.new_counts(lambda: server.runner.forward(story.batch({"a": 61})))
    assert len(replays) == 2
    assert {layer for layer, _ in seen} == set(range(len(server.model.layers)))
    assert {shared for _, shared in seen} == {None}


def test_a_prefill_graph_shares_in_our_replay_alone(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its metadata outlives a step: its own breaks share nothing, and late layers only while our bank replays them."""
    server = servers.own(SMALL, **BREAKABLE)
    graph, engine, late = captured(server), server.installation.runtime.engine, server.model.late_layer_start
    story, seen = Story(server, Judge.of(server)), watch(server, monkeypatch)
    story.judge.quiet = True
    held: list[StepShared] = []

    def of_step(step: dict[str, int]) -> tuple[set[Any], list[Any]]:
        """What early and late layers saw of it; 0.5.23 writes the source KV of the first late one in no replay."""
        batch = story.batch(step)
        seen.clear()
        replay(server, graph, batch)
        backend = server.runner.attn_backend
        for metadata in (backend.forward_metadata, backend.tail_forward_metadata):
            assert set(vars(metadata)) == set(type(metadata).__dataclass_fields__)
        assert engine.step_shared is None
        assert {layer for layer, _ in seen} == set(range(len(server.model.layers)))
        written = len([s for layer, s in seen if layer == late]) - 2
        after = [s for layer, s in seen if layer >= late][max(0, written) :]
        return {s for layer, s in seen if layer < late}, after

    for step in ({"a": 200, "b": 56}, {"a": 30, "b": 9}, {"a": 30, "b": 9}):
        early, after = of_step(step)
        assert early == {None}
        assert isinstance(after[0], StepShared)
        assert all(shared is after[0] for shared in after)
        held.append(after[0])
    assert len({id(shared) for shared in held}) == 3
    server.bank(DECODER_REPLAY).retire("for once")
    early, after = of_step({"a": 30})
    assert early == set(after) == {None}
