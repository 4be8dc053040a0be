"""Whose late layers meet our break while 0.5.22 captures a prefill graph; the replay tests run it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.hooks.prefill_block import PrefillGraphBlock, _unpadded, every_block_a_candidate  # noqa: E402


class Engine:
    def __init__(self, breakable: bool = True) -> None:
        self.breakable = breakable

    def in_breakable(self) -> bool:
        return self.breakable


def step(*, late: int | None = 2, may: bool = True, extend: bool = True, block: bool = True, engram: int = 0) -> Any:
    layers = [SimpleNamespace(engram="engram" if i == engram else None) for i in range(4)]
    model = SimpleNamespace(late_layer_start=late, end_layer=4, layers=layers, dspark_layers_to_capture=None)
    mode = SimpleNamespace(is_extend_without_speculative=lambda: extend)
    return SimpleNamespace(
        served=SimpleNamespace(model=model, may_replay_tails=may),
        batch=SimpleNamespace(forward_mode=mode),
        tail=SimpleNamespace(scatter_indices="scatter" if block else None),
        capture_dspark=False,
    )


def taken(of: Any, breakable: bool = True) -> list[tuple[int, int]]:
    block = PrefillGraphBlock(Engine(breakable), None)  # type: ignore[arg-type]
    return [(t.first, t.last) for t in block.takeovers(of)]


def test_the_late_layers_are_taken_over() -> None:
    assert taken(step()) == [(2, 4)]


@pytest.mark.parametrize(
    "otherwise",
    [{"late": None}, {"may": False}, {"extend": False}, {"block": False}, {"engram": 3}],
    ids=["no bounded replay", "stands down", "speculative", "no block", "Engram in the tail"],
)
def test_the_engines_block_stays(otherwise: dict[str, Any]) -> None:
    assert taken(step(**otherwise)) == []


def test_an_eager_loop_has_no_break() -> None:
    assert taken(step(), breakable=False) == []


def test_a_larger_block_gets_a_bridge_of_its_own() -> None:
    """One serves every block that fits into it; a graph that holds a smaller one keeps it."""
    block = PrefillGraphBlock(Engine(), None)  # type: ignore[arg-type]
    assert block._bridge(0, 4) is None
    small, large = [torch.zeros(4, 2)], [torch.zeros(8, 2)]
    block._bridges[0] = [small]
    assert [t.shape[0] for t in block._bridge(0, 3) or []] == [3]
    assert block._bridge(0, 8) is None
    block._bridges[0].insert(0, large)
    (found,) = block._bridge(0, 4) or []
    assert (found.shape[0], found.data_ptr()) == (4, large[0].data_ptr())
    assert block._bridge(1, 4) is None


def test_the_live_batch_has_the_live_tokens() -> None:
    """The graph's rows are padded, its requests are not; its own batch stays as it is."""
    rows = torch.arange(8)
    graphs = SimpleNamespace(
        extend_seq_lens_cpu=[3, 2], positions=rows, out_cache_loc=rows + 1, input_ids=rows + 2, seq_lens=torch.zeros(2)
    )
    live = _unpadded(graphs)
    assert (live.positions.tolist(), live.out_cache_loc.tolist()) == ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5])
    assert live.input_ids.tolist() == [2, 3, 4, 5, 6]
    assert live.seq_lens is graphs.seq_lens
    assert graphs.positions is rows


@pytest.mark.parametrize("captured", [True, False])
def test_sources_in_captured_segments_publish_no_candidates(captured: bool) -> None:
    """So in such a step every block is one; elsewhere the indexers use what was published."""
    uses = SimpleNamespace(uses_candidates=True, is_candidate_source=False)
    source = SimpleNamespace(uses_candidates=False, is_candidate_source=True)
    layers = [SimpleNamespace(self_attn=SimpleNamespace(indexer=i)) for i in (uses, None, source)]
    backend = SimpleNamespace(low_ratio_prefill_graph=captured)
    with every_block_a_candidate(backend, layers):
        assert (uses.uses_candidates, source.is_candidate_source) == (not captured, not captured)
    assert (uses.uses_candidates, uses.is_candidate_source) == (True, False)
    assert (source.uses_candidates, source.is_candidate_source) == (False, True)


@pytest.mark.engine
@pytest.mark.parametrize("requests", [[(0, 9)], [(20, 13)], [(0, 7), (30, 20), (3, 1)]])
@pytest.mark.parametrize("source", [False, True], ids=["consumer", "source"])
def test_the_engines_indexers_select_among_every_block(
    requests: list[tuple[int, int]], source: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's choice of an indexer, and its indexers, where nobody has published candidates for the step."""
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sglang_dsv4_graphs.engine.api import Engine as RealEngine
    from sglang_dsv4_graphs.engine.facts import installed_version
    from tests.hooks.test_indexer import Indexer, Layers, Step

    # Of equal scores either way may take another.
    scores = Indexer.scores
    monkeypatch.setattr(Indexer, "scores", lambda self, q, k, w: scores(self, q, k, w) + torch.arange(len(k)) * 1e-3)
    layers, step = Layers(RealEngine(installed_version() or "")), Step(requests)
    # Of a source whose blocks hold the whole context: what a consumer selects among every block.
    layers.dense.topk_blocks = 64
    right = layers.inputs(step, 2, 1)
    layers.dense.consume_prefill(right, layers.dense.publish_prefill(layers.inputs(step, 1, 1)))

    found: Any = layers.inputs(step, 2, 1)
    indexer: Any = found.indexer
    indexer.uses_candidates, indexer.is_candidate_source = not source, source
    published: list[Any] = []
    backend = SimpleNamespace(
        low_ratio_prefill_graph=True,
        forward_metadata=SimpleNamespace(candidate_metadata=None),
        prefill_candidates=layers.dense,
        full_topk_indexer=layers.full,
        _make_low_ratio_prefill_indexer_inputs=lambda *args: found,
        _publish_candidate_metadata=published.append,
    )
    attention = SimpleNamespace(indexer=indexer, compress_ratio=1, layer_id=2)
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)

    def select() -> None:
        DeepseekV4AttnBackend._low_ratio_index_topk(backend, attention, None, None, None, None, batch)

    if not source:
        with pytest.raises(AssertionError):  # there is nothing to select among
            select()
    with every_block_a_candidate(backend, [SimpleNamespace(self_attn=attention)]):
        select()
    assert published == []
    assert torch.equal(found.out_raw_indices, right.out_raw_indices)
    assert torch.equal(found.out_page_indices, right.out_page_indices)
    assert (indexer.uses_candidates, indexer.is_candidate_source) == (not source, source)
