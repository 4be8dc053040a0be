"""DSpark: the draft reads hidden states of some target layers, which a replayed range must hand out.

The layers may lie before the tail, in it, or on both sides; the step packs the tail's rows of each, side by side. And
the server speculates: the engine's own dummy run refuses extends then, so captures make their own.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.replay.judge import Judge, distance, same
from tests.replay.server import CHUNK, DECODER_REPLAY, DECODER_REPLAY_CAP, FULL_LAYER, FULL_LAYER_CAP, Server, Servers
from tests.replay.story import ROUNDING, Step, Story, poisoning

pytestmark = pytest.mark.engine

# More rows than one request's tail has: captures must narrow, too.
SETTINGS = {FULL_LAYER_CAP: "192", DECODER_REPLAY_CAP: "256"}
# 0.5.22's late layers begin at 5 in this model, 0.5.23's at 4.
TARGETS = {
    "before the tail": [1, 3],
    "in the tail": [5, 6],
    "on both sides": [0, 2, 6],
    "where the tail begins": [4, 5],
}


def speculating(layers: list[int]) -> Any:
    """Makes a runner a DSpark target, before the engine's startup."""

    def prepare(runner: Any) -> None:
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        runner.spec_algorithm = SpeculativeAlgorithm.DSPARK
        runner.model.model.dspark_layers_to_capture = list(layers)

    return prepare


def forward(server: Server, batch: Any) -> tuple[Any, Any, Any]:
    """What the model returns for ``batch``: hidden states of its tail's rows, before the head, and the packed ones."""
    import torch

    runner = server.runner
    runner.attn_backend.init_forward_metadata(batch)
    with runner.forward_context(batch):
        (hidden, pre_head), aux = runner.model.forward(batch.input_ids, batch.positions, batch)
    # 0.5.22 returns a list of layers, which its draft packs.
    packed = torch.cat(aux, dim=-1) if isinstance(aux, list) else aux
    return hidden.clone(), pre_head.clone(), packed.clone()


def compare(server: Server, story: Story, step: Step, layers: list[int]) -> dict[Any, int]:
    """Run ``step`` with the plugin and without; the replays."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    batch = story.batch(step)
    batch.spec_algorithm, batch.capture_hidden_mode = server.runner.spec_algorithm, CaptureHiddenMode.FULL
    state = server.state()
    with server.plugin_off():
        right = forward(server, batch)
    server.load_state(state)
    story.judge.take()
    (found, replays, fallbacks) = server.new_counts(lambda: forward(server, batch))
    verdicts = story.judge.take()
    assert [v for v in verdicts if v.wrong] == []
    assert fallbacks == {}
    rows = sum(min(128, n) for n in step.values())
    assert found[2].shape == (rows, len(layers) * server.runner.shape.hidden)
    for ours, engines in zip(found, right, strict=True):
        assert ours.shape == engines.shape
        if all(v.rows == v.bucket for v in verdicts):
            assert same(ours, engines)
        # Layer by layer: a swapped pair of them is as long.
        for a, b in zip(ours.chunk(len(layers), -1), engines.chunk(len(layers), -1), strict=True):
            assert distance(a, b) <= ROUNDING
    return replays


@pytest.mark.parametrize("layers", TARGETS.values(), ids=TARGETS.keys())
def test_packed_hidden_states(servers: Servers, layers: list[int]) -> None:
    server = servers.own(SETTINGS, prepare=speculating(layers), make_backend=poisoning)
    assert server.log.having("capture-failed") == []
    assert (server.bank(FULL_LAYER).buckets, server.bank(DECODER_REPLAY).buckets) == ((64, 128, 192), (128, 256))
    late = server.model.late_layer_start
    assert server.bank(FULL_LAYER).captured_layers == tuple(i for i in layers if i < late)
    assert server.bank(DECODER_REPLAY).captured_layers == tuple(i for i in layers if i >= late)
    for steps in ([{"a": 1}, {"a": 60}, {"b": 150, "a": 3}], [{"b": 129, "c": 40}, {"a": 128}]):
        story = Story(server, Judge.of(server))
        for step in steps:
            assert len(compare(server, story, step, layers)) == 2


def test_captures_where_the_engines_dummy_run_refuses(servers: Servers) -> None:
    """The engine's own dummy run makes no extend of a server that speculates; ours does, and captures from it."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_executor.runner.base_runner import BaseRunner

    def refusal(runner: Any) -> str:
        """Why the engine's dummy run makes no extend of 64 tokens; given no buffers, that is the last thing it asks."""
        runner.decode_num_tokens_per_req = lambda: 4
        with pytest.raises(AssertionError) as refused:
            BaseRunner._dummy_run(
                SimpleNamespace(model_runner=runner),
                1,
                forward_mode_override=ForwardMode.EXTEND,
                buffers=None,
                extend_num_tokens_per_req=64,
            )
        return str(refused.value)

    steps: list[tuple[Any, Any, int]] = []

    def prepare(runner: Any) -> None:
        assert "static buffer" in refusal(runner)
        speculating([1, 6])(runner)
        assert "EXTEND dummy" in refusal(runner)
        build = runner.attn_backend.init_forward_metadata

        def noting(batch: Any) -> None:
            steps.append((batch.forward_mode, batch.spec_algorithm, batch.input_ids.shape[0]))
            build(batch)

        runner.attn_backend.init_forward_metadata = noting

    server = servers.own({FULL_LAYER_CAP: "64", DECODER_REPLAY_CAP: "128"}, prepare=prepare)
    assert (server.bank(FULL_LAYER).buckets, server.bank(DECODER_REPLAY).buckets) == ((64,), (128,))
    assert "EXTEND dummy" in refusal(server.runner)
    # The largest step, a capture for each bucket, and the rehearsal.
    assert [rows for *_, rows in steps] == [CHUNK, 64, 128, 3, 128]
    assert {step[:2] for step in steps} == {(ForwardMode.EXTEND, server.runner.spec_algorithm)}
    story = Story(server, Judge.of(server))
    assert len(compare(server, story, {"a": 61}, [1, 6])) == 2


@pytest.mark.parametrize(("full", "late"), [("0", "128"), ("64", "0")])
def test_one_bank_alone(servers: Servers, full: str, late: str) -> None:
    """Each bank hands out its own layers' states beside those that the engine's loop collects, in order."""
    layers = TARGETS["on both sides"]
    server = servers.own({FULL_LAYER_CAP: full, DECODER_REPLAY_CAP: late}, prepare=speculating(layers))
    story = Story(server, Judge.of(server))
    for step in ({"a": 61}, {"a": 3, "b": 50}):
        assert len(compare(server, story, step, layers)) == 1


def test_without_bounded_replay(servers: Servers) -> None:
    layers = [0, 3, 6]
    server = servers.own({FULL_LAYER_CAP: "64"}, bounded_replay=False, prepare=speculating(layers))
    story = Story(server, Judge.of(server))
    for step in ({"a": 61}, {"a": 3, "b": 50}):
        compare(server, story, step, layers)


def test_a_bank_without_a_bucket_leaves_its_layers_to_the_loop(servers: Servers) -> None:
    layers = TARGETS["on both sides"]
    server = servers.own({FULL_LAYER_CAP: "192", DECODER_REPLAY_CAP: "128"}, prepare=speculating(layers))
    story = Story(server, Judge.of(server))
    batch = story.batch({"a": 100, "b": 50})
    state = server.state()
    with server.plugin_off():
        right = forward(server, batch)
    server.load_state(state)
    found, replays, fallbacks = server.new_counts(lambda: forward(server, batch))
    assert (set(replays), {bank for bank, _ in fallbacks}) == ({(FULL_LAYER, 192)}, {DECODER_REPLAY})
    for ours, engines in zip(found, right, strict=True):
        assert distance(ours, engines) <= ROUNDING


def test_the_draft_is_left_alone(servers: Servers) -> None:
    """A draft worker's model may be of the same class."""

    def draft(runner: Any) -> None:
        runner.is_draft_worker = True

    server = servers.own(SETTINGS, prepare=draft, graphs=False)
    assert (server.served.ready, server.served.stand_down, server.log.lines) == (False, None, [])
    story = Story(server, Judge.of(server))
    batch = story.batch({"a": 60})
    right = server.eager_tail(batch)
    assert same(server.runner.forward(batch).tail, right)
    assert server.served.fallbacks == {}
