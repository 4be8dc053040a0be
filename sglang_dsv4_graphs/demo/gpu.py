"""The demo on a GPU: time to first token, plugin on and off, each in a server process of its own.

A process cannot show both: what a server captured, compiled or grew for one mode is there for the other. So each mode
gets a fresh one, with the same prompts, and warms up before it measures.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sglang_dsv4_graphs.bench.process import how_it_ended, last_lines, run_to_end
from sglang_dsv4_graphs.bench.variants import SWITCH
from sglang_dsv4_graphs.demo import serve, served_model
from sglang_dsv4_graphs.demo.preflight import DemoError
from sglang_dsv4_graphs.log import PREFIX

LENGTHS = (64, 128, 256, 512, 1000, 2048, 4096, 8192)
# A first start on a machine compiles kernels for minutes.
LIMIT_S = 1800
POLL_S = 0.5

Times = dict[int, list[float]]


def run(repeats: int) -> int:
    """Serve twice, print the table.

    Raises:
        DemoError: a server failed, or the plugin captured nothing in it.
    """
    print("a GPU: dummy weights, DeepSeek-V4.1-Flash's shape as one rank of four sees it; two servers, minutes each")
    with tempfile.TemporaryDirectory(prefix="dsv4_graphs_") as folder:
        served_model.write_config(Path(folder))
        on = measure(server_command(folder, repeats), {SWITCH: "1"}, Path(folder) / "on.log")
        off = measure(server_command(folder, repeats), {SWITCH: "0"}, Path(folder) / "off.log")
        captured = f"{PREFIX} captured bank=total"
        if captured not in on.log:
            raise DemoError(f"the plugin captured nothing; the server's log ends:\n{last_lines(on.log)}")
        if captured in off.log:
            raise DemoError(f"{SWITCH}=0 and the plugin captured all the same")
    print(table(on.times, off.times))
    return 0


def server_command(model: str, repeats: int) -> list[str]:
    lengths = ",".join(map(str, LENGTHS))
    arguments = ["--model", model, "--lengths", lengths, "--repeats", str(repeats)]
    return [sys.executable, "-m", serve.__name__, *arguments]


class Measured:
    """What a server left: its log, and milliseconds per prompt length as far as measured."""

    def __init__(self, log: str) -> None:
        self.log = log
        lines = [line for line in log.splitlines() if line.startswith(serve.ROW)]
        rows = [json.loads(line.removeprefix(serve.ROW)) for line in lines]
        self.times: Times = {row["length"]: row["ms"] for row in rows}


def show_news(lines: Sequence[str]) -> None:
    """Print what of a server's output is the plugin's log or a measurement."""
    for line in lines:
        if PREFIX in line:
            print("  " + line[line.index(PREFIX) :], flush=True)
        elif line.startswith(serve.ROW):
            print("  measured " + line.removeprefix(serve.ROW), flush=True)


def measure(command: Sequence[str], environment: dict[str, str], log: Path, limit_s: float = LIMIT_S) -> Measured:
    """Run one server to its end.

    Raises:
        DemoError: it failed, took longer than ``limit_s`` or measured nothing; with the end of its log.
    """
    print(" ".join(f"{name}={value}" for name, value in environment.items()) + ":", flush=True)
    code = run_to_end(command, environment, log, limit_s=limit_s, show=show_news, poll_s=POLL_S)
    measured = Measured(log.read_text(errors="replace"))
    if code != 0 or not measured.times:
        raise DemoError(f"the server {how_it_ended(code, limit_s)}; its log ends:\n{last_lines(measured.log)}")
    return measured


def table(on: Times, off: Times) -> str:
    """Medians per prompt length and how many times faster the plugin is; a length that one side lacks is left out."""
    lines = [f"{'prompt':>8}  {'off ms':>8}  {'on ms':>8}  {'off/on':>6}"]
    for length in sorted(on.keys() & off.keys()):
        slow, fast = statistics.median(off[length]), statistics.median(on[length])
        lines.append(f"{length:>8}  {slow:>8.1f}  {fast:>8.1f}  {slow / fast:>6.2f}")
    repeats = min(map(len, (*on.values(), *off.values())))
    return "\n".join([*lines, f"time to first token, medians of {repeats}; off/on: times faster with the plugin"])
