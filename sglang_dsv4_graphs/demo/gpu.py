"""The demo on a GPU: time to first token, plugin on and off, each in a server process of its own.

A process cannot show both: what a server captured, compiled or grew for one mode is there for the other. So each mode
gets a fresh one, with the same prompts, and warms up before it measures.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sglang_dsv4_graphs.demo import serve, served_model
from sglang_dsv4_graphs.demo.preflight import DemoError
from sglang_dsv4_graphs.log import PREFIX

SWITCH = "SGLANG_DSV4_GRAPHS"
LENGTHS = (64, 128, 256, 512, 1000, 2048, 4096, 8192)
# A first start on a machine compiles kernels for minutes.
LIMIT_S = 1800
LOG_LINES = 40
POLL_S = 0.5
# Ended processes that nobody collects look alive: do not wait for them longer than this.
END_S = 10

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


class Server:
    """One server process and its output, which goes to a file: the engine's processes share it and may outlive ours."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._path = log
        self._shown = 0
        with log.open("w") as output:
            # Its own session: whatever the engine leaves behind can be ended with it.
            self.process = subprocess.Popen(
                command,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._path.read_text(errors="replace")

    @property
    def times(self) -> Times:
        """Milliseconds per prompt length, as far as measured."""
        lines = [line for line in self.log.splitlines() if line.startswith(serve.ROW)]
        rows = [json.loads(line.removeprefix(serve.ROW)) for line in lines]
        return {row["length"]: row["ms"] for row in rows}

    def show_news(self) -> None:
        """Print what the plugin logged and what was measured since the last call; whole lines only."""
        complete = self.log.rpartition("\n")[0].splitlines()
        for line in complete[self._shown :]:
            if PREFIX in line:
                print("  " + line[line.index(PREFIX) :], flush=True)
            elif line.startswith(serve.ROW):
                print("  measured " + line.removeprefix(serve.ROW), flush=True)
        self._shown = len(complete)

    def end(self) -> None:
        """End the process and whatever it left; what still holds GPU memory would fail the next server."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            deadline = time.monotonic() + END_S
            while time.monotonic() < deadline:
                os.killpg(self.process.pid, 0)
                time.sleep(0.05)
        self.process.wait()


class Measured:
    """What a server left."""

    def __init__(self, server: Server) -> None:
        self.times, self.log = server.times, server.log


def measure(command: Sequence[str], environment: dict[str, str], log: Path, limit_s: float = LIMIT_S) -> Measured:
    """Run one server to its end.

    Raises:
        DemoError: it failed, took longer than ``limit_s`` or measured nothing; with the end of its log.
    """
    print(" ".join(f"{name}={value}" for name, value in environment.items()) + ":", flush=True)
    server = Server(command, environment, log)
    deadline = time.monotonic() + limit_s
    try:
        while server.process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
            server.show_news()
        code = server.process.poll()
    finally:
        server.end()
    server.show_news()
    measured = Measured(server)
    if code != 0 or not measured.times:
        how = f"did not end within {limit_s:g} s" if code is None else f"ended with code {code}"
        raise DemoError(f"the server {how}; its log ends:\n{last_lines(measured.log)}")
    return measured


def last_lines(log: str) -> str:
    return "\n".join(log.splitlines()[-LOG_LINES:])


def table(on: Times, off: Times) -> str:
    """Medians per prompt length and how many times faster the plugin is; a length that one side lacks is left out."""
    lines = [f"{'prompt':>8}  {'off ms':>8}  {'on ms':>8}  {'off/on':>6}"]
    for length in sorted(on.keys() & off.keys()):
        slow, fast = statistics.median(off[length]), statistics.median(on[length])
        lines.append(f"{length:>8}  {slow:>8.1f}  {fast:>8.1f}  {slow / fast:>6.2f}")
    repeats = min(map(len, (*on.values(), *off.values())))
    return "\n".join([*lines, f"time to first token, medians of {repeats}; off/on: times faster with the plugin"])
