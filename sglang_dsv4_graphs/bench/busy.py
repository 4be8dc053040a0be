"""How long the GPU works in a step: the union of its kernels' and copies' times, the floor of the step's time."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_TRACE_S = 60


def union_us(spans: Iterable[tuple[float, float]]) -> float:
    """Microseconds covered by ``spans`` of (begin, end), overlaps counted once."""
    busy, end = 0.0, float("-inf")
    for begin, stop in sorted(spans):
        busy += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return busy


def gpu_busy_ms(engine: Any, step: Callable[[], object]) -> float | None:
    """GPU milliseconds of ``step``, from the engine's own profiler in the process that serves; None if it wrote no
    trace of a GPU."""
    with tempfile.TemporaryDirectory(prefix="dsv4b_trace_") as folder:
        engine.start_profile(output_dir=folder, activities=["GPU"])
        step()
        engine.stop_profile()
        return busy_of_trace(Path(folder))


def busy_of_trace(folder: Path) -> float | None:
    """GPU milliseconds in the first whole trace that appears in ``folder``; None without one or without GPU work."""
    deadline = time.monotonic() + _TRACE_S
    while time.monotonic() < deadline:
        for path in sorted(folder.rglob("*.json.gz")):
            try:
                with gzip.open(path) as f:
                    events = json.load(f)["traceEvents"]
            except (OSError, EOFError, ValueError):  # it is still being written
                continue
            spans = [(e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in _GPU_CATEGORIES]
            return round(union_us(spans) / 1e3, 3) if spans else None
        time.sleep(0.2)
    return None
