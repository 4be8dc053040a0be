"""Captured once from dummy requests, replayed on everything else: every step is what it is without the plugin.

``story`` says what is compared. One server for all: what a step leaves must not reach the next.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.replay.judge import Judge, same
from tests.replay.server import DECODER_REPLAY, FULL_LAYER, Server, Servers
from tests.replay.story import TOO_MANY, Step, Story, poisoning

pytestmark = pytest.mark.engine

FULL_BUCKETS, LATE_BUCKETS = (64, 128, 256), (128, 256)


@pytest.fixture
def judged(servers: Servers) -> tuple[Server, Judge]:
    """One server of the default settings, small."""
    server = servers.shared("small", make_backend=poisoning, chunked_prefill_size=320)
    assert server.bank(FULL_LAYER).buckets == FULL_BUCKETS
    assert server.bank(DECODER_REPLAY).buckets == LATE_BUCKETS
    return server, Judge.of(server)


STORIES: dict[str, list[Step]] = {
    "one row": [{"a": 1}],
    "full-layer: smallest bucket": [{"a": 63}, {"b": 64}],
    "full-layer: smallest bucket + 1": [{"a": 65}],
    "full-layer: middle bucket and + 1": [{"a": 128}, {"b": 129}],
    "full-layer: largest": [{"a": 255}, {"b": 256}],
    "full-layer: larger than the largest": [{"a": 257}, {"a": 320}],
    "decoder-replay: bucket + 1": [{"a": 128, "b": 1}],
    "decoder-replay: largest": [{"a": 127, "b": 128}, {"c": 128, "d": 128}],
    "decoder-replay: larger than the largest": [{"a": 128, "b": 128, "c": 1}],
    "three requests": [{"a": 20, "b": 7, "c": 31}],
    "mixed tails": [{"a": 200, "b": 30}, {"c": 3, "d": 129, "e": 50}],
    "sixteen requests": [dict.fromkeys("abcdefghijklmnop", 8), dict.fromkeys("abcdefghijklmnop", 1)],
    "even prefix": [{"a": 60}, {"a": 50}],
    "odd prefix": [{"a": 61}, {"a": 40}, {"a": 1}, {"a": 2}],
    "odd prefixes beside a new request": [{"a": 61, "b": 3}, {"b": 40, "c": 21, "a": 1}, {"c": 100, "b": 99}],
    "few new tokens on a long prefix": [{"a": 256}, {"a": 5}, {"a": 127}, {"a": 1}],
    "prefixes shorter than the window": [{"a": 1, "b": 2}, {"a": 127, "b": 126}],
    "chunks of a long prompt": [{"a": 256}, {"a": 256}, {"a": 88}],
    "a chunk beside a hit": [{"a": 33}, {"b": 200, "a": 23}, {"b": 32, "a": 224}],
}


@pytest.mark.parametrize("steps", STORIES.values(), ids=STORIES.keys())
def test_steps_of_every_shape(judged: tuple[Server, Judge], steps: list[Step]) -> None:
    story = Story(*judged)
    for step in steps:
        story.step(step)


def test_buckets_in_random_order(judged: tuple[Server, Judge]) -> None:
    """What one step leaves in the shared rows reaches no other step."""
    draw = random.Random(7)
    seen: set[Any] = set()
    story = Story(*judged)
    for i in range(12):
        names = draw.sample("abcdef", draw.choice([1, 1, 2, 3]))
        replays, _ = story.step({name: draw.choice([1, 3, 40, 64, 85]) for name in names})
        seen.update(replays)
        if i % 4 == 3:
            story = Story(*judged, seed=i)
    assert seen == {(FULL_LAYER, b) for b in FULL_BUCKETS} | {(DECODER_REPLAY, b) for b in LATE_BUCKETS}


def test_the_same_step_twice_and_another_between(judged: tuple[Server, Judge]) -> None:
    server, judge = judged
    story = Story(server, judge)
    story.step({"a": 77})
    batch, state = story.batch({"a": 50, "b": 9}), server.runner.state()
    first = server.runner.forward(batch).tail.clone()
    story.step({"c": 60})
    server.runner.load_state(state)
    assert same(server.runner.forward(batch).tail, first)


def test_replays_do_not_call_the_layers(judged: tuple[Server, Judge], monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of replays that would pass without one is none."""
    server, judge = judged
    entered: list[int] = []
    for layer in server.model.layers:
        for name in ("forward", "forward_hc_pre_from_prev"):
            if hasattr(layer, name):
                original = getattr(layer, name)
                monkeypatch.setattr(
                    layer,
                    name,
                    lambda *a, _original=original, _i=layer.layer_id, **k: (entered.append(_i), _original(*a, **k))[1],
                    raising=False,
                )
    story = Story(server, judge)
    batch = story.batch({"a": 200, "b": 30})
    for name in (FULL_LAYER, DECODER_REPLAY):  # the judge's eager runs call them
        monkeypatch.setattr(server.bank(name), "replay", type(server.bank(name)).replay.__get__(server.bank(name)))
    server.runner.forward(batch)
    assert entered == []
    with server.plugin_off():
        server.runner.forward(batch)
    assert entered == list(range(len(server.model.layers)))


# Requests that read prompt rows: their tail is their whole extend (0.5.23), or the engine refuses (0.5.22).


def reading_prompt_rows(runner: Any, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Let the attention stand-in lay out such tails as the engine's backend does; whether this engine has them."""
    from sglang.srt.layers.attention import deepseek_v4_backend as engine

    if not hasattr(engine, "late_layer_whole_extend"):
        return False
    backend = runner.attn_backend
    build, layout = backend._build_late_layer_tail_metadata, backend._tail_layout

    def build_with_readers(batch: Any) -> Any:
        readers = engine.late_layer_whole_extend(batch, dspark=False)
        backend._tail_layout = lambda **kwargs: layout(**{"whole_extend": readers, **kwargs})
        return build(batch)

    monkeypatch.setattr(backend, "_tail_layout", layout)
    monkeypatch.setattr(backend, "_build_late_layer_tail_metadata", build_with_readers)
    return True


@pytest.mark.parametrize(
    ("lengths", "starts", "late_rows"),
    [
        ([200], [0], 200),
        ([200], [150], 200),
        ([150, 60], [150, 0], 188),
        ([256], [0], 256),
        ([129, 100], [0, 100], 229),
    ],
)
def test_prompt_logprobs(
    judged: tuple[Server, Judge],
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    starts: list[int],
    late_rows: int,
) -> None:
    server, judge = judged
    whole = reading_prompt_rows(server.runner, monkeypatch)
    story = Story(server, judge)
    batch = story.batch({f"r{i}": n for i, n in enumerate(lengths)})
    batch.return_logprob, batch.extend_logprob_start_lens_cpu = True, starts
    if not whole:
        refused_alike(server, batch, "logprobs of prompt tokens")
        return
    _, fallbacks, verdicts = story.run(batch)
    assert fallbacks == {}
    assert [(v.bank, v.rows) for v in verdicts] == [(FULL_LAYER, sum(lengths)), (DECODER_REPLAY, late_rows)]


@pytest.mark.parametrize("length", [40, 200])
def test_returned_hidden_states(judged: tuple[Server, Judge], monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    server, judge = judged
    whole = reading_prompt_rows(server.runner, monkeypatch)
    story = Story(server, judge)
    batch = story.batch({"a": length})
    batch.capture_hidden_mode = CaptureHiddenMode.FULL
    if not whole:
        refused_alike(server, batch, "hidden states")
        return
    _, fallbacks, verdicts = story.run(batch)
    assert fallbacks == {}
    assert [(v.bank, v.rows) for v in verdicts] == [(FULL_LAYER, length), (DECODER_REPLAY, length)]


def test_more_prompt_rows_than_the_largest_bucket(
    judged: tuple[Server, Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, judge = judged
    if not reading_prompt_rows(server.runner, monkeypatch):
        pytest.skip("0.5.22 refuses such steps")
    story = Story(server, judge)
    batch = story.batch({"a": 300})
    batch.return_logprob, batch.extend_logprob_start_lens_cpu = True, [0]
    replays, fallbacks, _ = story.run(batch)
    assert replays == {}
    assert fallbacks == {(FULL_LAYER, TOO_MANY): 1, (DECODER_REPLAY, TOO_MANY): 1}


def refused_alike(server: Server, batch: Any, why: str) -> None:
    """The engine refuses ``batch`` with the plugin as without, and the next step is served."""
    state = server.runner.state()
    with pytest.raises(ValueError, match=why):
        server.runner.forward(batch)
    server.runner.load_state(state)
    with server.plugin_off(), pytest.raises(ValueError, match=why):
        server.runner.forward(batch)
    server.runner.load_state(state)
