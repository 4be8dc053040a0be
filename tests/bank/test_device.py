"""What the sweep asks of a device: nothing on a CPU, and the right order of waits on CUDA."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.device import Device  # noqa: E402


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls to CUDA, instead of a GPU."""
    calls: list[Any] = []

    @contextmanager
    def stream(of: Any) -> Any:
        calls.append(("stream", of))
        yield
        calls.append("default stream")

    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5, 9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 10)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    return calls


def test_a_cpu_has_nothing_to_tell(cuda: list[Any]) -> None:
    device = Device("cpu")
    assert not device.is_cuda
    assert device.free_bytes() == device.room_bytes() == 0
    device.release()
    with device.on("stream"):
        pass
    device.seconds(lambda: None)
    assert cuda == []


def test_free_memory_and_giving_it_back(cuda: list[Any]) -> None:
    device = Device("cuda:3")
    assert device.is_cuda
    assert device.free_bytes() == 5
    assert device.room_bytes() == 5 + 7  # the allocator's cache is as good as free
    device.release()
    assert cuda == ["synchronize", "empty_cache"]


def test_another_stream_starts_after_and_ends_before_everything_else(cuda: list[Any]) -> None:
    with Device("cuda").on("serving"):
        cuda.append("work")
    assert cuda == ["synchronize", ("stream", "serving"), "work", "default stream", "synchronize"]
    cuda.clear()
    with Device("cuda").on(None):
        cuda.append("work")
    assert cuda == ["work"]


def test_time_is_taken_from_idle_to_idle(cuda: list[Any]) -> None:
    seconds = Device("cuda").seconds(lambda: cuda.append("work") or time.sleep(0.02))
    assert cuda == ["synchronize", "work", "synchronize"]
    assert seconds >= 0.02
