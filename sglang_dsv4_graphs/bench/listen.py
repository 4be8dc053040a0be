"""Orders obeyed inside a serving process: banks on and off, counts, timers, profiles, checks.

A thread waits on a local socket, at no cost to the thread that serves. What must run on the serving thread (profilers
and GPU work belong to it) is put in front of the runner's next extend forward, and taken away after it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sglang_dsv4_graphs.bank.sweep import Startup
from sglang_dsv4_graphs.bench.orders import rank_path
from sglang_dsv4_graphs.bench.patches import Call, Patches
from sglang_dsv4_graphs.bench.step_timers import StepTimers
from sglang_dsv4_graphs.log import logger

Answer = dict[str, Any]
# Runs the forward that it is given, once, and returns what the order asked for.
Work = Callable[[Callable[[], Any]], Any]


class OneForward:
    """Work for the next extend forward; ``result`` waits for what it came to."""

    def __init__(self, runner: Any, work: Work) -> None:
        self._work = work
        self._patches = Patches()
        self._done = threading.Event()
        self._value: Any = None
        self._error: Exception | None = None
        self._patches.wrap(runner, "forward", self._around)

    def _around(self, forward: Call) -> Call:
        def run(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if self._done.is_set() or not batch.forward_mode.is_extend():
                return forward(batch, *args, **kwargs)
            self._patches.undo()
            output: list[Any] = []

            def once() -> Any:
                output.append(forward(batch, *args, **kwargs))
                return output[0]

            try:
                self._value = self._work(once)
            except Exception as e:
                # A check that fails must not end the server's step; whoever asked is told.
                logger.debug("an order failed", exc_info=True)
                self._error = e
            finally:
                self._done.set()
            return output[0] if output else forward(batch, *args, **kwargs)

        return run

    def cancel(self) -> None:
        self._patches.undo()

    def result(self, wait_s: float) -> Any:
        if not self._done.wait(wait_s):
            raise RuntimeError("no extend step has run since the order")
        if self._error is not None:
            raise RuntimeError(f"{type(self._error).__name__}: {self._error}") from self._error
        return self._value


class Listener:
    """The agent of one rank."""

    def __init__(self, path: str, startup: Startup) -> None:
        self._startup = startup
        self._served = startup.served
        self._runner = startup.dummies._runner
        self._timers: StepTimers | None = None
        self._pending: OneForward | None = None
        self._profiler: Any = None
        self._path = rank_path(path, self._served.log.rank)
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self._path)
        self._socket.listen(4)
        threading.Thread(target=self._run, name="dsv4-graphs-bench-agent", daemon=True).start()

    def close(self) -> None:
        """Stop listening; whatever an order put in place is taken away."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        for held in (self._timers, self._pending):
            if held is not None:
                held.cancel()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.sendall(json.dumps(self._obey(connection)).encode() + b"\n")

    def _obey(self, connection: socket.socket) -> Answer:
        try:
            order = json.loads(connection.makefile("rb").readline())
            op = str(order.pop("op"))
            method = getattr(self, "order_" + op.replace("-", "_"), None)
            if method is None:
                known = [n.removeprefix("order_").replace("_", "-") for n in dir(self) if n.startswith("order_")]
                raise ValueError(f"no order {op!r}; there are {', '.join(known)}")
            return method(**order) or {"ok": True}
        except Exception as e:  # the server goes on whatever an order came to
            return {"error": f"{type(e).__name__}: {e}"}

    def order_on(self) -> None:
        """Serve from the banks."""
        if self._served.stand_down is not None:
            raise RuntimeError(f"this server stays eager: {self._served.stand_down}")
        self._served.ready = True

    def order_off(self) -> None:
        """Serve as the engine alone would."""
        self._served.ready = False

    def order_counts(self) -> Answer:
        """Replays by bank and bucket, eager steps by bank and reason."""
        return {
            "replays": [[*key, n] for key, n in self._served.replays.items()],
            "fallbacks": [[*key, n] for key, n in self._served.fallbacks.items()],
        }

    def order_breakdown_start(self) -> None:
        """Time every part of each extend step from now on."""
        if self._timers is not None:
            raise RuntimeError("a breakdown is under way")
        if self._pending is not None:
            self._pending.cancel()
        self._timers = StepTimers(self._startup, self._runner)

    def order_breakdown_stop(self) -> Answer:
        """Take the timers away; what each step came to, and what a timer costs."""
        if self._timers is None:
            raise RuntimeError("no breakdown is under way")
        timers, self._timers = self._timers, None
        timers.cancel()
        return {"steps": timers.steps(), "timer_us": timers.overhead_us()}

    def order_gpu_busy(self) -> None:
        """Take the GPU's own time of the next extend forward."""
        from sglang_dsv4_graphs.bench.step_busy import busy_of

        self._arm(busy_of)

    def order_checks(self, into: str, rows: list[int] | None = None) -> None:
        """After the next extend forward: replay against eager, every bank."""
        from sglang_dsv4_graphs.bench.checks import check_banks

        self._arm(lambda forward: (forward(), check_banks(self._startup, Path(self._own(into)), rows))[1])

    def order_profile_start(self) -> None:
        """Profile the serving thread from the next extend forward on."""
        import cProfile

        self._profiler = cProfile.Profile()

        def begin(forward: Callable[[], Any]) -> None:
            self._profiler.enable()
            forward()

        self._arm(begin)

    def order_profile_stop(self) -> None:
        """End the profile at the next extend forward; ``result`` writes it."""
        if self._profiler is None:
            raise RuntimeError("no profile is under way")
        profiler, self._profiler = self._profiler, None

        def end(forward: Callable[[], Any]) -> Any:
            profiler.disable()
            forward()
            return profiler

        self._arm(end)

    def order_result(self, into: str | None = None, wait_s: float = 20.0) -> Answer:
        """What the work that was put in front of a forward came to; a profile goes ``into`` a file as text."""
        if self._pending is None:
            raise RuntimeError("nothing was ordered")
        value = self._pending.result(wait_s)
        self._pending = None
        if into is None:
            return {"value": value}
        import pstats

        into = self._own(into)
        with open(into, "w") as f:
            stats = pstats.Stats(value, stream=f)
            stats.sort_stats("tottime").print_stats(70)
            stats.sort_stats("cumtime").print_stats(90)
        return {"value": into}

    def _own(self, path: str) -> str:
        """``path`` for rank 0, another one beside it for every other rank: all of them write."""
        rank = self._served.log.rank
        return path if rank == 0 else f"{path}.rank{rank}"

    def _arm(self, work: Work) -> None:
        if self._timers is not None:
            raise RuntimeError("a breakdown is under way: stop it first")
        if self._pending is not None:
            self._pending.cancel()
        self._pending = OneForward(self._runner, work)
