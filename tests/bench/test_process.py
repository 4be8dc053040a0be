"""A server's process leaves nothing behind, however it or its parent ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_dsv4_graphs.bench import process

ROOT = Path(__file__).resolve().parent.parent.parent
SLEEPS = "import time; time.sleep(120)"


def gone(pid: int, within_s: float = 10) -> bool:
    """Whether the process ended, or is one that nobody has collected yet."""
    state, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if state.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_it_ends_with_its_children_when_its_time_is_up(tmp_path: Path) -> None:
    shown: list[str] = []
    command = ["sh", "-c", "sleep 120 & echo $!; sleep 120"]
    code = process.run_to_end(command, {}, tmp_path / "log", limit_s=2, show=shown.extend, poll_s=0.05)
    assert code is None
    assert process.how_it_ended(code, 2) == "did not end within 2 s"
    assert gone(int(shown[0]))


def test_lines_are_shown_whole_and_once(tmp_path: Path) -> None:
    half = "sys.stdout.write('tw'); sys.stdout.flush(); time.sleep(.3); print('o')"
    script = f"import sys, time; print('one', flush=True); {half}"
    news: list[list[str]] = []
    command = [sys.executable, "-c", script]
    assert process.run_to_end(command, {}, tmp_path / "log", limit_s=30, show=news.append, poll_s=0.05) == 0
    assert [line for lines in news for line in lines] == ["one", "two"]


def test_its_end_is_seen_at_once(tmp_path: Path) -> None:
    """However long the polls are: a run starts many servers, one after the other."""
    start = time.monotonic()
    assert process.run_to_end(["true"], {}, tmp_path / "log", limit_s=100, poll_s=60) == 0
    assert time.monotonic() - start < 30


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_it_dies_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from sglang_dsv4_graphs.bench.process import run_to_end;"
        f"run_to_end([sys.executable, '-c', 'import os; print(os.getpid(), flush=True); ' + {SLEEPS!r}], {{}},"
        f" Path({str(tmp_path / 'log')!r}), limit_s=100)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not re.match(r"\d+\n", _text(tmp_path / "log")):
            time.sleep(0.05)
        child = int(_text(tmp_path / "log"))
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    assert gone(child)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_termination_signal_unwinds() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        process.raise_on_term()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_end_of_a_log_is_short() -> None:
    log = "\n".join(["first", *["line"] * 38, "x" * 5000, "y" * 300, "last"])
    lines = process.last_lines(log).splitlines()
    assert (len(lines), lines[0], lines[-1]) == (40, "line", "last")
    assert (lines[-3], lines[-2]) == ("x" * 300 + "...", "y" * 300)
