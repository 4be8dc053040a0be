"""Inside a breakable scope the engine's own code breaks, and what lies between the breaks can be captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any

import pytest

pytestmark = pytest.mark.engine

ATTENTION = "deepseek_v4_attention_with_output"
STORE = "_tail_kv_store"
SOURCES = "deepseek_v4_low_ratio_sources"
TAIL_SOURCE = "deepseek_v4_write_tail_source_kv"
MULTI_STREAM = "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP"


def on_0522() -> bool:
    return version("sglang").startswith("0.5.22")


@contextmanager
def breakable(runner: Any, batch: Any, *, tail_scope: bool) -> Iterator[None]:
    """The scope a bank captures in: flag, break context and, where the engine has one, its tail scope."""
    from sglang.srt.model_executor.model_runner_components.layer_setup import (
        compute_attention_and_moe_layers,
    )
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import (
        enable_breakable_cuda_graph,
    )
    from sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph.context_manager import (
        set_tc_piecewise_forward_context,
    )

    layers = compute_attention_and_moe_layers(runner.model.model)
    with ExitStack() as stack:
        stack.enter_context(
            set_tc_piecewise_forward_context(
                batch, layers.attention_layers, None, layers.moe_layers, layers.moe_fusions
            )
        )
        stack.enter_context(enable_breakable_cuda_graph())
        if tail_scope:
            from sglang.srt.models.deepseek_v4_replay_tail import _replay_tail_scope

            stack.enter_context(_replay_tail_scope())
        yield


def capture(runner: Any, batch: Any, *, tail_scope: bool) -> Any:
    from tests.cpu_engine.strict import strict_capture

    runner.attn_backend.init_forward_metadata(batch)
    with (
        runner.forward_context(batch),
        breakable(runner, batch, tail_scope=tail_scope),
        strict_capture() as s,
    ):
        runner.model.forward(batch.input_ids, batch.positions, batch)
    return s


@pytest.fixture
def batch(runner: Any) -> Any:
    from sglang_dsv4_graphs.cpu_engine import Request

    prompts = [Request.of(260, 1), Request.of(40, 2)]
    runner.extend(prompts, [60, 7])
    return runner.batch(prompts)


def test_breaks_of_the_engines_prefill_graph(runner: Any, batch: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv(MULTI_STREAM, "0")
    breaks = Counter(capture(runner, batch, tail_scope=False).breaks)
    shape = runner.shape
    expected = Counter((ATTENTION, i) for i in range(shape.layers))
    expected += Counter((SOURCES, i) for i in shape.index_sources)
    if not on_0522():
        expected += Counter([(TAIL_SOURCE, shape.last_source)])
    assert breaks == expected


@pytest.mark.skipif(on_0522(), reason="0.5.22 has no tail scope")
@pytest.mark.parametrize("multi_stream", ["0", "1"])
def test_breaks_of_the_tail_scope(runner: Any, batch: Any, monkeypatch: Any, multi_stream: str) -> None:
    monkeypatch.setenv(MULTI_STREAM, multi_stream)
    capture_ = capture(runner, batch, tail_scope=True)
    shape = runner.shape
    expected = Counter((ATTENTION, i) for i in range(shape.layers))
    expected += Counter((SOURCES, i) for i in shape.index_sources)
    expected += Counter([(TAIL_SOURCE, shape.last_source)])
    # The trap: with multi-stream on, layers without compression store their K within the segment.
    stored_in_segment = {i for i, ratio in enumerate(shape.compress_ratios) if ratio == 0}
    if multi_stream == "0":
        stored_in_segment = set()
    expected += Counter((STORE, i) for i in range(shape.layers) if i not in stored_in_segment)
    assert Counter(capture_.breaks) == expected
    assert capture_.segments == len(capture_.breaks) + 1


def test_breaks_in_layer_order(runner: Any, batch: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv(MULTI_STREAM, "0")
    breaks = capture(runner, batch, tail_scope=not on_0522()).breaks
    assert [layer for _, layer in breaks] == sorted(layer for _, layer in breaks)
    last = {layer: name for name, layer in breaks}
    assert set(last.values()) == {ATTENTION}


@pytest.mark.parametrize("multi_stream", ["0", "1"])
def test_multi_stream_stores_with_the_slots_of_its_call(
    runner: Any, batch: Any, monkeypatch: Any, multi_stream: str
) -> None:
    """The path runs, stores inside the segment, and computes what the plain path computes."""
    monkeypatch.setenv(MULTI_STREAM, multi_stream)
    state = runner.state()
    plain = runner.forward(batch)
    runner.load_state(state)
    calls: list[int] = []
    attention = runner.model.model.layers[0].self_attn
    prepare = type(attention)._forward_prepare_multi_stream
    monkeypatch.setattr(
        type(attention),
        "_forward_prepare_multi_stream",
        lambda self, *a, **k: (calls.append(self.layer_id), prepare(self, *a, **k))[1],
    )
    runner.attn_backend.init_forward_metadata(batch)
    with runner.forward_context(batch), breakable(runner, batch, tail_scope=False):
        hidden, _ = runner.model.forward(batch.input_ids, batch.positions, batch)
    assert calls == ([0, 1] if multi_stream == "1" else [])
    assert (hidden[plain.tail_rows] == plain.tail).all()


def test_breaks_read_the_row_count_of_the_context(runner: Any, batch: Any, monkeypatch: Any) -> None:
    """Padded rows change no real row: the same step, run on 40 more rows, gives the same numbers."""
    import torch

    monkeypatch.setenv(MULTI_STREAM, "0")
    if on_0522():
        pytest.skip("0.5.22 stores padded rows unless the plugin breaks the store")
    model, rows, pad = runner.model.model, batch.input_ids.shape[0], 40
    late, model.late_layer_start = model.late_layer_start, None
    try:
        runner.attn_backend.init_forward_metadata(batch)
        results = []
        state = runner.state()
        for filler in (3, 5):
            runner.load_state(state)
            ids = torch.cat([batch.input_ids, torch.full((pad,), filler)])
            positions = torch.cat([batch.positions, torch.full((pad,), 11 * filler)])
            with runner.forward_context(batch), breakable(runner, batch, tail_scope=True):
                results.append(model(ids, positions, batch, None)[0][:rows])
        assert (results[0] == results[1]).all()
        runner.load_state(state)
        with runner.forward_context(batch):
            eager = model(batch.input_ids, batch.positions, batch, None)[0]
        assert float((results[0] - eager).abs().max()) < 1e-3
    finally:
        model.late_layer_start = late


def _host_read(x: Any) -> object:
    return x.sum().item()


def _host_array(x: Any) -> object:
    return x.numpy()


def _data_dependent_shape(x: Any) -> object:
    return x[x > 0]


def _masked_write(x: Any) -> object:
    x[x > 0] = 0
    return x


@pytest.mark.parametrize("forbidden", [_host_read, _host_array, _data_dependent_shape, _masked_write])
def test_the_strict_capture_refuses(forbidden: Any) -> None:
    """What the tests above prove of segments rests on this."""
    import torch

    from tests.cpu_engine.strict import NotCapturable, strict_capture

    x = torch.randn(8)
    with pytest.raises(NotCapturable), strict_capture():
        forbidden(x)
    forbidden(x)
