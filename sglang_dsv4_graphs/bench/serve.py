"""One server of the benchmark: starts the engine, asks its cases, writes what it measured after each.

Run as ``python -m sglang_dsv4_graphs.bench.serve JOB.json`` by the command; whether the plugin installs is the
environment's affair. The result file is rewritten after every case: a process that is killed keeps what it has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_dsv4_graphs.bench.breakdown import reduce_steps
from sglang_dsv4_graphs.bench.busy import gpu_busy_ms
from sglang_dsv4_graphs.bench.cases import PREFIX, Case, cases_of, prefix_prompt, tokens
from sglang_dsv4_graphs.bench.compare import compared
from sglang_dsv4_graphs.bench.engine import Answer, EngineServer
from sglang_dsv4_graphs.bench.job import CHECKS, Job
from sglang_dsv4_graphs.bench.memory import used_gib
from sglang_dsv4_graphs.bench.orders import Agents
from sglang_dsv4_graphs.bench.profiles import FIRST_TOKENS, beside, profile_one, profile_steps
from sglang_dsv4_graphs.bench.results import write_json

FIRST_REQUESTS = 8
# What a line of progress starts with in this process's output.
NEWS = "dsv4-graphs-bench "


def say(text: str) -> None:
    print(NEWS + text, flush=True)


class Session:
    """A server, its job, and the result as far as it has come."""

    def __init__(self, job: Job, server: EngineServer) -> None:
        self.job, self.server = job, server
        self.cases = cases_of(job.groups)
        ranks = int(job.engine_args.get("tp_size", 1))
        self.agents = None if job.agent is None else Agents(job.agent, ranks)
        self.result: dict[str, Any] = {
            "variant": job.variant,
            "round": job.round,
            "mode": "+".join(job.modes),
            "engine": server.version,
            "engine_args": job.engine_args,
            "startup_s": round(server.startup_s, 2),
            "complete": False,
        }
        self.save()

    def save(self) -> None:
        write_json(Path(self.job.result), self.result)

    def add(self, key: str, row: dict[str, Any]) -> None:
        self.result.setdefault(key, []).append(row)
        self.save()

    def order(self, op: str, **values: Any) -> dict[str, Any]:
        assert self.agents is not None, "this mode needs an agent"
        return self.agents.order(op, **values)

    def prepare(self) -> None:
        """What every mode begins with: memory after startup, the first requests, then what need not be measured."""
        self.result["gib_after_startup"] = used_gib()
        if self.job.profile:
            profile_one(self, "first", beside(self.job.profile, "first"))
        times = [self.server.ask([tokens(FIRST_TOKENS, ("first", i))]).ms for i in range(FIRST_REQUESTS)]
        if self.job.profile:
            # The first was profiled, which is no time of a first request, and these came after it.
            profile_one(self, "later", beside(self.job.profile, "later"))
            say(f"up in {self.server.startup_s:.1f} s, first request profiled")
        else:
            self.result["first_requests_ms"] = times
            say(f"up in {self.server.startup_s:.1f} s, first request {times[0]:.1f} ms")
        self.save()
        self.warm("warm")

    def warm(self, seed: str) -> None:
        """Each kind of request once, unmeasured; the seed must be new in this process."""
        if self.job.warm:
            # A full chunk compiles kernels, and the engine captures its own tail graphs behind one.
            self.server.ask([tokens(self.job.warm, seed)])
            for case in self.cases:
                self.server.ask(case.prompts(seed))

    def fill_cache(self) -> None:
        """Put the prefix that hits share into the radix cache."""
        if any(case.prefix for case in self.cases):
            self.server.ask([prefix_prompt(PREFIX)])

    def take_busy(self) -> None:
        """GPU time of one step per length asked for, and per breakdown; takes torch's profiler into the process."""
        for row in self.result.get("breakdown", ()):
            self.order("gpu-busy")
            self.server.ask([tokens(row["tokens"], ("busy after breakdown", row["tokens"]))])
            row["gpu_busy_us"] = self.order("result", answer_s=120)["value"]
            self.save()
        for n in self.job.busy:
            prompt = tokens(n, ("busy", n))
            busy = gpu_busy_ms(self.server.engine, lambda prompt=prompt: self.server.ask([prompt]))  # type: ignore[misc]
            self.result.setdefault("gpu_busy_ms", {})[f"cold {n}"] = busy
            self.save()


def measure(session: Session) -> None:
    """Time to first token of every case, as this server is."""
    job, server = session.job, session.server
    session.fill_cache()
    for case in session.cases:
        answers = [server.ask(case.prompts(r)) for r in range(job.requests)]
        times = [answer.ms for answer in answers]
        session.add("cases", _row(case) | {"ttft_ms": times, "cached": [min(a.cached) for a in answers]})
        say(f"{case.name}: {sorted(times)[len(times) // 2]:.1f} ms")


def toggle(session: Session) -> None:
    """Every case with the banks on and off in turn, then outputs compared, in this one process."""
    job, server = session.job, session.server
    session.fill_cache()
    session.order("off")
    session.warm("warm, banks off")
    for case in session.cases:
        times: dict[str, list[float]] = {"on": [], "off": []}
        cached = []
        for r, mode in _alternating(job.requests):
            session.order(mode)
            answer = server.ask(case.prompts((r, mode)))
            times[mode].append(answer.ms)
            cached.append(min(answer.cached))
        session.add("cases", _row(case) | {"modes": times, "cached": cached})
        say(f"{case.name}: " + ", ".join(f"{mode} {sorted(ms)[len(ms) // 2]:.1f} ms" for mode, ms in times.items()))
    session.result["counts"] = session.order("counts")
    if job.decode:
        for case in cases_of(job.compare):
            session.add("decode", compare_tokens(session, case))
    session.order("on")
    if job.profile:
        profile_steps(session, job.profile)


def _alternating(requests: int) -> Iterator[tuple[int, str]]:
    for r in range(requests):
        for mode in ("on", "off") if r % 2 == 0 else ("off", "on"):
            yield r, mode


def _row(case: Case) -> dict[str, Any]:
    return {
        "case": case.name,
        "group": case.group,
        "tokens": case.tokens,
        "requests": case.requests,
        "prefix": case.prefix,
    }


def compare_tokens(session: Session, case: Case) -> dict[str, Any]:
    """Tokens decoded after the same prompts, eager and replayed in turn, several times each."""
    answers: dict[str, list[Answer]] = {"on": [], "off": []}
    for _, mode in _alternating(session.job.repeats):
        # Each run prefills: a cached prompt would compare what the run before wrote.
        session.server.flush()
        if case.prefix:
            session.order("off")
            session.server.ask([prefix_prompt(case.prefix)])
        session.order(mode)
        answers[mode].append(session.server.ask(case.prompts("decode"), session.job.decode, top=5))
    eager, replayed = ([(answer.tokens, answer.top) for answer in answers[mode]] for mode in ("off", "on"))
    row = {"case": case.name} | compared(eager, replayed)
    # Equal tokens show nothing of a prefill that a cache answered.
    row["cached"] = {name: [a.cached for a in answers[mode]] for name, mode in (("eager", "off"), ("replayed", "on"))}
    equal, own = row["replayed equals eager"], row["eager equals itself"]
    say(f"{case.name}: {equal} of {row['tokens']} tokens equal, eager with itself {own}, chance {row['chance']}")
    return row


def breakdown(session: Session) -> None:
    """Where the host time of replayed steps goes, per prompt length."""
    session.order("on")
    for n in session.job.lengths:
        row = timed_steps(session, n)
        session.add("breakdown", row)
        say(f"breakdown of {n} tokens: {len(row['steps'])} steps")


def timed_steps(session: Session, n: int) -> dict[str, Any]:
    """The breakdown of prompts of ``n`` tokens, and the client's times without timers."""
    job, server = session.job, session.server
    server.ask([tokens(n, ("warm", n))])
    plain = [server.ask([tokens(n, ("plain", n, i))]).ms for i in range(job.requests)]
    session.order("breakdown-start")
    times = [server.ask([tokens(n, ("breakdown", n, i))]).ms for i in range(job.requests)]
    taken = session.order("breakdown-stop")
    row = {"tokens": n, "ttft_ms": times, "ttft_without_timers_ms": plain} | taken
    row["parts"] = reduce_steps(row)
    if len(taken["steps"]) != job.requests:
        row["note"] = f"{len(taken['steps'])} steps for {job.requests} requests: no request path"
    return row


def checks(session: Session) -> None:
    """Replay against eager on the same padded rows inside the server, every bucket of every bank.

    The agent writes what it has after every comparison, into a file beside the result.
    """
    into = Path(session.job.result).with_suffix(".checks.json")
    session.order("checks", into=str(into))
    session.server.ask([tokens(FIRST_TOKENS, "the step after which it checks")])
    session.result["checks"] = session.order("result", answer_s=120)["value"]
    # The checks wrote over slots of cached prompts.
    session.server.flush()


TIMED = {"measure": measure, "toggle": toggle, "breakdown": breakdown}


def run_modes(session: Session) -> None:
    """What is timed, then the GPU's own time, then checks.

    Once torch's profiler has run, launches cost more for the rest of the process; and checks write over cached prompts.
    """
    modes = session.job.modes
    for mode in (m for m in TIMED if m in modes):
        TIMED[mode](session)
    session.take_busy()
    if CHECKS in modes:
        checks(session)


def main(arguments: list[str]) -> int:
    (path,) = arguments
    job = Job.read(Path(path))
    server = EngineServer(job.engine_args)
    try:
        session = Session(job, server)
        session.prepare()
        run_modes(session)
        session.result["complete"] = True
        session.save()
    finally:
        server.close()
    return 0


# The engine starts its processes by importing this module again.
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
