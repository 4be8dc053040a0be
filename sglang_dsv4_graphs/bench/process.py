"""A server process: its own session, its output in a file, and nothing left behind when it is over.

The engine starts processes of its own, which share the output and may outlive their parent; one that still holds GPU
memory would spoil the next server. So each server gets a session, and the whole session is ended with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

LOG_LINES = 40
# A line with a server's arguments has thousands of characters, and is not what went wrong.
LINE_LENGTH = 300
POLL_S = 0.5
# Ended processes that nobody collects look alive: do not wait for them longer than this.
END_S = 10
_PR_SET_PDEATHSIG = 1
# Loaded here: between a fork and its exec nothing should be.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class ServerProcess:
    """One process and its output."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._path = log
        self._shown = 0
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                env=os.environ | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if _LIBC is None else _end_with_parent,
            )

    @property
    def log(self) -> str:
        return self._path.read_text(errors="replace")

    def news(self) -> list[str]:
        """Whole lines that came since the last call."""
        complete = self.log.rpartition("\n")[0].splitlines()
        new, self._shown = complete[self._shown :], len(complete)
        return new

    def end(self) -> None:
        """End the process and whatever it left."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            deadline = time.monotonic() + END_S
            while time.monotonic() < deadline:
                os.killpg(self.process.pid, 0)
                time.sleep(0.05)
        self.process.wait()


def run_to_end(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    *,
    limit_s: float,
    show: Callable[[list[str]], None] = lambda lines: None,
    poll_s: float | None = None,
) -> int | None:
    """Run one process to its end and end what it left; its exit code, or None if it took longer than ``limit_s``.

    ``show`` gets the new whole lines of its output every ``poll_s`` seconds.
    """
    server = ServerProcess(command, environment, log)
    deadline = time.monotonic() + limit_s
    try:
        while server.process.poll() is None and time.monotonic() < deadline:
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(POLL_S if poll_s is None else poll_s)
            show(server.news())
        code = server.process.poll()
    finally:
        server.end()
    show(server.news())
    return code


def how_it_ended(code: int | None, limit_s: float) -> str:
    return f"did not end within {limit_s:g} s" if code is None else f"ended with code {code}"


def last_lines(log: str) -> str:
    """The end of a log, for an error message."""
    lines = log.splitlines()[-LOG_LINES:]
    return "\n".join(line if len(line) <= LINE_LENGTH else f"{line[:LINE_LENGTH]}..." for line in lines)


def _end_with_parent() -> None:
    """In the new process: be killed when whoever started it dies without a word."""
    assert _LIBC is not None
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def raise_on_term() -> None:
    """Let a termination signal unwind like an interrupt, so that running servers are ended."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
