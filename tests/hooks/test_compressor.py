"""Inside a replay, compressors find the partners that the engine finds, and what they share is made once.

The engine's own pairing and its own pool of pending halves run here, on two layers and several steps.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.breaks import pairs  # noqa: E402
from sglang_dsv4_graphs.breaks.shared import StepShared  # noqa: E402
from sglang_dsv4_graphs.engine.api import Engine  # noqa: E402
from sglang_dsv4_graphs.engine.facts import hooks_for, installed_version  # noqa: E402
from sglang_dsv4_graphs.hooks import compressor  # noqa: E402
from sglang_dsv4_graphs.hooks.compressor import CompressorBreaks  # noqa: E402
from sglang_dsv4_graphs.hooks.ledger import Ledger  # noqa: E402

pytestmark = pytest.mark.engine

DIM, RING, LAYERS = 6, 4, (3, 7)
# Per step, requests as (slot, first position, tokens), then padding rows.
STEPS = [
    ([(1, 0, 9), (2, 0, 3)], 4),
    ([(2, 3, 1)], 0),
    ([(1, 9, 1), (2, 4, 11), (4, 0, 2)], 5),
    ([(4, 2, 6)], 3),
]


def make_backend():
    """What of the attention backend the pairing asks for: the pool of each layer, the step's metadata."""
    from sglang.srt.mem_cache.deepseek_v4_compress_state import CompressStatePool

    def state():
        made = CompressStatePool(
            size=6 * RING, ring_size=RING, overlap=False, head_dim=DIM, dtype=torch.float32, device="cpu",
            enable_memory_saver=False, ratio=2,
        )  # fmt: skip
        made.kv_score_buffer.kv_score.copy_(torch.arange(made.kv_score_buffer.kv_score.numel()).view_as(
            made.kv_score_buffer.kv_score))  # fmt: skip
        return made

    states = {layer: state() for layer in LAYERS}
    pool = SimpleNamespace(get_attention_compress_states=states.__getitem__)
    return SimpleNamespace(token_to_kv_pool=pool, forward_metadata=None), states


def run(engine: Engine, share: bool):
    """Partners of every layer and step, and the halves left pending."""
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend

    backend, states = make_backend()
    pick, found = torch.Generator().manual_seed(1), []
    for requests, pads in STEPS:
        req = torch.tensor([r for r, _, n in requests for _ in range(n)] + [0] * pads)
        pos = torch.tensor([first + i for _, first, n in requests for i in range(n)] + [0] * pads)
        pad = torch.arange(req.shape[0]) >= req.shape[0] - pads
        backend.forward_metadata = SimpleNamespace(core_metadata=object())
        with engine.sharing(StepShared() if share else None):
            for layer_id in LAYERS:
                kv, score = torch.randn(2, req.shape[0], DIM, generator=pick)
                found += DeepseekV4AttnBackend._low_ratio_pair_partners(
                    backend, layer_id=layer_id, kv=kv, score=score, req=req, pos=pos, pad=pad
                )
    return found, [s.kv_score_buffer.kv_score for s in states.values()]


@pytest.fixture
def engine():
    return Engine(installed_version())


@pytest.fixture
def patched(engine):
    ledger = Ledger(engine)
    contract = next(c for c in hooks_for(engine.version) if c.name == "pair_partners")
    ledger.apply([(contract, "around", CompressorBreaks(engine).around_pair_partners)])
    yield engine
    ledger.undo()


def counted(monkeypatch):
    made = []
    monkeypatch.setattr(compressor, "pair_rows", lambda *args: made.append(args) or pairs.pair_rows(*args))
    return made


def test_partners_and_pending_halves_are_the_engines(engine, request, monkeypatch):
    expected = run(engine, share=False)
    request.getfixturevalue("patched")
    made = counted(monkeypatch)
    found = run(engine, share=True)
    for ours, theirs in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    assert len(made) == len(STEPS), "both layers of a step share one answer, and no step another's"


def test_outside_a_replay_the_engine_finds_them(patched, monkeypatch):
    made = counted(monkeypatch)
    run(patched, share=False)
    assert made == []


@pytest.mark.parametrize("other", ["rows", "metadata"])
def test_another_set_of_rows_in_one_replay_is_not_answered_from_the_first(patched, monkeypatch, other):
    """Layers of a range run on the same rows; if ever they did not, each would get its own answer."""
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend

    backend, _ = make_backend()
    made = counted(monkeypatch)
    pos = torch.arange(8)
    with patched.sharing(StepShared()):
        for i, layer_id in enumerate(LAYERS):
            if i == 0 or other == "metadata":
                backend.forward_metadata = SimpleNamespace(core_metadata=object())
            rows = slice(i, 4 + i) if other == "rows" else slice(0, 4)
            kv, score = torch.randn(2, 4, DIM)
            req, pad = torch.ones(8, dtype=torch.int64), torch.zeros(4, dtype=torch.bool)
            DeepseekV4AttnBackend._low_ratio_pair_partners(
                backend, layer_id=layer_id, kv=kv, score=score, req=req[:4], pos=pos[rows], pad=pad
            )
    assert len(made) == 2
