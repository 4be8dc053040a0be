"""One run of prefill_graph.py in a process of its own: the server, its cases, and what is compared.

Every result goes to the report at once: a run that crashes leaves what came before and the last thing it tried.
"""

from __future__ import annotations

import json
import os
import statistics
from pathlib import Path
from typing import Any

from sglang_dsv4_graphs.bench.cases import COLD, tokens
from sglang_dsv4_graphs.bench.compare import chance_together
from sglang_dsv4_graphs.bench.engine import EngineServer, engine_arguments
from sglang_dsv4_graphs.bench.orders import SOCKET_ENV, Agents

# mode -> (prefill graph, banks)
MODES = {"both": (True, True), "graph": (True, False), "eager": (False, False), "banks": (False, True)}
# The engine's own ways come first: what fails there is not ours.
COMPARED = ("eager", "graph", "both")
# Answers of each way where the engine's kernels are not deterministic, and the chance below which ways are not alike.
# A case may be the only one of its kind: with four answers each, 2 of 70 deals lie as far apart as any, and none fails.
REPEATS, UNLIKELY = 6, 0.01
TOP = 20
SMALL = [64, 128, 256, 1024, 2048]
# name, lengths of the requests; 2049 is past the small shapes.
CASES = [("128", [128]), ("100", [100]), ("1", [1]), ("1000", [1000]), ("2048", [2048])]
CASES += [
    ("3 requests", [300, 40, 129]),
    ("8 requests", [200] * 8),
    ("2049", [2049]),
    ("8192", [8192]),
    ("128 again", [128]),
]


def run_name(run: str) -> str:
    """A run as part of a file's name."""
    return run.replace(":", "-")


class Report:
    """Written anew at every step: the last entry of a crashed run is what it tried."""

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self.compared: list[dict[str, Any]] = []
        self.data: dict[str, Any] = {"run": run, "checks": [], "trying": "start"}

    def trying(self, what: str) -> None:
        self.data["trying"] = what
        self.path.write_text(json.dumps(self.data, indent=1))

    def check(self, name: str, passed: bool, **found) -> None:
        self.data["checks"].append({"name": name, "passed": passed, **found})
        self.path.write_text(json.dumps(self.data, indent=1))
        print("PASS" if passed else "FAIL", self.data["run"], name, json.dumps(found)[:300], flush=True)


class Switched:
    """The server, and the agent in it that switches banks and prefill graph."""

    def __init__(self, server: EngineServer, agents: Agents) -> None:
        self.server, self.agents = server, agents

    def switch(self, mode: str) -> None:
        graph, banks = MODES[mode]
        self.agents.order("prefill-graph", on=graph)
        self.agents.order("on" if banks else "off")

    def paths(self) -> dict[str, int]:
        """How often each way has been taken: prefill graphs by shape, banks by bucket, eager steps by reason."""
        counts = self.agents.order("counts")
        found = {f"{bank} {bucket}": n for bank, bucket, n in counts["replays"]}
        found |= {f"fallback {bank}: {reason}": n for bank, reason, n in counts["fallbacks"]}
        return found | self.agents.order("paths")["paths"]


def child(run: str, results: Path, model: str, engine_args: dict[str, Any], *, timed: bool) -> None:
    """Start the server of ``run`` and do all that its report is about."""
    report = Report(results / f"prefill-graph-{run_name(run)}.json", run)
    report.trying("start of the server")
    extra: dict[str, Any] = {"cuda_graph_backend_prefill": "breakable"}
    if run.split(":")[0] == "small":
        extra["cuda_graph_bs_prefill"] = SMALL
    server = EngineServer(engine_arguments(model, **extra | engine_args))
    report.check("server is up", True, seconds=round(server.startup_s, 1))
    if run.endswith(":plain"):
        plain(server, report)
    else:
        checks(run, server, report, timed=timed)
    report.trying("done")
    server.close()


def plain(server: EngineServer, report: Report) -> None:
    """Every case in the engine alone: whether its own prefill graph serves them."""
    for name, lengths in CASES * 2:
        report.trying(name)
        server.flush()
        server.ask([tokens(n, (name, i)) for i, n in enumerate(lengths)])
        report.check(name, True)
    churn(server, report)


def churn(server: EngineServer, report: Report) -> None:
    report.trying("many steps in turn")
    for i in range(40):
        server.ask([tokens(n, (i, j, "churn")) for j, n in enumerate(CASES[i % len(CASES)][1])])
    report.check("40 steps in turn", True)


def checks(run: str, server: EngineServer, report: Report, *, timed: bool) -> None:
    """Every case in every mode, before and after many steps, and which ways the steps took."""
    switched = Switched(server, Agents(os.environ[SOCKET_ENV]))
    report.trying("orders")
    switched.switch("both")  # refused by a server that stands down
    report.check("banks are in", True)
    for name, lengths in CASES:
        compare(switched, report, name, lengths)
    switched.switch("both")
    churn(server, report)
    compare(switched, report, "after churn", [128])
    judge(report)
    found = switched.paths()
    report.check("a prefill graph replayed", any(k.startswith("prefill-graph") for k in found))
    late = "no-tail-bank" in run or any(k.startswith("decoder-replay") for k in found)
    full = "no-full-bank" in run or "default" in run or any(k.startswith("full-layer") for k in found)
    report.check("both banks replayed", late and full, **found)
    if timed:
        times(switched, report)


def times(switched: Switched, report: Report, requests: int = 5) -> None:
    """Milliseconds to the first token by length and mode, in turn and in turned order: every choice in one process."""
    found: dict[str, dict[str, list[float]]] = {}
    report.data["ttft_ms"] = found
    for n in COLD:
        report.trying(f"times at {n}")
        row = found.setdefault(str(n), {mode: [] for mode in MODES})
        for r in range(requests + 1):
            for mode in list(MODES)[:: 1 if r % 2 else -1]:
                switched.switch(mode)
                ms = switched.server.ask([tokens(n, (n, r, mode, "times"))]).ms
                if r:  # the first of each is not measured: what is new to a length was not met yet
                    row[mode].append(ms)
        print("TTFT", n, {mode: round(statistics.median(ms), 1) for mode, ms in row.items()}, flush=True)


def compare(switched: Switched, report: Report, name: str, lengths: list[int]) -> None:
    """First tokens and log-probabilities of one batch in each mode, twice each, from an empty prefix cache.

    Where the engine's graph runs and does not answer twice alike, it and ours answer more often.
    """
    prompts = [tokens(n, (name, i)) for i, n in enumerate(lengths)]
    tops: dict[str, list[Any]] = {}
    taken: dict[str, list[str]] = {}

    def answer(modes: tuple[str, ...]) -> None:
        for mode in modes:
            report.trying(f"{name}, {mode}")
            switched.switch(mode)
            switched.server.flush()
            before = switched.paths()
            tops.setdefault(mode, []).append(switched.server.ask(prompts, top=TOP).top)
            taken[mode] = sorted(k for k, n in switched.paths().items() if n > before.get(k, 0))

    answer(COMPARED * 2)
    own = {mode: distance(*pair) for mode, pair in tops.items()}
    if taken["graph"] and any(own.values()):
        answer(("graph", "both", "both", "graph") * ((REPEATS - 2) // 2))
    report.trying(f"{name}, compared")
    apart = {f"{a} {b}": distance(tops[a][0], tops[b][0]) for a, b in (("both", "graph"), ("both", "eager"))}
    apart["graph eager"] = distance(tops["graph"][0], tops["eager"][0])
    report.compared.append({"name": name, "apart": apart, "own": own, "paths": taken, "tops": tops})
    # Where the engine's ways equal each other and themselves, padded or not, so must ours.
    exact = bool(taken["graph"]) and not any(own.values()) and not apart["graph eager"]
    passed = not exact or max(apart["both graph"], apart["both eager"]) == 0
    report.check(name, passed, exact=exact, apart=apart, own=own, paths=taken)


def judge(report: Report) -> None:
    """The other cases, each kind of them together.

    Deterministic ones: no further from the engine's ways than its graph, which pads too, is from its eager steps.
    Others, where its graph runs: our answers and its own, dealt at random, are as far apart as often as not. The rest
    (banks alone, padded otherwise than anything of the engine's) is told here and judged by ``bench --checks``, which
    runs the engine's layers on the same padded rows.
    """
    same = [r for r in report.compared if not any(r["own"].values())]
    ours = [max(r["apart"]["both graph"], r["apart"]["both eager"]) for r in same]
    engines = [r["apart"]["graph eager"] for r in same]
    passed = max(ours, default=0) <= max(engines, default=0)
    report.check("cases that are deterministic", passed, ours=ours, engine=engines)
    rows = [r for r in report.compared if any(r["own"].values()) and r["paths"]["graph"]]
    chance = chance_together([(r["tops"]["graph"], r["tops"]["both"]) for r in rows], distance)
    names = [r["name"] for r in rows]
    report.check("cases that are not deterministic", chance >= UNLIKELY, chance=chance, cases=names)


def distance(one, other) -> float:
    """The largest difference of a shared top token's log-probability; 99 where the first tokens' tops share none."""
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        x, y = ({t: p for p, t in top} for top in (a, b))
        shared = set(x) & set(y)
        worst = max([worst, *(abs(x[t] - y[t]) for t in shared)] if shared else [99.0])
    return round(worst, 5)
