"""Does a prefill graph of the engine's run beside the banks? One server process per run, PASS and FAIL lines, JSON.

    RESULTS=dir MODELS=dir python3 benchmarks/gpu/prefill_graph.py default small
    RESULTS=dir MODELS=dir python3 benchmarks/gpu/prefill_graph.py small:grow-late small:private-pool

A run is a set of shapes (``default``: the engine's own; ``small``: up to 2048, below the chunk) and a variant that
takes one suspect of docs/notes/prefill-graph.md away: base, grow-late (expected to fail as it once did),
keep-batches, no-release, private-pool, no-tail-bank, no-full-bank. Each is a process of its own, killed after
--limit seconds (the whole ends within --total; kernels that were never compiled on the machine take a minute more,
so the first run may need ``--limit 230`` alone), and writes RESULTS/prefill-graph-<run>.json after every check, so
that a crash of the server leaves what came before and the last thing it tried. MODELS holds a config folder ``rank``.
Needs the engine, one GPU with nothing else on it, and this project, installed or as a checkout on PYTHONPATH; weights
that carry signal, if the model is to have any, come with the engine's environment.

Last, times to the first token of every choice in turn: eager, the engine's graph, banks, both.

What must be seen: every check passes with ``default`` and with ``small``. Tokens are compared in one process: graph and
banks ("both") against the engine's own ("graph", "eager"), beside how far each differs from itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from sglang_dsv4_graphs.bench.cases import COLD, tokens
from sglang_dsv4_graphs.bench.engine import EngineServer, engine_arguments
from sglang_dsv4_graphs.bench.orders import SOCKET_ENV, Agents, new_socket_path
from sglang_dsv4_graphs.bench.process import how_it_ended, raise_on_term, run_to_end

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VARIANTS = ("base", "grow-late", "keep-batches", "no-release", "private-pool", "no-tail-bank", "no-full-bank")
# mode -> (prefill graph, banks)
MODES = {"both": (True, True), "graph": (True, False), "eager": (False, False), "banks": (False, True)}
COMPARED = ("both", "graph", "eager")
SMALL = [64, 128, 256, 1024, 2048]
SETTINGS = {
    "private-pool": {"SGLANG_DSV4_EAGER_GRAPH_GLOBAL_POOL": "0"},
    "no-tail-bank": {"SGLANG_DSV4_DECODER_REPLAY_GRAPH_MAX_ROWS": "0"},
    "no-full-bank": {"SGLANG_DSV4_FULL_LAYER_GRAPH_MAX_TOKENS": "0"},
}
# name, lengths of the requests; 2049 is past the small shapes.
CASES = [("128", [128]), ("100", [100]), ("1", [1]), ("1000", [1000]), ("2048", [2048])]
CASES += [
    ("3 requests", [300, 40, 129]),
    ("8 requests", [200] * 8),
    ("2049", [2049]),
    ("8192", [8192]),
    ("128 again", [128]),
]


class Report:
    """Written anew at every step: the last entry of a crashed run is what it tried."""

    def __init__(self, path: Path, run: str) -> None:
        self.path, self.data = path, {"run": run, "checks": [], "trying": "start"}

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


def child(run: str, results: Path, model: str) -> None:
    report = Report(results / f"prefill-graph-{file_name(run)}.json", run)
    report.trying("start of the server")
    extra = {"cuda_graph_backend_prefill": "breakable"}
    if run.split(":")[0] == "small":
        extra["cuda_graph_bs_prefill"] = SMALL
    server = EngineServer(engine_arguments(model, **extra))
    report.check("server is up", True, seconds=round(server.startup_s, 1))
    switched = Switched(server, Agents(os.environ[SOCKET_ENV]))
    report.trying("orders")
    switched.switch("both")  # refused by a server that stands down
    report.check("banks are in", True)
    for name, lengths in CASES:
        compare(switched, report, name, lengths)
    report.trying("many steps in turn")
    switched.switch("both")
    for i in range(40):
        server.ask([tokens(n, (i, j, "churn")) for j, n in enumerate(CASES[i % len(CASES)][1])])
    report.check("40 steps in turn", True)
    compare(switched, report, "after churn", [128])
    found = switched.paths()
    report.check("a prefill graph replayed", any(k.startswith("prefill-graph") for k in found))
    late = "no-tail-bank" in run or any(k.startswith("decoder-replay") for k in found)
    full = "no-full-bank" in run or "default" in run or any(k.startswith("full-layer") for k in found)
    report.check("both banks replayed", late and full, **found)
    report.trying("times")
    report.data["ttft_ms"] = times(switched)
    report.trying("done")
    server.close()


def times(switched: Switched, requests: int = 5) -> dict[str, dict[str, list[float]]]:
    """Milliseconds to the first token by length and mode, in turn and in turned order: every choice in one process."""
    found: dict[str, dict[str, list[float]]] = {}
    for n in COLD:
        row = found.setdefault(str(n), {mode: [] for mode in MODES})
        for r in range(requests + 1):
            for mode in list(MODES)[:: 1 if r % 2 else -1]:
                switched.switch(mode)
                ms = switched.server.ask([tokens(n, (n, r, mode, "times"))]).ms
                if r:  # the first of each is not measured: what is new to a length was not met yet
                    row[mode].append(ms)
        print("TTFT", n, {mode: round(statistics.median(ms), 1) for mode, ms in row.items()}, flush=True)
    return found


def compare(switched: Switched, report: Report, name: str, lengths: list[int]) -> None:
    """First tokens and log-probabilities of one batch in each mode, twice each, from an empty prefix cache."""
    prompts = [tokens(n, (name, i)) for i, n in enumerate(lengths)]
    tops, taken = {}, {}
    for mode in COMPARED * 2:
        report.trying(f"{name}, {mode}")
        switched.switch(mode)
        switched.server.flush()
        before = switched.paths()
        top = switched.server.ask(prompts, top=5).top
        taken[mode] = sorted(k for k, n in switched.paths().items() if n > before.get(k, 0))
        tops.setdefault(mode, []).append(top)
    report.trying(f"{name}, compared")
    apart = {f"{a} {b}": distance(tops[a][0], tops[b][0]) for a, b in (("both", "graph"), ("both", "eager"))}
    own = {mode: distance(*pair) for mode, pair in tops.items()}
    apart["graph eager"] = distance(tops["graph"][0], tops["eager"][0])
    # A replay may differ from eager no more than the engine's own ways differ among each other and from themselves.
    allowed = max(*own.values(), apart["graph eager"], 0.02)
    passed = max(apart["both graph"], apart["both eager"]) <= allowed
    report.check(name, passed, apart=apart, own=own, allowed=allowed, paths=taken)


def distance(one, other) -> float:
    """The largest difference of a shared top token's log-probability; 99 where the first tokens' tops share none."""
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        x, y = ({t: p for p, t in top} for top in (a, b))
        shared = set(x) & set(y)
        worst = max([worst, *(abs(x[t] - y[t]) for t in shared)] if shared else [99.0])
    return round(worst, 5)


def file_name(run: str) -> str:
    return run.replace(":", "-")


def check_path(folder: Path) -> str:
    """PYTHONPATH of a server: this checkout, the check extension, and what the plugin's metadata would declare.

    A checkout on the path has no entry points unless it is installed: without them the engine finds no plugin.
    """
    try:
        installed = {e.value for e in distribution("sglang-dsv4-graphs").entry_points}
    except PackageNotFoundError:
        installed = set()
    if "sglang_dsv4_graphs.bench.agent" not in installed:
        info = folder / "sglang_dsv4_graphs-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-dsv4-graphs\nVersion: 0\n")
        groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
        lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
    own = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return os.pathsep.join([str(folder), str(HERE / "checks"), str(ROOT), *own])


def parent(runs: list[str], results: Path, model: str, limit: float, total: float) -> int:
    end, failed = time.monotonic() + total, []
    for run in runs:
        seconds = min(limit, end - time.monotonic())
        if seconds < 60:
            print("FAIL", run, "not run: no time left", flush=True)
        if seconds < 60 or not one(run, results, model, seconds):
            failed.append(run)
    print("PASS all" if not failed else f"FAIL {', '.join(failed)}", flush=True)
    return int(bool(failed))


def one(run: str, results: Path, model: str, seconds: float) -> bool:
    """One run in a process of its own: its PASS and FAIL lines as they come, and why it ended if it did not pass."""
    variant = run.partition(":")[2] or "base"
    written = results / f"prefill-graph-{file_name(run)}.json"
    written.unlink(missing_ok=True)
    agent = new_socket_path()
    folder = Path(agent).parent
    environment = SETTINGS.get(variant, {}) | {
        SOCKET_ENV: agent,
        "DSV4_PREFILL_GRAPH_VARIANT": variant,
        "SGLANG_DSV4_GRAPHS": "1",
        "SGLANG_DSV4_GRAPHS_STRICT": "1",
        "PYTHONPATH": check_path(folder),
    }
    log = results / f"prefill-graph-{file_name(run)}.log"
    print(f"== {run}", flush=True)
    try:
        command = [sys.executable, __file__, "--child", run, "--model", model]
        code = run_to_end(command, environment, log, limit_s=seconds, show=show)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    last = json.loads(written.read_text()) if written.exists() else {"trying": "imports", "checks": []}
    ended = code == 0 and last["trying"] == "done"
    if not ended:
        print("FAIL", run, f"{how_it_ended(code, seconds)} while trying: {last['trying']}", flush=True)
    if ended and all(c["passed"] for c in last["checks"]):
        return True
    for line in log.read_text(errors="replace").splitlines():
        if "dsv4-graphs:" in line or "Error" in line or "illegal" in line:
            print("   ", line[:300], flush=True)
    return False


def show(lines: list[str]) -> None:
    for line in lines:
        if line.startswith(("PASS ", "FAIL ", "TTFT ")):
            print(line, flush=True)


def known(run: str) -> str:
    shapes, _, variant = run.partition(":")
    if shapes not in ("default", "small") or (variant or "base") not in VARIANTS:
        raise argparse.ArgumentTypeError(f"{run!r}: default or small, then perhaps a colon and {', '.join(VARIANTS)}")
    return run


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("runs", nargs="*", type=known, default=["default", "small"])
    ap.add_argument("--model", default=os.path.join(os.environ.get("MODELS", "."), "rank"))
    ap.add_argument("--limit", type=float, default=110, help="seconds of one run")
    ap.add_argument("--total", type=float, default=235, help="seconds of all")
    ap.add_argument("--child", help=argparse.SUPPRESS)
    args = ap.parse_args()
    results = Path(os.environ["RESULTS"])
    results.mkdir(parents=True, exist_ok=True)
    if args.child:
        child(args.child, results, args.model)
        return 0
    raise_on_term()
    return parent(args.runs, results, args.model, args.limit, args.total)


if __name__ == "__main__":
    sys.exit(main())
