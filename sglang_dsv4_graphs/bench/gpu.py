"""The benchmark on a machine with engine and GPU: one server process after the other, results after each.

A process cannot show two variants fairly: what a server captured, compiled or grew for one is there for the other. So
each variant has processes of its own, in rounds that alternate in order. ``--toggle`` is the other way round: ratios
and outputs inside one process, in which kernels and clocks are the same.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sglang_dsv4_graphs.bench import serve, throughput
from sglang_dsv4_graphs.bench.engine import engine_arguments
from sglang_dsv4_graphs.bench.errors import BenchError
from sglang_dsv4_graphs.bench.job import Job
from sglang_dsv4_graphs.bench.memory import machine
from sglang_dsv4_graphs.bench.orders import SOCKET_ENV, new_socket_path
from sglang_dsv4_graphs.bench.process import how_it_ended, last_lines, run_to_end
from sglang_dsv4_graphs.bench.results import (
    SUMMARY_FILE,
    Result,
    captured_lines,
    eager_reason,
    read_json,
    summarize,
    write_json,
)
from sglang_dsv4_graphs.bench.variants import Variant, schedule
from sglang_dsv4_graphs.log import PREFIX
from sglang_dsv4_graphs.version import __version__

# Of a process that only compiles kernels: each shape once.
WARM_ROUND = 0


@dataclass(frozen=True)
class Plan:
    """What was asked for on the command line, checked."""

    out: Path
    model: str
    modes: tuple[str, ...]
    variants: Sequence[Variant]
    rounds: int
    groups: list[str]
    requests: int
    engine_args: dict[str, Any]
    limit_s: float
    warm_process: bool = True
    warm_tokens: int = 8192
    busy: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    decode: int = 0
    repeats: int = 2
    compare: tuple[str, ...] = ()
    load: throughput.Load | None = None
    profile: bool = False


class Bench:
    """A benchmark under way: ``bench.json`` holds all there is, at any time."""

    def __init__(self, plan: Plan, command: Sequence[str], say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self.record: Result = {
            "plugin": __version__,
            "command": list(command),
            "mode": "+".join(plan.modes),
            "machine": machine(),
            "model": plan.model,
            "state": "running",
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "summary": {},
            "processes": [],
        }
        self.problems: list[str] = []

    def save(self) -> None:
        measured = [p for p in self.record["processes"] if p["round"] != WARM_ROUND]
        self.record["summary"] = summarize(measured)
        write_json(self._plan.out / SUMMARY_FILE, self.record)

    def run(self) -> Result:
        """Run every process; one that fails is noted and the others still run."""
        plan = self._plan
        self.save()
        if "measure" in plan.modes:
            if plan.warm_process and plan.groups:
                self._process(plan.variants[0], WARM_ROUND)
            for number, variant in schedule(plan.variants, plan.rounds if plan.groups or plan.busy else 0):
                self._process(variant, number)
            self._throughput()
        else:
            for number in range(1, plan.rounds + 1):
                self._process(plan.variants[0], number)
        self.record["state"] = "; ".join(self.problems) or "complete"
        self.save()
        return self.record

    def _job(self, variant: Variant, number: int, result: Path, agent: str | None) -> Job:
        plan = self._plan
        job = Job(
            variant=variant.name,
            round=number,
            modes=list(plan.modes),
            engine_args=self._engine_args(variant),
            result=str(result),
            groups=plan.groups,
            requests=plan.requests,
            warm=plan.warm_tokens,
            busy=list(plan.busy),
            lengths=list(plan.lengths),
            decode=plan.decode,
            repeats=plan.repeats,
            compare=list(plan.compare),
            agent=agent,
            profile=str(plan.out / f"profile-{number}.txt") if plan.profile else None,
        )
        return replace(job, requests=1, busy=[]) if number == WARM_ROUND else job

    def _engine_args(self, variant: Variant) -> dict[str, Any]:
        return engine_arguments(self._plan.model, **(variant.engine_args | self._plan.engine_args))

    def _process(self, variant: Variant, number: int) -> None:
        plan = self._plan
        mode = self.record["mode"]
        name = f"{variant.name if mode == 'measure' else mode}-{number}"
        result, log, order = (plan.out / f"{name}{suffix}" for suffix in (".json", ".log", ".job"))
        result.unlink(missing_ok=True)
        agent = None if mode == "measure" else new_socket_path()
        environment = variant.environment | ({} if agent is None else {SOCKET_ENV: agent})
        self._job(variant, number, result, agent).write(order)
        note = " (unmeasured: compiles kernels)" if number == WARM_ROUND else ""
        self._say(f"{name}{note}: " + " ".join(f"{k}={v}" for k, v in variant.environment.items()))
        slot = len(self.record["processes"])
        self.record["processes"].append({"variant": variant.name, "round": number, "mode": mode})

        def show(lines: list[str]) -> None:
            for line in lines:
                for marker in (serve.NEWS, PREFIX):
                    if marker in line:
                        self._say("  " + line[line.index(marker) :].removeprefix(serve.NEWS))
                        break
            new = read_json(result)
            if new is not None:
                self.record["processes"][slot] = new
                self.save()

        command = [sys.executable, "-m", serve.__name__, str(order)]
        try:
            code = run_to_end(command, environment, log, limit_s=plan.limit_s, show=show)
        finally:
            if agent is not None:
                shutil.rmtree(Path(agent).parent, ignore_errors=True)
        self._finish(slot, name, variant, log.read_text(errors="replace"), code, result)

    def _finish(self, slot: int, name: str, variant: Variant, log: str, code: int | None, result: Path) -> None:
        """Add what the log tells, and what went wrong."""
        process = self.record["processes"][slot]
        process["captured"] = captured_lines(log)
        problem = None
        if code != 0 or not process.get("complete"):
            problem = f"{how_it_ended(code, self._plan.limit_s)}; its log ends:\n{last_lines(log)}"
        elif variant.plugin and not process["captured"]:
            problem = f"the plugin captured nothing: {eager_reason(log) or 'its log does not say why'}"
        elif not variant.plugin and process["captured"]:
            problem = f"{variant.environment} and the plugin captured all the same"
        if problem is not None:
            process["problem"] = problem
            self.problems.append(f"{name} {problem}")
            self._say(f"  {name}: {problem}")
        write_json(result, process)
        self.save()

    def _throughput(self) -> None:
        plan = self._plan
        if plan.load is None:
            return
        throughput.write_tokenizer(plan.out / "tokenizer", vocabulary_of(plan.model))
        for variant in plan.variants:
            self._say(f"throughput, {variant.name}: {plan.load}")
            try:
                row = throughput.measure(variant, self._engine_args(variant), plan.load, plan.out, plan.limit_s)
            except BenchError as e:
                self.problems.append(f"throughput of {variant.name}: {e}")
                self._say(f"  {e}")
                continue
            self.record.setdefault("throughput", []).append(row | {"load": asdict(plan.load)})
            self.save()


def vocabulary_of(model: str) -> int:
    """Token ids of the model, from its ``config.json``.

    Raises:
        BenchError: it does not say.
    """
    config = read_json(Path(model) / "config.json") or {}
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise BenchError(f"{os.path.join(model, 'config.json')} has no vocab_size: --throughput needs it")
    return size


def problems_line(record: Result) -> str | None:
    """What did not work, or None."""
    return None if record["state"] == "complete" else f"bench: not complete: {record['state']}"
