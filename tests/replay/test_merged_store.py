"""May a layer's K be stored anywhere between where the engine stores it and its attention?

Only if nothing in between reads the window cache. Looked at in eager steps of the engine's own model and in replays:
every tensor operation that touches a layer's window cache, with the layer's store and attention around it. And what
moving the store is for: one break and one segment less per layer. ``test_captured_store`` has what is stored.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.replay.judge import Judge
from tests.replay.server import (
    DECODER_REPLAY,
    DECODER_REPLAY_CAP,
    FULL_LAYER,
    FULL_LAYER_CAP,
    Servers,
    store_breaks,
    tape_backend,
)
from tests.replay.story import Story

pytestmark = pytest.mark.engine

MERGED, LEAN = "SGLANG_DSV4_EAGER_GRAPH_MERGED_KV_STORE", "SGLANG_DSV4_EAGER_GRAPH_LEAN_BREAKS"
ONE_BUCKET = {FULL_LAYER_CAP: "64", DECODER_REPLAY_CAP: "128"}
# (what happened, layer): "store begins", "store ends", "attention", or an operation on the layer's window cache.
Event = tuple[str, int]


@contextmanager
def window_events(runner: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Event]]:
    """What happens to the window caches of ``runner`` within the block, in order."""
    from sglang.srt.models.deepseek_v4 import MQALayer
    from torch.utils._python_dispatch import TorchDispatchMode

    from sglang_dsv4_graphs.bank.tape_ops import tensors_in

    events: list[Event] = []
    caches = {cache.untyped_storage().data_ptr(): i for i, cache in enumerate(runner.token_to_kv_pool.swa)}
    store, attend = MQALayer._compute_kv_to_cache, runner.attn_backend.forward

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for tensor in tensors_in([*args, *(kwargs or {}).values()]):
                layer = caches.get(tensor.untyped_storage().data_ptr())
                if layer is not None:
                    events.append((str(func), layer))
            return func(*args, **(kwargs or {}))

    def noted_store(attention: Any, *args: Any, **kwargs: Any) -> Any:
        events.append(("store begins", attention.layer_id))
        result = store(attention, *args, **kwargs)
        events.append(("store ends", attention.layer_id))
        return result

    def noted_attention(*args: Any, **kwargs: Any) -> Any:
        events.append(("attention", kwargs["layer"].layer_id))
        return attend(*args, **kwargs)

    with monkeypatch.context() as patch, Watch():
        patch.setattr(MQALayer, "_compute_kv_to_cache", noted_store)
        patch.setattr(runner.attn_backend, "forward", noted_attention)
        yield events


def operations(events: list[Event], layer: int, after: str, before: str) -> list[str]:
    """Operations on any layer's window cache between two events of ``layer``."""
    start, end = events.index((after, layer)), events.index((before, layer))
    assert start < end
    return [what for what, _ in events[start + 1 : end]]


# Compression ratio, whether the layer owns compressed KV, whether it selects for later layers.
KINDS = [(0, False, False), (1, True, True), (1, False, True), (1, False, False), (2, True, True), (2, False, False)]


def layers_of_kind(shape: Any, kind: tuple[int, bool, bool]) -> list[int]:
    ratios = shape.compress_ratios
    return [i for i, r in enumerate(ratios) if (r, i in shape.kv_sources, i in shape.index_sources) == kind]


def test_every_layer_is_of_one_of_these_kinds(servers: Servers) -> None:
    shape = servers.shared("eager", ONE_BUCKET, startup=False).runner.shape
    of_kinds = [layers_of_kind(shape, kind) for kind in KINDS]
    assert all(of_kinds)
    assert sorted(layer for of_kind in of_kinds for layer in of_kind) == list(range(shape.layers))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prefix", [0, 61, 200])
def test_nothing_reads_the_window_between_store_and_attention(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, prefix: int, kind: tuple[int, bool, bool]
) -> None:
    from sglang_dsv4_graphs.cpu_engine import Request

    runner = servers.shared("eager", ONE_BUCKET, startup=False).runner
    runner.reset_pools()
    requests = [Request.of(prefix + 150, 1), Request.of(40, 2)]
    if prefix:
        runner.extend(requests[:1], [prefix])
    batch = runner.batch(requests)
    with window_events(runner, monkeypatch) as events:
        runner.forward(batch)
    for layer in layers_of_kind(runner.shape, kind):
        of_layer = [what for what, i in events if i == layer]
        assert (of_layer.count("store begins"), of_layer.count("attention")) == (1, 1), layer
        # The watch sees the store write and the attention read: silence in between is no blindness.
        assert any("index_copy_" in what for what in operations(events, layer, "store begins", "store ends"))
        assert any("index" in what for what in of_layer[of_layer.index("attention") :])
        assert operations(events, layer, "store ends", "attention") == [], layer
        assert of_layer[0] == "store begins", layer


def test_a_read_in_between_would_show(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_dsv4_graphs.cpu_engine import Request

    runner = servers.shared("eager", ONE_BUCKET, startup=False).runner
    runner.reset_pools()
    backend, sources = runner.attn_backend, runner.attn_backend.forward_low_ratio_sources

    def reading(*, layer: Any, **kwargs: Any) -> None:
        runner.token_to_kv_pool.swa[layer.layer_id].sum()
        sources(layer=layer, **kwargs)

    monkeypatch.setattr(backend, "forward_low_ratio_sources", reading)
    batch = runner.batch([Request.of(60, 1)])
    with window_events(runner, monkeypatch) as events:
        runner.forward(batch)
    found = [i for i in range(runner.shape.layers) if operations(events, i, "store ends", "attention")]
    assert found == runner.shape.index_sources


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_touches_the_window_between_a_captured_store_and_attention(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, kind: tuple[int, bool, bool]
) -> None:
    server = servers.shared("captured", ONE_BUCKET)
    runner, story = server.runner, Story(server, Judge.of(server))
    story.judge.quiet = True
    story.step({"a": 61})
    batch = story.batch({"a": 40, "b": 3})
    with window_events(runner, monkeypatch) as events:
        _, replays, fallbacks = server.new_counts(lambda: runner.forward(batch))
    assert (set(replays), fallbacks) == ({(FULL_LAYER, 64), (DECODER_REPLAY, 128)}, {})
    for layer in layers_of_kind(runner.shape, kind):
        store, attention = ("aten.index_copy_.default", layer), ("attention", layer)
        of_layer = [event for event in events if event[1] == layer]
        assert of_layer[:2] == [store, attention], layer  # the store is no call of Python's any more
        assert of_layer.count(store) == of_layer.count(attention) == 1
        # Nor does anything touch another layer's.
        assert operations(events, layer, *(what for what, _ in (store, attention))) == [], layer


@pytest.mark.parametrize("name", [FULL_LAYER, DECODER_REPLAY])
def test_graphs_touch_the_windows_of_their_layers_alone(servers: Servers, name: str) -> None:
    """Each by one store, under the bank's guard; breaks do everything else to what steps keep."""
    from sglang_dsv4_graphs.bank.tape_ops import tensors_in

    server = servers.shared("captured", ONE_BUCKET)
    bank = server.bank(name)
    caches = {t.untyped_storage().data_ptr(): name for name, t in server.runner.token_to_kv_pool._buffers().items()}
    touched = []
    for segment in bank.recording(bank.buckets[0])._parts[::2]:
        for op in segment.ops:
            at = {t.untyped_storage().data_ptr() for t in tensors_in([*op._args, *op._kwargs.values()])}
            touched += [(caches[a], str(op)) for a in at if a in caches]
    of_bank = range(bank.layers.first, bank.layers.last)
    assert touched == [(f"swa.{layer}", "aten.index_copy_.default") for layer in of_bank]
    assert {f"window-k-{layer}" for layer in of_bank} <= set(bank.guard.names)


@pytest.mark.parametrize("lean", ["0", "1"])
@pytest.mark.parametrize("backend", [tape_backend, store_breaks], ids=["store in the graph", "store in the attention"])
def test_merging_saves_a_break_and_a_segment_per_layer(servers: Servers, lean: str, backend: Any) -> None:
    counts: dict[str, dict[str, tuple[int, int]]] = {}
    for merged in ("0", "1"):
        server = servers.own(ONE_BUCKET | {MERGED: merged, LEAN: lean}, make_backend=backend)
        banks = {name: server.bank(name) for name in (FULL_LAYER, DECODER_REPLAY)}
        recordings = {name: bank.recording(bank.buckets[0]) for name, bank in banks.items()}
        counts[merged] = {name: (r.segments, r.breaks) for name, r in recordings.items()}
        shape, late = server.runner.shape, server.model.late_layer_start
        layers = {FULL_LAYER: range(late), DECODER_REPLAY: range(late, shape.layers)}
        for name, of_bank in layers.items():
            sources = sum(i in shape.index_sources for i in of_bank)
            # Attention and sources break, and the stores where they are not merged.
            breaks = len(of_bank) + sources + (0 if merged == "1" else len(of_bank))
            assert counts[merged][name] == (breaks + 1, breaks), (merged, name)
    for name, of_bank in layers.items():
        assert counts["0"][name][1] - counts["1"][name][1] == len(of_bank)


# The engine's own attention backend needs a GPU; what it could read is in its source.

WINDOW_CACHE = re.compile(r"swa_key_buffer|swa_kv_pool|swa_k_cache")


def source_of_everything_called(start: str) -> dict[str, str]:
    """Sources, by name, of a method of the engine's backend and of all that it calls within its module."""
    from sglang.srt.layers.attention import deepseek_v4_backend as module

    backend = module.DeepseekV4AttnBackend
    found: dict[str, str] = {}
    waiting = [start]
    while waiting:
        name = waiting.pop()
        function = getattr(backend, name, None) or getattr(module, name, None)
        function = inspect.unwrap(function) if callable(function) else None
        if name in found or not inspect.isfunction(function) or function.__module__ != module.__name__:
            continue
        found[name] = inspect.getsource(function)
        calls = [node.func for node in ast.walk(ast.parse(textwrap.dedent(found[name]))) if isinstance(node, ast.Call)]
        waiting += [call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls]
    return found


def test_the_engines_sources_do_not_touch_the_window_cache() -> None:
    sources = source_of_everything_called("forward_low_ratio_sources")
    assert len(sources) > 5
    assert [name for name, text in sources.items() if WINDOW_CACHE.search(text)] == []
    attention = source_of_everything_called("forward")
    assert [name for name, text in attention.items() if WINDOW_CACHE.search(text)]
