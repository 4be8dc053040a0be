"""The GPU's own time of one forward, taken inside the process that serves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_dsv4_graphs.bench.busy import busy_of_trace


def busy_of(forward: Callable[[], Any]) -> float | None:
    """Run ``forward`` under torch's profiler; microseconds in which the GPU worked, or None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        forward()
        return None
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        forward()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="dsv4b_trace_") as folder:
        profiler.export_chrome_trace(str(Path(folder) / "step.json.gz"))
        busy = busy_of_trace(Path(folder))
    return None if busy is None else round(busy * 1e3, 1)
