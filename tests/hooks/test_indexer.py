"""Index layers inside a replay select what the engine selects, without asking the device.

The engine's own indexer backends run here; the pool and the indexer's projections are small stand-ins that depend on
layer, slots and rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.breaks.shared import StepShared  # noqa: E402
from sglang_dsv4_graphs.engine.api import Engine  # noqa: E402
from sglang_dsv4_graphs.engine.facts import installed_version  # noqa: E402
from sglang_dsv4_graphs.hooks.indexer import IndexerBreaks  # noqa: E402
from sglang_dsv4_graphs.hooks.ledger import Ledger  # noqa: E402

pytestmark = pytest.mark.engine

TOPK, BLOCKS, BLOCK_SIZE, DIM, HEADS = 16, 8, 4, 8, 2
NAMES = {
    "index_full_topk": "around_full_topk",
    "index_publish": "around_publish",
    "index_consume": "around_consume",
    "index_requests": "around_requests",
}


class Pool:
    """Index keys by layer and slot."""

    def __init__(self) -> None:
        self.keys = torch.randn(3, 4096, DIM, generator=torch.Generator().manual_seed(3))

    def get_low_ratio_index_k_dequant(self, layer_id, slots):
        return self.keys[layer_id, slots]

    def get_index_k_with_scale_buffer(self, layer_id):
        return None


class Indexer:
    """Projections of an index layer; scores as the engine computes them."""

    index_topk, index_head_dim = TOPK, DIM

    def __init__(self, layer_id: int) -> None:
        pick = torch.Generator().manual_seed(layer_id)
        self.wq = torch.randn(HEADS * DIM, DIM, generator=pick)
        self.ww = torch.randn(HEADS, DIM, generator=pick)

    def queries(self, q_lora, freqs):
        return (q_lora @ self.wq.t()).view(-1, HEADS, DIM) * freqs.real[:, None, :1]

    def head_weights(self, x):
        return x @ self.ww.t()

    def scores(self, q, k, weights):
        return (torch.einsum("bhd,nd->bhn", q, k).relu() * weights.unsqueeze(-1)).sum(dim=1).float()


@dataclass
class Step:
    """An extend: per request its prefix and new tokens."""

    requests: list[tuple[int, int]]

    @property
    def rows(self) -> int:
        return sum(new for _, new in self.requests)

    def positions(self) -> torch.Tensor:
        return torch.cat([torch.arange(prefix, prefix + new) for prefix, new in self.requests])


class Layers:
    """The engine's indexers over one request table."""

    def __init__(self, engine: Engine) -> None:
        from sglang.srt.layers.attention.dsv4.v41_indexer.dense_blocks import DenseBlocksBackend
        from sglang.srt.layers.attention.dsv4.v41_indexer.full_topk import FullTopKIndexer

        self.engine = engine
        self.pool = Pool()
        self.table = torch.randperm(4096, generator=torch.Generator().manual_seed(5)).view(8, 512).int()
        common = {"token_to_kv_pool": self.pool, "req_to_token": self.table, "use_deep_gemm_prefill": False}
        self.full = FullTopKIndexer(**common, use_deep_gemm_decode=False)
        self.dense = DenseBlocksBackend(**common, candidate_topk_blocks=BLOCKS, candidate_block_size=BLOCK_SIZE)

    def inputs(self, step: Step, layer_id: int, ratio: int, *, pages: bool = True):
        from sglang.srt.layers.attention.dsv4.v41_indexer.types import PrefillInputs

        pick = torch.Generator().manual_seed(100 * layer_id + step.rows)
        rows, counts = step.rows, [new for _, new in step.requests]
        lengths = [prefix + new for prefix, new in step.requests]
        pools = torch.arange(len(counts)) + 2
        freqs = torch.polar(torch.ones(2048, 4), torch.arange(2048).float()[:, None] * 0.01)
        values = {
            "indexer": Indexer(layer_id),
            "layer_id": layer_id,
            "compress_ratio": ratio,
            "freqs_cis": freqs,
            "x": torch.randn(rows, DIM, generator=pick),
            "q_lora": torch.randn(rows, DIM, generator=pick),
            "positions": step.positions(),
            "req_rows": torch.repeat_interleave(pools, torch.tensor(counts)),
            "req_pool_indices": pools,
            "kv_page_table": torch.zeros(rows, 1, dtype=torch.int32),
            "seq_lens_cpu": lengths,
            "rows_per_request": counts,
            "rows_per_request_device": torch.tensor(counts),
            # Two rows more than the step has, as metadata of a padded step has.
            "out_raw_indices": torch.full((rows + 2, TOPK), 77, dtype=torch.int32),
            "out_page_indices": torch.full((rows + 2, TOPK), 77, dtype=torch.int32) if pages else None,
        }
        if self.engine.release != "0.5.22":
            slots = [
                self.table[p, torch.arange(n // ratio) * ratio].long() // ratio
                for p, n in zip(pools, lengths, strict=True)
            ]
            values |= {"k_slots": torch.cat(slots), "index_plans": None}
        return PrefillInputs(**values)

    def run(self, step: Step, **kwargs):
        """Selections of a full top-k layer, a candidate source and a consumer."""
        found = []
        full = self.inputs(step, 0, 2, **kwargs)
        self.full.topk_prefill(full)
        source = self.inputs(step, 1, 1, **kwargs)
        published = self.dense.publish_prefill(source)
        consumer = self.inputs(step, 2, 1, **kwargs)
        self.dense.consume_prefill(consumer, published)
        for inputs in (full, source, consumer):
            found += [inputs.out_raw_indices, inputs.out_page_indices]
        return found, published


@pytest.fixture(scope="module")
def engine():
    return Engine(installed_version())


@pytest.fixture
def patched(engine):
    ledger, breaks = Ledger(engine), IndexerBreaks(engine)
    from sglang_dsv4_graphs.engine.facts import hooks_for

    contracts = {c.name: c for c in hooks_for(engine.version)}
    ledger.apply([(contracts[name], "around", getattr(breaks, method)) for name, method in NAMES.items()])
    yield breaks
    ledger.undo()
    engine.step_shared = None


STEPS = {
    "short": Step([(0, 9)]),
    "at the limit": Step([(0, 16)]),
    "ratio 2 at its limit, ratio 1 above": Step([(20, 13)]),
    "long": Step([(40, 30)]),
    "two short": Step([(0, 5), (4, 8)]),
    "short and long": Step([(0, 7), (60, 20), (3, 1)]),
    "one row": Step([(0, 1)]),
    "a request without rows": Step([(10, 4), (6, 0), (0, 3)]),
}


@pytest.mark.parametrize("pages", [True, False], ids=["pages", "no pages"])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_selects_what_the_engine_selects(engine, patched, step, pages):
    layers = Layers(engine)
    expected, _ = layers.run(step, pages=pages)
    engine.step_shared = StepShared()
    found, _ = layers.run(step, pages=pages)
    names = ("full", "full page", "source", "source page", "consumer", "consumer page")
    for name, a, b in zip(names, expected, found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b), name


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_publishes_the_same_blocks(engine, patched, step):
    layers = Layers(engine)
    _, expected = layers.run(step)
    engine.step_shared = StepShared()
    _, found = layers.run(step)
    assert found.rows_per_request == expected.rows_per_request
    assert torch.equal(found.blocks.sort(dim=1).values, expected.blocks.sort(dim=1).values)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_fewer_candidates_than_the_selection_holds(engine, patched, step, monkeypatch):
    """Blocks of 8 positions, where a layer could select 16: a short context is not all selected then."""
    monkeypatch.setattr(f"{__name__}.BLOCKS", 2)
    test_selects_what_the_engine_selects(engine, patched, step, True)
    test_publishes_the_same_blocks(engine, patched, step)


def test_asks_the_device_nothing(engine, patched, monkeypatch):
    """Every way to read a number of the device is closed while the selection is made."""
    layers = Layers(engine)
    step = STEPS["short and long"]
    inputs = [layers.inputs(step, 0, 2), layers.inputs(step, 1, 1), layers.inputs(step, 2, 1)]
    engine.step_shared = StepShared()

    def refuse(*args, **kwargs):
        raise AssertionError("asked the device")

    for owner, name in (
        (torch.Tensor, "tolist"),
        (torch.Tensor, "item"),
        (torch.Tensor, "nonzero"),
        (torch.Tensor, "__int__"),
        (torch.Tensor, "__bool__"),
        (torch, "unique_consecutive"),
        (torch, "nonzero"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    layers.full.topk_prefill(inputs[0])
    published = layers.dense.publish_prefill(inputs[1])
    layers.dense.consume_prefill(inputs[2], published)


def test_outside_a_replay_the_engine_runs(engine, patched, monkeypatch):
    asked = []
    monkeypatch.setattr(
        torch, "unique_consecutive", lambda *a, _f=torch.unique_consecutive, **k: asked.append(1) or _f(*a, **k)
    )
    Layers(engine).run(STEPS["long"])
    assert len(asked) == 3


def test_rows_that_the_host_does_not_know_are_the_engines(engine, patched):
    layers = Layers(engine)
    engine.step_shared = StepShared()
    inputs = layers.inputs(STEPS["short"], 0, 2)
    other = SimpleNamespace(**{f: getattr(inputs, f) for f in inputs.__struct_fields__} | {"rows_per_request": [8]})
    assert not patched._select_all(layers.full, other, 2)
    layers.full.use_deep_gemm_prefill = True
    assert not patched._select_all(layers.full, inputs, 2)
