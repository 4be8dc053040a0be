"""Encoder SWA bounded replay: the window's rows lie by request, and a step reads those that earlier steps left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.replay.judge import Judge, distance, same
from tests.replay.server import DECODER_REPLAY, DECODER_REPLAY_CAP, FULL_LAYER, FULL_LAYER_CAP, Server, Servers
from tests.replay.story import ROUNDING, Story

pytestmark = pytest.mark.engine

SETTINGS = {FULL_LAYER_CAP: "192", DECODER_REPLAY_CAP: "128"}


@pytest.fixture
def windowed(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Brings up a server with a request window."""
    from tests.replay.request_window import put_window

    with ExitStack() as scope:

        def up(**settings: str) -> Server:
            return servers.own({**SETTINGS, **settings}, prepare=lambda runner: put_window(runner, monkeypatch, scope))

        yield up
        servers.down()


def test_steps_replay_with_their_history(windowed: Any) -> None:
    server = windowed()
    story = Story(server, Judge.of(server))
    for step in ({"a": 61}, {"a": 40, "b": 3}, {"b": 150, "a": 2}, {"b": 1}, {"b": 128, "c": 64}):
        replays, _ = story.step(step)
        assert replays


@pytest.mark.parametrize(("late", "bank"), [(False, FULL_LAYER), (True, DECODER_REPLAY)])
def test_a_replay_without_its_history_is_an_error(windowed: Any, late: bool, bank: str) -> None:
    """The engine's check, which it leaves out of captures, runs in the breaks of each replay."""
    server = windowed()
    if late and server.installation.runtime.engine.release == "0.5.22":
        pytest.skip("its tail reads nothing from before the tail")
    story, window = Story(server, Judge.of(server)), server.runner.token_to_kv_pool.request_window
    story.step({"a": 60})
    story.judge.quiet = True
    batch, start = story.batch({"a": 40}), server.model.late_layer_start
    # Of one range's layers: what runs before it, or after, has its history.
    window.tags[slice(start, None) if late else slice(0, start)] = -1
    story.judge.take()
    with loud_checks(), pytest.raises(RuntimeError, match=r"(?i)swa.history"):
        server.runner.forward(batch)
    replays = [v.bank for v in story.judge.take()]
    assert replays == ([FULL_LAYER, DECODER_REPLAY] if late else [FULL_LAYER])
    assert replays[-1] == bank


def loud_checks() -> Any:
    """0.5.23 makes its check on demand."""
    from sglang.srt.environ import envs

    return envs.SGLANG_ENABLE_ASYNC_ASSERT.override(True)


def test_a_workspace_that_moved_is_not_replayed(windowed: Any) -> None:
    """Whoever would let the window grow: the step runs eagerly, on the new workspace, and so do all later ones."""
    server = windowed()
    story, window = Story(server, Judge.of(server)), server.runner.token_to_kv_pool.request_window
    story.step({"a": 60})
    before = window.workspace.kv_buffer[0]
    window.workspace = window.pool_factory(2 * window.workspace.size, 1)
    moved = f"captured at {hex(before.data_ptr())}, now at {hex(window.workspace.kv_buffer[0].data_ptr())}"
    for step in ({"a": 20}, {"a": 7, "b": 30}):
        batch = story.batch(step)
        right = server.eager_tail(batch)
        tail, replays, _ = server.new_counts(lambda batch=batch: server.runner.forward(batch).tail)
        assert replays == {}
        assert same(tail, right)
    assert len(server.log.having("moved-buffer", "buffer=request-window-workspace", moved)) == 2


def test_shadow_repeats_no_step_whose_history_the_first_run_took(windowed: Any) -> None:
    """A step's rows take the place of its history in the window: what a second run read would be the step's own."""
    server = windowed(SGLANG_DSV4_GRAPHS_SHADOW="9")
    story = Story(server, Judge.of(server))
    story.judge.quiet = True
    shadow = server.manager.get_plugin(FULL_LAYER)._shadows[server.served]
    for step, compared in (({"a": 100}, 1), ({"a": 60}, 1), ({"b": 64}, 2), ({"a": 2, "c": 62}, 2)):
        batch = story.batch(step)
        right = server.eager_tail(batch)
        assert distance(server.runner.forward(batch).tail, right) <= ROUNDING
        assert (shadow.compared, shadow.differed) == (compared, 0)
    assert server.log.having("shadow", "largest_difference") == []
