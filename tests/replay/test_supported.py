"""Servers and models that are served as they are, and what of them must be kept while steps replay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.replay.judge import Judge, same
from tests.replay.models import with_vision
from tests.replay.server import CHUNK, DECODER_REPLAY, DECODER_REPLAY_CAP, FULL_LAYER, FULL_LAYER_CAP, Server, Servers
from tests.replay.story import Story

pytestmark = pytest.mark.engine

SETTINGS = {FULL_LAYER_CAP: "64", DECODER_REPLAY_CAP: "128"}


def served_rows(server: Server) -> None:
    """Steps replay in both banks and compare equal."""
    assert server.log.having("eager reason") == []
    story = Story(server, Judge.of(server))
    for step in ({"a": 61}, {"a": 40, "b": 3}):
        replays, fallbacks = story.step(step)
        assert ({bank for bank, _ in replays}, fallbacks) == ({FULL_LAYER, DECODER_REPLAY}, {})


SUPPORTED: dict[str, dict[str, Any]] = {
    "disaggregated prefill": {"disaggregation_mode": "prefill"},
    "returned hidden states": {"enable_return_hidden_states": True},
    "mixed chunks": {"enable_mixed_chunk": True},
}


@pytest.mark.parametrize("arguments", SUPPORTED.values(), ids=SUPPORTED.keys())
def test_a_supported_server(servers: Servers, arguments: dict[str, Any]) -> None:
    served_rows(servers.own(SETTINGS, **arguments))


def test_mixed_chunks_grow_for_their_decode_rows(servers: Servers) -> None:
    """A full chunk with a decode row of every other request is the largest step."""
    rows: list[int] = []

    def prepare(runner: Any) -> None:
        build = runner.attn_backend.init_forward_metadata
        runner.attn_backend.init_forward_metadata = lambda batch: (rows.append(batch.input_ids.shape[0]), build(batch))

    server = servers.own(SETTINGS, prepare=prepare, enable_mixed_chunk=True)
    assert rows[0] == CHUNK + server.runner.max_running_requests


def test_deterministic_inference(servers: Servers) -> None:
    """The engine refuses it for this attention backend; told to all the same, steps replay."""
    with pytest.raises(ValueError, match="deterministic inference"):
        servers.own(SETTINGS, startup=False, enable_deterministic_inference=True)
    server = servers.own(SETTINGS, startup=False)
    engine = server.installation.runtime.engine
    with engine.envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE.override(True):
        server.runner.startup()
        served_rows(server)


def test_vision_with_text_input(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    with_vision(monkeypatch)
    server = servers.own(SETTINGS)
    assert server.model.late_layer_vl_routing
    served_rows(server)
    story = Story(server, Judge.of(server))
    batch = story.batch({"a": 40, "b": 20})
    batch.mm_inputs = [None, None]
    # Experts of the late layers are chosen by these, too.
    image = server.model.config.image_token_id
    batch.input_ids[-5:] = image
    _, fallbacks, verdicts = story.run(batch)
    assert (fallbacks, len(verdicts)) == ({}, 2)


def test_encoder_replay_keeps_the_history_check(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine skips it under the breakable mark: breaks of a replay must run without it, captures with it."""
    server = servers.own(SETTINGS, startup=False)
    engine, marks = server.installation.runtime.engine, []
    forward = server.runner.attn_backend.forward

    def noting(*args: Any, **kwargs: Any) -> Any:
        marks.append(engine.in_breakable())
        return forward(*args, **kwargs)

    monkeypatch.setattr(server.runner.attn_backend, "forward", noting)
    server.runner.startup()
    assert any(marks)
    server.runner.reset_pools()
    batch = Story(server, Judge.of(server)).batch({"a": 60})
    Judge.of(server).quiet = True
    marks.clear()
    server.runner.forward(batch)
    assert marks == [False] * server.runner.shape.layers


def test_encoder_replays_workspace_is_guarded(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    workspace = SimpleNamespace(kv_buffer=[torch.zeros(8)])
    window = SimpleNamespace(workspace=None)

    def prepare(runner: Any) -> None:
        # Only after the layers were built: the stand-in's attention has no window.
        monkeypatch.setattr(runner.token_to_kv_pool, "request_window", window)
        window.workspace = workspace

    server = servers.own(SETTINGS, prepare=prepare)
    story = Story(server, Judge.of(server))
    story.step({"a": 60})
    before = workspace.kv_buffer[0]
    workspace.kv_buffer = [torch.zeros(16)]
    batch = story.batch({"a": 20})
    right = server.eager_tail(batch)
    assert same(server.runner.forward(batch).tail, right)
    moved = f"captured at {hex(before.data_ptr())}, now at {hex(workspace.kv_buffer[0].data_ptr())}"
    assert len(server.log.having("moved-buffer", "buffer=request-window-workspace", moved)) == 2
