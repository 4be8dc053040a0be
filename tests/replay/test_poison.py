"""Graphs read what somebody keeps for them, and nothing that a step or the allocator may have changed since.

A stale read gives right numbers as long as nobody reuses the memory, so here somebody does: the tape names every
storage that a recording reads, and spoils all that nothing keeps before each replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from tests.replay.judge import Judge
from tests.replay.server import DECODER_REPLAY, DECODER_REPLAY_CAP, FULL_LAYER, FULL_LAYER_CAP, SMALL, Server, Servers
from tests.replay.story import Story

pytestmark = pytest.mark.engine

BANKS = (FULL_LAYER, DECODER_REPLAY)
ONE_BUCKET = {FULL_LAYER_CAP: "64", DECODER_REPLAY_CAP: "128"}
BREAKS_OF_THE_ENGINE = {"SGLANG_DSV4_EAGER_GRAPH_MERGED_KV_STORE": "0", "SGLANG_DSV4_EAGER_GRAPH_LEAN_BREAKS": "0"}


# Of the module's scope, so that pytest runs all tests of one kind in a row and they share its server.
@pytest.fixture(scope="module", params=["our breaks", "the engine's breaks"])
def breaks(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(breaks: str, servers: Servers) -> Server:
    return servers.shared(breaks, SMALL if breaks == "our breaks" else SMALL | BREAKS_OF_THE_ENGINE)


def recordings(server: Server) -> list[tuple[Any, Any]]:
    """Every captured (bank, recording)."""
    banks = [b for b in map(server.bank, BANKS) if b is not None]
    return [(bank, bank.recording(bucket)) for bank in banks for bucket in bank.buckets]


def kept_for(server: Server, bank: Any) -> list[Any]:
    """What somebody keeps for ``bank``'s graphs: itself, or others under its guard."""
    return [*bank.owned_tensors(), *server.guarded(bank)]


def spoil(server: Server) -> None:
    """Fill everything that the graphs could not find again."""
    for bank, recording in recordings(server):
        recording.poison(keep=kept_for(server, bank))


@pytest.mark.parametrize("name", BANKS)
def test_every_read_is_of_something_kept(server: Server, name: str) -> None:
    bank = server.bank(name)
    for bucket in bank.buckets:
        recording = bank.recording(bucket)
        assert [str(r) for r in recording.external_reads(kept_for(server, bank))] == [], bucket
        # And it knows of both: without one of them, they are reads of unknown owners.
        unowned = recording.external_reads(server.guarded(bank))
        kept = {t.untyped_storage().data_ptr() for t in bank.owned_tensors()}
        assert unowned
        assert {r.tensor.untyped_storage().data_ptr() for r in unowned} <= kept
        assert len(recording.external_reads(bank.owned_tensors())) > 10


@pytest.mark.parametrize("name", BANKS)
def test_what_leaves_a_range_lies_in_the_banks_own_rows(server: Server, name: str) -> None:
    """In a segment's memory it would be the next graph's to overwrite: all share one pool."""
    bank = server.bank(name)
    owned = {t.untyped_storage().data_ptr() for t in bank.owned_tensors()}
    for bucket in bank.buckets:
        outputs = [t for t in bank.recording(bucket).outputs if t is not None]
        assert outputs
        assert {t.untyped_storage().data_ptr() for t in outputs} <= owned


def test_steps_with_everything_else_spoilt(server: Server) -> None:
    judge = Judge.of(server)
    for steps in ([{"a": 61}, {"a": 40, "b": 3}, {"c": 130}], [{"a": 256}, {"a": 1}, {"a": 64, "b": 64}]):
        story = Story(server, judge)
        for step in steps:
            spoil(server)
            story.step(step)


@contextmanager
def stale(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[None]:
    """Banks that read one input where it lay when they were captured."""
    from dataclasses import replace

    from sglang_dsv4_graphs.bank.bank import Bank

    original = Bank._body

    def body_of_capture(bank: Any, live: Any, bucket: int, batch: Any) -> Any:
        kept = getattr(live, name).clone()
        inputs = replace(live.like(bank._statics.inputs(bucket)), **{name: kept})

        def body() -> Any:
            outputs = bank.layers.body(inputs, batch, bank.captured_layers)
            return bank._statics.store_outputs(outputs, bucket)

        return body

    with monkeypatch.context() as patch:
        patch.setattr(Bank, "_body", body_of_capture)
        yield
    assert Bank._body is original


@pytest.mark.parametrize("name", ["residual", "positions"])
def test_a_stale_read_is_named_and_shows(servers: Servers, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Proof that the tests above can fail."""
    with stale(monkeypatch, name):
        server = servers.own(ONE_BUCKET)
    bank = server.bank(FULL_LAYER)
    (read,) = bank.recording(64).external_reads(kept_for(server, bank))
    assert read.shape[0] == 64
    batch = Story(server, Judge.of(server)).batch({"a": 50})
    batch.positions += 7
    right, state = server.eager_tail(batch), server.runner.state()
    # With its memory still there, a stale read gives the numbers of the captured step.
    tail = server.runner.forward(batch).tail
    assert tail.isfinite().all()
    assert float((tail - right).abs().max()) > 1e-2
    server.runner.load_state(state)
    spoil(server)
    if name == "residual":
        assert server.runner.forward(batch).tail.isnan().all()
    else:
        with pytest.raises(IndexError):
            server.runner.forward(batch)


def test_memory_of_a_segment_does_not_carry_over(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that relies on what its own last replay left shows, too."""
    from sglang_dsv4_graphs.bank.layer_range import LayerRange

    original = LayerRange.body

    def adding_uninitialised(self: Any, inputs: Any, *args: Any) -> Any:
        outputs = original(self, inputs, *args)
        left = outputs[0].new_empty(outputs[0].shape)
        return [outputs[0] + 0 * left, *outputs[1:]]

    monkeypatch.setattr(LayerRange, "body", adding_uninitialised)
    server = servers.own(ONE_BUCKET)
    batch = Story(server, Judge.of(server)).batch({"a": 50})
    spoil(server)
    assert server.runner.forward(batch).tail.isnan().any()


@contextmanager
def multi_stream_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Layers that go down the engine's multi-stream prepare within the block."""
    from sglang.srt.models.deepseek_v4 import MQALayer

    original, calls = MQALayer._forward_prepare_multi_stream, []

    def noted(layer: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(layer.layer_id)
        return original(layer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(MQALayer, "_forward_prepare_multi_stream", noted)
        yield calls


def test_ranges_stay_off_the_multi_stream_prepare(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_OPT_USE_MULTI_STREAM_OVERLAP", "1")
    with multi_stream_calls(monkeypatch) as calls:
        servers.own(ONE_BUCKET)
    assert calls == []


def test_multi_stream_prepare_stores_with_the_slots_of_the_capture(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why they stay off it: K of the ratio-0 layers goes to the captured step's slots."""
    from sglang_dsv4_graphs.bank import layer_range

    with multi_stream_calls(monkeypatch) as calls, monkeypatch.context() as patch:
        patch.setattr(layer_range, "multi_stream_off", nullcontext)
        server = servers.own(ONE_BUCKET)
    without_compression = [i for i, ratio in enumerate(server.runner.shape.compress_ratios) if ratio == 0]
    assert sorted(set(calls)) == without_compression
    if server.installation.runtime.engine.release == "0.5.22":
        return  # its prepare stores through the function that the plugin breaks on this version
    batch = Story(server, Judge.of(server)).batch({"a": 50})
    pool, right = server.runner.token_to_kv_pool, server.eager_tail(batch)
    tail = server.runner.forward(batch).tail
    assert not float((tail - right).abs().max()) < 1e-2
    slots = pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
    assert [i for i, swa in enumerate(pool.swa) if not swa[slots].any()] == without_compression
