"""Breaks of a range: plain outside of one; inside, the store joins the attention and both read the live step."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.hooks.breaks import RangeBreaks  # noqa: E402
from sglang_dsv4_graphs.settings import Settings  # noqa: E402

BUCKET, HEADS, DIM = 6, 2, 3
LAYER = 3


class Engine:
    """Breaks are noted and run; the step in the break context has ``rows`` real rows."""

    def __init__(self, rows: int) -> None:
        self.capturing_range = self.marked = True
        self.static_slots: Any = None
        self.breaks: list[str] = []
        self.stubs: list[Any] = []
        self.pending_stores: dict[int, tuple[Any, ...]] = {}
        self.forwards: list[dict[str, Any]] = []
        batch = SimpleNamespace(global_num_token_non_padded_cpu=rows)
        self.context = SimpleNamespace(forward_batch=batch, attention_layers={LAYER: "layer 3"})
        self.backend = SimpleNamespace(forward=self.forward, store_cache="the backend's")

    def eager_on_graph(self, run: Any, capture_stub: Any = None) -> Any:
        def wrapper(*args: Any) -> Any:
            self.breaks.append(run.__name__)
            self.stubs.append(capture_stub)
            return run(*args)

        return wrapper

    def get_break_context(self) -> Any:
        return self.context

    def get_attn_backend(self) -> Any:
        return self.backend

    def forward(self, **given: Any) -> torch.Tensor:
        self.forwards.append(given)
        return given["q"].reshape(given["q"].shape[0], -1) * 2

    @contextmanager
    def outside_range_capture(self) -> Any:
        self.capturing_range = False
        yield
        self.capturing_range = True

    @contextmanager
    def unmarked(self) -> Any:
        self.marked = False
        yield
        self.marked = True


class Attention:
    """An attention module of 0.5.23; its store notes what it got and whether it is inside a range."""

    layer_id = LAYER

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.stored: list[tuple[Any, ...]] = []

    def _compute_kv_to_cache(self, x: Any, positions: Any, batch: Any, backend: Any, qkv_a: Any = None) -> None:
        assert not self.engine.capturing_range
        assert backend is self.engine.backend
        assert batch is self.engine.context.forward_batch
        self.stored.append((x, positions, qkv_a))


def attention_arguments() -> tuple[Any, ...]:
    query = torch.randn(BUCKET, HEADS, DIM)
    output = torch.full((BUCKET, HEADS, DIM), float("nan"))
    return query, "key and value", output, LAYER, 4, "sink", True


def plain(*args: Any) -> str:
    return "the engine's break"


def _unwrapped(query: Any, key_value: Any, output: Any, *rest: Any) -> None:
    output.fill_(7)


plain.__wrapped__ = _unwrapped  # type: ignore[attr-defined]


def make(rows: int, **settings: Any) -> tuple[Engine, Attention, RangeBreaks]:
    engine = Engine(rows)
    return engine, Attention(engine), RangeBreaks(engine, Settings(**settings))  # type: ignore[arg-type]


def store_of_0_5_23(breaks: RangeBreaks, attention: Attention, qkv: Any = None) -> tuple[Any, Any]:
    x, positions = torch.randn(BUCKET, 4), torch.arange(BUCKET)
    assert breaks.around_tail_kv_store(plain, attention, x, positions, qkv) is None
    return x, positions


@pytest.mark.parametrize("rows", [0, 1, 4, BUCKET])
def test_the_store_is_the_start_of_the_attention_break(rows: int) -> None:
    engine, attention, breaks = make(rows)
    qkv = torch.randn(BUCKET, 5)
    x, positions = store_of_0_5_23(breaks, attention, qkv)
    assert engine.breaks == []
    assert attention.stored == []
    args = attention_arguments()
    breaks.around_attention(plain, *args)
    assert engine.breaks == ["_run_store_and_attention"]
    if rows:
        ((stored, at, qkv_rows),) = attention.stored
        assert torch.equal(stored, x[:rows])
        assert torch.equal(at, positions[:rows])
        assert torch.equal(qkv_rows, qkv[:rows])
    else:
        assert attention.stored == []


@pytest.mark.parametrize("rows", [0, 1, 4, BUCKET])
def test_attention_on_real_rows_and_zeros_behind(rows: int) -> None:
    engine, attention, breaks = make(rows)
    store_of_0_5_23(breaks, attention)
    query, key_value, output, *_ = args = attention_arguments()
    breaks.around_attention(plain, *args)
    assert torch.equal(output[:rows], query[:rows] * 2)
    assert not output[rows:].any()
    if rows:
        (given,) = engine.forwards
        assert torch.equal(given.pop("q"), query[:rows])
        assert given == {
            "k": key_value,
            "v": key_value,
            "layer": "layer 3",
            "forward_batch": engine.context.forward_batch,
            "compress_ratio": 4,
            "attn_sink": "sink",
            "save_kv_cache": True,
        }
    else:
        assert engine.forwards == []


def test_each_attention_has_its_own_layers_store() -> None:
    engine, attention, breaks = make(4)
    other = Attention(engine)
    other.layer_id = 5
    engine.context.attention_layers[5] = "layer 5"
    store_of_0_5_23(breaks, attention)
    store_of_0_5_23(breaks, other)
    query, key_value, output, _, *rest = attention_arguments()
    breaks.around_attention(plain, query, key_value, output, 5, *rest)
    assert (len(attention.stored), len(other.stored)) == (0, 1)
    breaks.around_attention(plain, query, key_value, output, LAYER, *rest)
    breaks.around_attention(plain, query, key_value, output, LAYER, *rest)  # no store before it
    assert (len(attention.stored), len(other.stored)) == (1, 1)
    assert engine.breaks == ["_run_store_and_attention", "_run_store_and_attention", "_run_attention"]


@pytest.mark.parametrize("lean", [True, False])
def test_a_separate_store(lean: bool) -> None:
    engine, attention, breaks = make(4, merged_kv_store=False, lean_breaks=lean)
    assert breaks.around_tail_kv_store(plain, attention, "x", "positions", None) == "the engine's break"
    args = attention_arguments()
    result = breaks.around_attention(plain, *args)
    assert attention.stored == []
    if lean:
        assert engine.breaks == ["_run_attention"]
        assert torch.equal(args[2][:4], args[0][:4] * 2)
    else:
        assert result == "the engine's break"
        assert engine.breaks == []


def test_a_merged_store_with_the_engines_attention() -> None:
    engine, attention, breaks = make(4, lean_breaks=False)
    store_of_0_5_23(breaks, attention)
    args = attention_arguments()
    breaks.around_attention(plain, *args)
    assert engine.breaks == ["_run_store_and_attention"]
    assert len(attention.stored) == 1
    assert (args[2] == 7).all()  # by what the engine's break wraps: a break in a break would run twice


def original_store(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


def test_the_store_of_0_5_22() -> None:
    engine, attention, breaks = make(4)
    x, positions = torch.randn(BUCKET, 4), torch.arange(BUCKET)
    stored: list[Any] = []

    def store(attention: Any, x: Any, positions: Any, batch: Any, backend: Any, qkv_a: Any = None) -> None:
        assert not engine.capturing_range
        stored.append((attention, x, positions, batch, backend, qkv_a))

    assert breaks.around_kv_store(store, attention, x, positions, "captured batch", "captured backend") is None
    assert stored == []
    breaks.around_attention(plain, *attention_arguments())
    ((by, rows, at, batch, backend, qkv),) = stored
    assert (by, batch, backend, qkv) == (attention, engine.context.forward_batch, engine.backend, None)
    assert torch.equal(rows, x[:4])
    assert torch.equal(at, positions[:4])


def test_a_separate_store_of_0_5_22() -> None:
    engine, attention, breaks = make(4, merged_kv_store=False)
    stored: list[Any] = []

    def store(attention: Any, x: Any, positions: Any, batch: Any, backend: Any, qkv_a: Any = None) -> None:
        stored.append((x, positions, qkv_a))

    x, positions, qkv = torch.randn(BUCKET, 4), torch.arange(BUCKET), torch.randn(BUCKET, 2)
    breaks.around_kv_store(store, attention, x, positions, "captured batch", "captured backend", qkv_a=qkv)
    assert engine.breaks == ["_store_live_rows"]
    ((rows, at, qkv_rows),) = stored
    for got, given in ((rows, x), (at, positions), (qkv_rows, qkv)):
        assert torch.equal(got, given[:4])


def test_the_sources_of_0_5_22_are_skipped_while_capturing() -> None:
    engine, _, breaks = make(4)
    ran: list[Any] = []

    def sources(*args: Any) -> str:
        return "the engine's break"

    sources.__wrapped__ = lambda *args: ran.append(args)  # type: ignore[attr-defined]
    breaks.around_low_ratio_sources(sources, "layer", "x", "q", "positions")
    assert ran == [("layer", "x", "q", "positions")]
    assert engine.breaks == ["_run_sources"]
    assert engine.capturing_range
    (stub,) = engine.stubs
    assert stub(sources, "layer", "x", "q", "positions") is None
    assert len(ran) == 1


@pytest.mark.parametrize("rows", [4, 0])
def test_the_backends_sources_of_0_5_22_break_where_the_model_does_not(rows: int) -> None:
    """On the live rows and batch, as in an eager step; they are skipped while capturing."""
    engine, _, breaks = make(rows)
    ran: list[dict[str, Any]] = []

    def sources(**given: Any) -> None:
        assert (engine.capturing_range, engine.marked) == (False, False)
        ran.append(given)

    engine.backend.forward_low_ratio_sources = sources
    x, q, positions = torch.randn(BUCKET, 4), torch.randn(BUCKET, 2), torch.arange(BUCKET)
    given = {"x": x, "q_lora": q, "positions": positions}
    asked = given | {"layer": "layer", "forward_batch": "captured", "run_indexer": False}
    assert breaks.around_backend_sources(plain, "captured", **asked) is None
    assert (engine.breaks, engine.stubs[0]("run", "layer", x, q, positions)) == (["_run_sources"], None)
    if not rows:
        assert ran == []
        return
    (got,) = ran
    assert (got.pop("layer"), got.pop("forward_batch")) == ("layer", engine.context.forward_batch)
    assert got.pop("run_indexer") is False
    assert all(torch.equal(got[name], t[:rows]) for name, t in given.items())
    assert got.keys() == given.keys()


class SlotStore:
    """A store by either version's name; notes its rows and the slots that it asks its backend for."""

    layer_id = LAYER
    engine: Any = None
    stored: ClassVar[list[Any]] = []

    def _compute_kv_to_cache(self, x: Any, positions: Any, batch: Any, backend: Any, qkv_a: Any = None) -> None:
        assert not self.engine.capturing_range
        assert batch is self.engine.context.forward_batch
        assert backend.store_cache == "the backend's"
        self.stored.append((x, positions, qkv_a, backend.get_swa_out_cache_loc(batch)))


@pytest.mark.parametrize("release", ["0.5.22", "0.5.23"])
@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("rows", [0, 4, BUCKET])
def test_a_store_in_the_graph(release: str, lean: bool, rows: int) -> None:
    """Every row of the bucket into as many static slots, at once and not in a break, whatever the step's rows."""
    engine, _, breaks = make(rows, lean_breaks=lean)
    engine.static_slots = torch.arange(100, 100 + BUCKET + 2)
    attention = SlotStore()
    attention.engine, attention.stored = engine, []  # type: ignore[misc]
    x, positions, qkv = torch.randn(BUCKET, 4), torch.arange(BUCKET), torch.randn(BUCKET, 2)
    if release == "0.5.22":
        store = SlotStore._compute_kv_to_cache
        assert breaks.around_kv_store(store, attention, x, positions, "captured", "backend", qkv_a=qkv) is None
    else:
        assert breaks.around_tail_kv_store(plain, attention, x, positions, qkv) is None
    ((stored, at, qkv_rows, slots),) = attention.stored
    assert stored is x
    assert at is positions
    assert qkv_rows is qkv
    assert slots.data_ptr() == engine.static_slots.data_ptr()  # a copy would hold the capture's
    assert slots.tolist() == list(range(100, 100 + BUCKET))
    assert engine.breaks == []
    assert engine.capturing_range

    args = attention_arguments()
    result = breaks.around_attention(plain, *args)
    assert len(attention.stored) == 1  # the attention's break begins with no second one
    assert engine.breaks == (["_run_attention"] if lean else [])
    assert lean or result == "the engine's break"


def test_slots_alone_do_not_store_in_a_graph() -> None:
    """Without merging the engine's own break stores; outside a range everything is the engine's."""
    engine, attention, breaks = make(4, merged_kv_store=False)
    engine.static_slots = torch.arange(BUCKET)
    assert breaks.around_tail_kv_store(plain, attention, "x", "positions", None) == "the engine's break"
    engine, attention, breaks = make(4)
    engine.static_slots, engine.capturing_range = torch.arange(BUCKET), False
    assert breaks.around_tail_kv_store(plain, attention, "x", "positions", None) == "the engine's break"
    args, _ = breaks.around_kv_store(original_store, attention, "x", "p", "batch", "backend")
    assert args == (attention, "x", "p", "batch", "backend")
    assert attention.stored == []


def test_outside_a_range_every_call_is_the_engines() -> None:
    engine, attention, breaks = make(4)
    engine.capturing_range = False
    assert breaks.around_attention(plain, *attention_arguments()) == "the engine's break"
    assert breaks.around_tail_kv_store(plain, attention, "x", "p", None) == "the engine's break"
    assert breaks.around_low_ratio_sources(plain, "layer", "x", "q", "p") == "the engine's break"
    asked = {
        "layer": "layer",
        "x": "x",
        "q_lora": None,
        "positions": "p",
        "forward_batch": "batch",
        "run_indexer": False,
    }
    assert breaks.around_backend_sources(original_store, "backend", **asked) == (("backend",), asked)
    args, kwargs = breaks.around_kv_store(original_store, attention, "x", "p", "batch", "backend", "qkv", "rope")
    assert args == (attention, "x", "p", "batch", "backend")
    assert kwargs == {"qkv_a": "qkv", "q_rope": "rope"}
    assert engine.breaks == attention.stored == engine.forwards == []


def test_breaks_are_made_once() -> None:
    engine, attention, breaks = make(4)
    made: list[Any] = []
    real = engine.eager_on_graph
    engine.eager_on_graph = lambda run, capture_stub=None: made.append(run) or real(run, capture_stub)  # type: ignore[method-assign]
    for _ in range(3):
        store_of_0_5_23(breaks, attention)
        breaks.around_attention(plain, *attention_arguments())
    assert len(made) == 1
