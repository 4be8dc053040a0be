"""Inside a replay, compressors find the partners that the engine finds, and what they share is made once.

The engine's own pairing and its own pool of pending halves run here, on two layers and several steps.
"""

from __future__ import annotations

import random
import weakref
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


def make_backend(dtype=torch.float32):
    """What of the attention backend the pairing asks for: the pool of each layer, the step's metadata."""
    from sglang.srt.mem_cache.deepseek_v4_compress_state import CompressStatePool

    def state():
        made = CompressStatePool(
            size=6 * RING, ring_size=RING, overlap=False, head_dim=DIM, dtype=dtype, device="cpu",
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


def test_any_rows_pair_as_the_engine_pairs_them(engine, request):
    """Rows that no step has, too: gaps, padding between requests, a ring that is full to the row."""
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend

    draw = random.Random(3)
    steps = [[draw.randrange(3), draw.randrange(5)] for _ in range(40)]  # requests of the first row, their position
    answers = []
    for share in (False, True):
        if share:
            request.getfixturevalue("patched")
        backend, states = make_backend()
        draw, pick, found = random.Random(4), torch.Generator().manual_seed(2), []
        for slot, first in steps:
            rows = [(slot, first, draw.random() < 0.2)]
            for _ in range(draw.choice([0, 2, RING - 1, RING, RING, 9])):
                slot, at, _ = rows[-1]
                rows.append(
                    (draw.choice([slot, slot, slot, 2]), at + draw.choice([1, 1, 1, 1, 2, -1]), draw.random() < 0.2)
                )
            req, pos, pad = (torch.tensor(column) for column in zip(*rows, strict=True))
            backend.forward_metadata = SimpleNamespace(core_metadata=object())
            kv, score = torch.randn(2, len(rows), DIM, generator=pick)
            with engine.sharing(StepShared() if share else None):
                found += DeepseekV4AttnBackend._low_ratio_pair_partners(
                    backend, layer_id=LAYERS[0], kv=kv, score=score, req=req, pos=pos.clamp(min=0), pad=pad
                )
        answers.append([*found, *(s.kv_score_buffer.kv_score for s in states.values())])
    for number, (theirs, ours) in enumerate(zip(*answers, strict=True)):
        assert torch.equal(ours, theirs), steps[number // 2 :][:1]


@pytest.mark.parametrize(
    ("dtypes", "pool"),
    [((torch.bfloat16, torch.float32), torch.float32), ((torch.bfloat16, torch.bfloat16), torch.bfloat16)],
)
def test_types_are_promoted_as_the_engine_promotes_them(engine, request, dtypes, pool):
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend

    pos, answers = torch.arange(3), []
    kv, score = (torch.ones(3, DIM).to(dtype) for dtype in dtypes)
    for share in (False, True):
        if share:
            request.getfixturevalue("patched")
        backend, _ = make_backend(pool)
        backend.forward_metadata = SimpleNamespace(core_metadata=object())
        with engine.sharing(StepShared() if share else None):
            answers.append(
                DeepseekV4AttnBackend._low_ratio_pair_partners(
                    backend, layer_id=LAYERS[0], kv=kv, score=score, req=pos * 0 + 1, pos=pos, pad=pos < 0
                )
            )
    assert [t.dtype for t in answers[1]] == [t.dtype for t in answers[0]]
    assert all(torch.equal(ours, theirs) for theirs, ours in zip(*answers, strict=True))


@pytest.mark.parametrize("other", ["nothing", "ring", "rows", "requests", "positions", "metadata"])
def test_other_rows_in_one_replay_are_not_answered_from_the_first(patched, monkeypatch, other):
    """Layers of a range run on the same rows; if ever they did not, each would get its own answer."""
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend

    backend, states = make_backend()
    if other == "ring":
        states[LAYERS[1]].ring_size = RING // 2
    made = counted(monkeypatch)
    req, pos = torch.ones(8, dtype=torch.int64), torch.arange(8)
    with patched.sharing(StepShared()):
        for i, layer_id in enumerate(LAYERS):
            if i == 0 or other == "metadata":
                backend.forward_metadata = SimpleNamespace(core_metadata=object())
            count = 4 + i if other == "rows" else 4
            kv, score = torch.randn(2, count, DIM)
            DeepseekV4AttnBackend._low_ratio_pair_partners(
                backend,
                layer_id=layer_id,
                kv=kv,
                score=score,
                req=req[i if other == "requests" else 0 :][:count],
                pos=pos[i if other == "positions" else 0 :][:count],
                pad=torch.zeros(count, dtype=torch.bool),
            )
    assert len(made) == (1 if other == "nothing" else 2)


def test_what_an_answer_is_kept_under_stays_where_it_is(patched):
    """Freed, another layer's requests or metadata could lie there, and find the answer to these."""
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend

    class Metadata:
        """Of a step."""

    backend, _ = make_backend()
    req, pos, metadata, shared = torch.ones(4, dtype=torch.int64), torch.arange(4), Metadata(), StepShared()
    backend.forward_metadata = SimpleNamespace(core_metadata=metadata)
    kv, score = torch.randn(2, 4, DIM)
    with patched.sharing(shared):
        DeepseekV4AttnBackend._low_ratio_pair_partners(
            backend, layer_id=LAYERS[0], kv=kv, score=score, req=req, pos=pos, pad=torch.zeros(4, dtype=torch.bool)
        )
    kept = [weakref.ref(value) for value in (req, pos, metadata)]
    backend.forward_metadata = None
    del req, pos, metadata
    assert [ref() for ref in kept].count(None) == 0
    del shared
    assert [ref() for ref in kept].count(None) == 3
