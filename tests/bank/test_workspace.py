"""The held GEMM workspace, on an allocator that frees a stream's workspace as torch does when a graph goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank import workspace  # noqa: E402
from sglang_dsv4_graphs.bank.workspace import hold_workspace, stream_of_our_own  # noqa: E402

BYTES = 32 << 20


class Device:
    """Pools of blocks, and one workspace for each stream that a GEMM has run on, in the pool that was in use then."""

    def __init__(self) -> None:
        self.pool, self.stream = "default", "default"
        self.workspaces: dict[str, tuple[str, int]] = {}
        # Per pool, addresses that nobody uses; and the next one that was never used.
        self.free: dict[str, list[int]] = {}
        self.next = 0
        self.made = 0

    def gemm(self) -> None:
        if self.stream not in self.workspaces:
            free = self.free.setdefault(self.pool, [])
            if not free:
                self.next += BYTES
            self.workspaces[self.stream] = (self.pool, free.pop() if free else self.next)

    def destroy_graph_of(self, stream: str) -> None:
        pool, address = self.workspaces.pop(stream)
        self.free[pool].append(address)

    def new_pool(self) -> Any:
        self.made += 1
        return SimpleNamespace(id=f"pool {self.made}")

    def segments(self, pool: str) -> list[dict[str, Any]]:
        held = [BYTES for p, _ in self.workspaces.values() if p == pool]
        return [{"allocated_size": size} for size in [512, *held]]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()

    @contextmanager
    def using(name: str, value: str) -> Iterator[None]:
        before = getattr(found, name)
        setattr(found, name, value)
        yield
        setattr(found, name, before)

    def multiplied(result: Any) -> Any:
        def run(*args: Any) -> Any:
            found.gemm()
            return result

        return run

    monkeypatch.setattr(workspace, "_POOLS", {})
    monkeypatch.setattr(torch.cuda, "MemPool", found.new_pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool: using("pool", pool.id))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: using("stream", stream.name))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", found.segments)
    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, dtype, device: ones(*size, dtype=dtype))
    monkeypatch.setattr(torch, "mm", multiplied(None))
    monkeypatch.setattr(torch.nn.functional, "linear", multiplied(None))
    return found


def stream(name: str, handle: int) -> Any:
    return SimpleNamespace(name=name, cuda_stream=handle, synchronize=lambda: None)


def test_a_workspace_comes_back_where_it_was(device: Device) -> None:
    capture = stream("capture", 7)
    assert hold_workspace(capture)
    where = device.workspaces["capture"]
    assert where[0] == "pool 1"
    device.destroy_graph_of("capture")
    # Somebody else's workspace does not get the memory meanwhile.
    device.stream = "other"
    device.gemm()
    assert hold_workspace(capture)
    assert device.workspaces == {"capture": where, "other": ("default", 2 * BYTES)}


def test_nothing_is_allocated_while_it_is_held(device: Device) -> None:
    for _ in range(3):
        assert hold_workspace(stream("capture", 7))
    assert (device.made, device.next) == (1, BYTES)


def test_streams_have_pools_of_their_own(device: Device) -> None:
    assert hold_workspace(stream("one", 7))
    assert hold_workspace(stream("two", 8))
    assert {name: pool for name, (pool, _) in device.workspaces.items()} == {"one": "pool 1", "two": "pool 2"}


def test_a_stream_that_was_used_before_is_not_held(device: Device) -> None:
    device.stream = "capture"
    device.gemm()
    device.stream = "default"
    assert not hold_workspace(stream("capture", 7))


def test_a_stream_of_our_own_is_in_nobodys_use(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch deals 32 streams out in turn: the next one may be somebody's, even one that is held."""
    dealt = iter(range(1000))

    def named(handle: int) -> Any:
        return stream(f"stream {handle % 32}", handle % 32)

    monkeypatch.setattr(torch.cuda, "Stream", lambda: named(next(dealt)))
    for used in (0, 1):
        device.stream = f"stream {used}"
        device.gemm()
    device.stream = "default"
    assert stream_of_our_own().name == "stream 2"


def test_gemms_without_a_workspace_may_run_on_any_stream(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def deal() -> Any:
        asked.append(len(asked))
        return stream(f"stream {len(asked)}", len(asked))

    monkeypatch.setattr(torch.cuda, "Stream", deal)
    monkeypatch.setattr(device, "gemm", lambda: None)
    assert stream_of_our_own().name == "stream 32"
    assert len(asked) == 32
