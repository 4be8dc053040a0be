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
