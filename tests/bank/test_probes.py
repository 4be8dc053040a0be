"""The plugin's own guarded buffers: found where they lie now, whoever replaced them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.guard import AddressGuard, MovedBufferError  # noqa: E402
from sglang_dsv4_graphs.bank.probes import KnownBuffers, derived_tensors, model_weights  # noqa: E402
from sglang_dsv4_graphs.extend import Probe  # noqa: E402


def guard(pool: Any, model: Any = None) -> AddressGuard:
    probe = Probe(None, SimpleNamespace(token_to_kv_pool=pool), model)
    return AddressGuard(KnownBuffers().dsv4_graphs_guard(probe))


def check(guard: AddressGuard, captured: Any) -> None:
    guard.check(captured, bank="b", bucket=1)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> dict[Any, torch.Tensor]:
    """flashinfer's cache of named buffers."""
    cache = {("workspace", "cuda:0"): torch.zeros(2), ("other", "cuda:0"): torch.zeros(2)}
    monkeypatch.setitem(sys.modules, "flashinfer.utils", SimpleNamespace(_cache_buf=cache))
    return cache


@pytest.fixture
def no_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer.utils", raising=False)


@pytest.mark.usefixtures("no_flashinfer")
def test_the_request_windows_workspace() -> None:
    window = SimpleNamespace(workspace=None)
    found = guard(SimpleNamespace(request_window=window))
    assert found.names == ("request-window-workspace",)
    absent = found.addresses()
    check(found, absent)
    window.workspace = SimpleNamespace(kv_buffer=[torch.zeros(4)])
    with pytest.raises(MovedBufferError, match="request-window-workspace"):
        check(found, absent)
    captured, kept = found.addresses(), window.workspace
    check(found, captured)
    window.workspace = SimpleNamespace(kv_buffer=[torch.zeros(8)])
    with pytest.raises(MovedBufferError, match="request-window-workspace"):
        check(found, captured)
    assert kept is not window.workspace


@pytest.mark.usefixtures("no_flashinfer")
@pytest.mark.parametrize("pool", [SimpleNamespace(), SimpleNamespace(request_window=None)])
def test_no_request_window(pool: Any) -> None:
    assert guard(pool).names == ()


class WindowPool:
    """A KV pool that keeps K rows per layer and counts who asks for them."""

    request_window = None

    def __init__(self, layers: int) -> None:
        self.rows = [torch.zeros(4) for _ in range(layers)]
        self.asked: list[int] = []

    def get_swa_key_buffer_radix(self, layer_id: int) -> torch.Tensor:
        self.asked.append(layer_id)
        return self.rows[layer_id]


@pytest.mark.usefixtures("no_flashinfer")
def test_the_windows_of_the_models_layers() -> None:
    pool = WindowPool(4)
    found = guard(pool, SimpleNamespace(start_layer=1, end_layer=3))
    assert found.names == ("window-k-1", "window-k-2")
    assert pool.asked == []  # it may wait for a layer: asked when addresses are taken, and after updates
    captured = found.addresses()
    assert pool.asked == [1, 2]
    check(found, captured)
    kept = pool.rows[2]
    pool.rows[2] = torch.zeros(4)
    check(found, captured)
    assert pool.asked == [1, 2]
    found.weights_changed()
    with pytest.raises(MovedBufferError, match="buffer=window-k-2 moved"):
        check(found, captured)
    pool.rows[2] = kept
    check(found, captured)


@pytest.mark.engine
def test_the_engines_pool_stores_where_the_probe_looks() -> None:
    """The store asks for the raw buffer, the probe for the one that attention reads: one and the same memory."""
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool as Pool

    class Bare(Pool):
        def __init__(self) -> None:
            self.request_window, self._stage_start = None, 0
            rows = [torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)]
            self.swa_kv_pool = SimpleNamespace(kv_buffer=rows, get_key_buffer=lambda i: rows[i].view(torch.int8))

        def wait_layer_transfer(self, layer_id: int) -> None: ...

    pool = Bare()
    found = guard(pool, SimpleNamespace(start_layer=0, end_layer=2))
    assert found.names[:2] == ("window-k-0", "window-k-1")
    assert found.addresses().buffers[:2] == tuple(pool.get_swa_raw_buffer(i).data_ptr() for i in range(2))


def test_flashinfers_buffers(flashinfer: dict[Any, torch.Tensor]) -> None:
    found = guard(SimpleNamespace())
    assert found.names == ("flashinfer:workspace", "flashinfer:other")
    captured = found.addresses()
    flashinfer["later", "cuda:0"] = torch.zeros(2)  # no graph knows it
    check(found, captured)
    kept = flashinfer["other", "cuda:0"]
    flashinfer["other", "cuda:0"] = torch.zeros(8)  # grown
    with pytest.raises(MovedBufferError, match="buffer=flashinfer:other moved"):
        check(found, captured)
    del flashinfer["other", "cuda:0"]
    with pytest.raises(MovedBufferError, match=r"buffer=flashinfer:other moved.*now at nowhere"):
        check(found, captured)
    assert kept is not None


def test_a_flashinfer_that_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer.utils", SimpleNamespace(_cache_buf="something else"))
    assert guard(SimpleNamespace()).names == ()


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2, bias=False)
        self.register_buffer("scale", torch.ones(1))


def test_weights_of_a_range() -> None:
    model: Any = SimpleNamespace(layers=[Layer(), Layer(), object(), Layer()])
    found = model_weights(model, 1, 4)
    names = [f"layers.{i}.{name}" for i in (1, 3) for name in ("scale", "inner.weight")]
    assert sorted(w.name for w in found) == sorted(names)
    by_name = {w.name: w for w in found}
    assert by_name["layers.1.inner.weight"].tensor() is model.layers[1].inner.weight
    assert by_name["layers.1.scale"].tensor() is model.layers[1].scale


def test_tensors_derived_from_weights() -> None:
    layers = [Layer(), Layer(), Layer()]
    for layer in layers:
        layer.inner.transposed = layer.inner.weight.t().contiguous()
        layer.parts = (torch.ones(2), None, torch.ones(3))  # type: ignore[assignment]
        layer.names = ["no", "tensors"]  # type: ignore[assignment]
    model: Any = SimpleNamespace(layers=layers)
    found = list(derived_tensors(model, 1, 2))
    assert [b.name for b in found] == ["layers.1.parts[0]", "layers.1.parts[2]", "layers.1.inner.transposed"]
    assert not any(b.cheap for b in found)
    derived = AddressGuard(found)

    def moved(buffer: str, change: Callable[[], None]) -> None:
        captured = derived.addresses()
        check(derived, captured)
        kept = [b.tensor() for b in found]
        change()
        check(derived, captured)  # what changes from step to step is no reason
        derived.weights_changed()
        with pytest.raises(MovedBufferError, match=re.escape(f"buffer={buffer} moved")):
            check(derived, captured)
        check(derived, derived.addresses())
        assert kept is not None

    moved("layers.1.inner.transposed", lambda: setattr(layers[1].inner, "transposed", torch.zeros(2, 2)))
    moved("layers.1.parts[2]", lambda: setattr(layers[1], "parts", (*layers[1].parts[:2], torch.zeros(3))))
    moved("layers.1.parts[0]", lambda: setattr(layers[1], "parts", None))
