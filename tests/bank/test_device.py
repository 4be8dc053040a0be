"""What the sweep asks of a device: nothing on a CPU, and the right order of waits on CUDA."""

from __future__ import annotations

import gc
import time
import weakref
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.device import Device, old_objects_aside  # noqa: E402


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


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.me = self


def test_old_objects_are_set_aside_and_come_back(thawed: None) -> None:
    kept = Cycle()
    old = weakref.ref(kept)
    with old_objects_aside():
        assert gc.get_freeze_count() > 0
        del kept
        young = weakref.ref(Cycle())
        Device("cpu").release()
        # What a release is for still goes; what was there before is not looked at.
        assert young() is None
        assert old() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None


def test_garbage_of_before_is_not_set_aside(thawed: None) -> None:
    """What the engine's own captures left would keep its memory through the whole sweep."""
    garbage = weakref.ref(Cycle())
    with old_objects_aside():
        assert garbage() is None


def test_old_objects_come_back_after_an_error(thawed: None) -> None:
    with pytest.raises(RuntimeError, match="no room"), old_objects_aside():
        raise RuntimeError("no room")
    assert gc.get_freeze_count() == 0


def test_objects_that_another_set_aside_stay_so(thawed: None) -> None:
    gc.freeze()
    try:
        with old_objects_aside():
            young = weakref.ref(Cycle())
            Device("cpu").release()
            assert young() is None
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
