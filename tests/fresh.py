"""Fresh processes for tests of what happens at import, at a price that allows many of them.

Importing the engine takes seconds. So one process imports as much of it as an engine process has when it runs
its plugins, nothing of ours and not the model module, and is forked for every test: each child is such a process.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FAILED = 70
# A process that takes longer is ended.
LIMIT_S = 240


@dataclass(frozen=True)
class Finished:
    """An ended process: exit code, everything it printed, and what the function returned (through JSON)."""

    code: int
    output: str
    value: Any

    @property
    def lines(self) -> list[str]:
        """Its lines of this plugin's log."""
        return [line for line in self.output.splitlines() if line.startswith("dsv4-graphs:")]


def in_fresh_process(
    function: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | None = None,
    path: Iterable[Path] = (),
    code: int = 0,
) -> Finished:
    """Call a module-level ``function`` with JSON-able ``args`` in a process that never imported the plugin.

    ``env`` is added to the environment, ``path`` put in front of ``sys.path``. Fails unless it exits with ``code``.
    """
    (finished,) = in_fresh_processes(function, [args], env=env, path=path, code=code)
    return finished


def in_fresh_processes(
    function: Callable[..., Any],
    arguments: Sequence[Sequence[Any]],
    *,
    env: Mapping[str, str] | None = None,
    path: Iterable[Path] = (),
    code: int = 0,
) -> list[Finished]:
    """As ``in_fresh_process``, in one process for each of ``arguments``, all at the same time."""
    request = {
        "module": function.__module__,
        "function": function.__name__,
        "env": dict(env or {}),
        "path": [str(p) for p in path],
    }
    ended = _server().ask([{**request, "args": list(args)} for args in arguments])
    for finished in ended:
        assert finished.code == code, f"exit code {finished.code}:\n{finished.output}"
    return ended


class _Server:
    def __init__(self) -> None:
        start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.fresh import serve; serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self._process.kill)

    def ask(self, requests: list[dict[str, Any]]) -> list[Finished]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(requests) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("reply "):  # importing the engine prints, too
                return [Finished(**reply) for reply in json.loads(line.removeprefix("reply "))]
        raise AssertionError("the process that forks fresh ones has ended")


@cache
def _server() -> _Server:
    return _Server()


def serve() -> None:
    """Fork and answer until standard input ends."""
    import sglang.srt.models.deepseek_v2
    import sglang.srt.plugins

    assert sglang.srt.models.deepseek_v2  # most of what the model module imports
    assert "sglang_dsv4_graphs" not in sys.modules
    assert "sglang.srt.models.deepseek_v4" not in sys.modules
    # Children share this memory until somebody writes to it, which a garbage collection would do.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        started = [_fork(request) for request in json.loads(line)]
        print("reply " + json.dumps([_wait(*child) for child in started]), flush=True)


def _fork(request: dict[str, Any]) -> tuple[int, Path]:
    """Start a child on ``request``; its process id and the folder of what it leaves."""
    folder = Path(tempfile.mkdtemp(prefix="fresh_"))
    pid = os.fork()
    if pid == 0:
        # Nothing may be open here that an exit of the child would close or clean.
        _child(request, folder / "output", folder / "value")
    return pid, folder


def _wait(pid: int, folder: Path) -> dict[str, Any]:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    output, value = folder / "output", folder / "value"
    found = json.loads(value.read_text()) if value.exists() else None
    reply = {"code": code, "output": output.read_text(errors="replace"), "value": found}
    shutil.rmtree(folder)
    return reply


def _child(request: dict[str, Any], output: Path, value: Path) -> None:
    """Run the request and end. ``SystemExit`` is left to the interpreter, as in any process."""
    signal.alarm(LIMIT_S)
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    os.environ.update(request["env"])
    sys.path[:0] = request["path"]
    try:
        function = getattr(importlib.import_module(request["module"]), request["function"])
        value.write_text(json.dumps(function(*request["args"])))
    except Exception:
        traceback.print_exc()
        _end(FAILED)
    _end(0)


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
