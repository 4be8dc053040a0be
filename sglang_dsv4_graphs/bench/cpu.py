"""The benchmark without a GPU: host microseconds of replayed steps, on the tape and the engine's model on the CPU.

What is timed is what a server's host does in a replay, with two differences: a segment's launch is here the segment's
whole work, and the kernels behind the breaks are stand-ins. So the numbers say how often each part runs and what the
Python around it costs, and are reported, never judged.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dsv4_graphs.bench.breakdown import reduce_steps
from sglang_dsv4_graphs.bench.errors import BenchError
from sglang_dsv4_graphs.bench.memory import machine
from sglang_dsv4_graphs.bench.results import SUMMARY_FILE, Result, write_json
from sglang_dsv4_graphs.extend import hookimpl
from sglang_dsv4_graphs.version import __version__

if TYPE_CHECKING:
    from sglang_dsv4_graphs.bank.sweep import Startup
    from sglang_dsv4_graphs.bench.step_timers import StepTimers
    from sglang_dsv4_graphs.cpu_engine import CpuRunner

# Rows of one request: padded, a full bucket, several tails' worth.
LENGTHS = (40, 128, 300)


class Tapes:
    """The extension that makes the CPU capturable and keeps the startup for the timers."""

    def __init__(self, make_backend: Callable[[], Any]) -> None:
        self._make_backend = make_backend
        self.startup: Startup | None = None

    @hookimpl
    def dsv4_graphs_backend(self, device: str) -> Any:
        return self._make_backend() if device == "cpu" else None

    @hookimpl(trylast=True)
    def dsv4_graphs_startup(self, startup: Startup) -> None:
        self.startup = startup


def run(out: Path, requests: int, lengths: tuple[int, ...] = LENGTHS) -> Result:
    """Capture, time ``requests`` replayed steps per length, write and return the record.

    Raises:
        BenchError: the plugin did not install or captured nothing.
    """
    from sglang_dsv4_graphs.demo import cpu as demo

    os.environ.update(demo.SETTINGS)
    demo.show_plugin_log()
    installation, runner = demo.build()
    from sglang_dsv4_graphs.bank.tape import TapeBackend

    tapes = Tapes(lambda: TapeBackend(installation.runtime.engine.current_capture_var))
    installation.manager.register(tapes)
    runner.startup()
    if tapes.startup is None or not tapes.startup.served.ready:
        raise BenchError("the plugin captured nothing; its log lines above say why")
    record = new_record(requests)
    for n in lengths:
        record["processes"][0]["breakdown"].append(time_steps(tapes.startup, runner, n, requests))
        write_json(out / SUMMARY_FILE, record)
    record["processes"][0]["complete"] = True
    record["state"] = "complete"
    write_json(out / SUMMARY_FILE, record)
    return record


def new_record(requests: int) -> Result:
    from sglang_dsv4_graphs.engine.facts import installed_version

    process = {"variant": "plugin", "round": 1, "mode": "cpu", "engine": installed_version(), "breakdown": []}
    return {
        "plugin": __version__,
        "mode": "cpu",
        "machine": machine(),
        "requests": requests,
        "state": "running",
        "summary": {},
        "processes": [process],
    }


def time_steps(startup: Startup, runner: CpuRunner, rows: int, requests: int) -> Result:
    """The breakdown of ``requests`` cold steps of ``rows`` tokens; each has tokens and slots of its own.

    Raises:
        BenchError: a step did not replay.
    """
    from sglang_dsv4_graphs.bench.step_timers import StepTimers

    run_steps(runner, rows, 1)  # whatever is made lazily
    replays = startup.served.replays.total()
    timers: StepTimers = StepTimers(startup, runner)
    try:
        run_steps(runner, rows, requests)
    finally:
        timers.cancel()
    if startup.served.replays.total() - replays < requests:
        raise BenchError(f"{rows} rows did not replay: {dict(startup.served.fallbacks)}")
    row: Result = {"tokens": rows, "steps": timers.steps(), "timer_us": timers.overhead_us()}
    return row | {"parts": reduce_steps(row)}


def run_steps(runner: CpuRunner, rows: int, count: int) -> None:
    from sglang_dsv4_graphs.cpu_engine import Request

    for seed in range(count):
        request = Request.of(rows, seed)
        runner.extend([request])
        runner.release(request)
