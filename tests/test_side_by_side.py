"""Runs beside each other are told apart, and none that fails goes unnoticed."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "side_by_side.py"


def command(*lines: str) -> str:
    return shlex.join([sys.executable, "-c", "\n".join(lines)])


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], text=True, capture_output=True, timeout=60)


def wait_for(path: Path) -> str:
    return f"import os, time\nwhile not os.path.exists({str(path)!r}): time.sleep(0.01)"


def test_they_run_at_the_same_time_and_print_apart(tmp_path: Path) -> None:
    """Each waits for the other, in the middle of what it prints."""
    here, there = tmp_path / "here", tmp_path / "there"
    one = command("print('one a', flush=True)", f"open({str(here)!r}, 'w')", wait_for(there), "print('one b')")
    other = command(wait_for(here), "print('other a', flush=True)", f"open({str(there)!r}, 'w')", "print('other b')")
    done = run("first", one, "second", other)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.sub(r"\d+ s", "N s", done.stdout).splitlines() == [
        "== first",
        "== second: at the same time, shown when all have ended",
        "one a",
        "one b",
        "== second",
        "other a",
        "other b",
        "== first: passed (N s)",
        "== second: passed (N s)",
    ]


@pytest.mark.parametrize("codes", [(0, 5), (3, 0), (3, 5)])
def test_whichever_fails_all_does_and_the_others_go_on(codes: tuple[int, int]) -> None:
    late = [
        f"import sys, time; time.sleep({0.0 if code else 0.3}); print('at the end'); sys.exit({code})" for code in codes
    ]
    done = run("first", command(late[0]), "second", command(late[1]))
    assert done.returncode == 1
    assert done.stdout.count("at the end") == 2
    for title, code in zip(("first", "second"), codes, strict=True):
        how = f"FAILED, exit status {code}" if code else "passed"
        assert re.search(rf"^== {title}: {how} \(\d s\)$", done.stdout, flags=re.MULTILINE)


def test_what_was_printed_until_it_is_ended_is_shown_and_nothing_goes_on(tmp_path: Path) -> None:
    told = tmp_path / "told"
    lines = (f"import time; print('up', flush=True); open({str(told)!r}, 'w')", "time.sleep(60)")
    script = [sys.executable, str(SCRIPT), "first", command("import time; time.sleep(60)"), "second", command(*lines)]
    start = time.monotonic()
    process = subprocess.Popen(script, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not told.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    # Ends only once nobody holds the pipes.
    out, _ = process.communicate(timeout=30)
    assert time.monotonic() - start < 30
    assert process.returncode == 130
    assert "== second\nup\n" in out


@pytest.mark.parametrize("arguments", [[], ["a title alone"]])
def test_without_pairs_it_says_how_it_is_called(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "TITLE COMMAND" in done.stderr
