"""Does a prefill graph of the engine's run beside the banks? One server process per run, PASS and FAIL lines, JSON.

    RESULTS=dir MODELS=dir python3 benchmarks/gpu/prefill_graph.py default small
    RESULTS=dir MODELS=dir python3 benchmarks/gpu/prefill_graph.py small:grow-late small:private-pool

A run is a set of shapes (``default``: the engine's own; ``small``: up to 2048, below the chunk) and a variant that
takes one suspect of docs/notes/prefill-graph.md away: base, grow-late (expected to fail as it once did),
keep-batches, no-release, private-pool, no-tail-bank, no-full-bank. Each is a process of its own, killed after
--limit seconds (the whole ends within --total; kernels that were never compiled on the machine take a minute more,
so the first run may need ``--limit 230`` alone), and writes RESULTS/prefill-graph-<run>.json after every check, so
that a crash of the server leaves what came before and the last thing it tried. Needs what benchmarks/gpu/run.sh needs.

What must be seen: every check passes with ``default`` and with ``small``. Tokens are compared in one process: graph and
banks ("both") against the engine's own ("graph", "eager"), beside how far each differs from itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
SMALL = [128, 256, 1024, 2048]
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


def child(run: str, results: Path, model: str) -> None:
    sys.path.insert(0, str(HERE))
    os.environ["DSV4_GRAPHS_CONTROL"] = control = os.environ["DSV4_PREFILL_GRAPH_CHECK"]
    import serve  # reads DSV4_GRAPHS_CONTROL

    del os.environ["DSV4_GRAPHS_CONTROL"]  # the other check extension must not watch the same file
    report = Report(results / f"prefill-graph-{run.replace(':', '-')}.json", run)
    report.trying("start of the server")
    extra = {"cuda_graph_backend_prefill": "breakable"}
    if run.split(":")[0] == "small":
        extra["cuda_graph_bs_prefill"] = SMALL
    server = serve.Server(model, extra)
    report.check("server is up", True, seconds=round(server.up, 1))
    before = counts(serve, control)
    report.check("banks are in", before["ready"] and before["stand_down"] is None, **before)
    for name, lengths in CASES:
        compare(server, serve, control, report, name, lengths)
    report.trying("many steps in turn")
    for i in range(40):
        serve.order("both")
        server.ask([serve.tokens(n, (i, j, "churn")) for j, n in enumerate(CASES[i % len(CASES)][1])])
    report.check("40 steps in turn", True)
    compare(server, serve, control, report, "after churn", [128])
    found = counts(serve, control)["paths"]
    report.check("a prefill graph replayed", any(k.startswith("prefill-graph") for k in found))
    late = "no-tail-bank" in run or any(k.startswith("decoder-replay") for k in found)
    full = "no-full-bank" in run or "default" in run or any(k.startswith("full-layer") for k in found)
    report.check("both banks replayed", late and full, **found)
    report.trying("done")
    server.engine.shutdown()


def counts(serve, control: str) -> dict:
    serve.order("counts")
    return json.loads(Path(control + ".counts").read_text())


def compare(server, serve, control, report: Report, name: str, lengths: list[int]) -> None:
    """First tokens and log-probabilities of one batch in each mode, twice each, from an empty prefix cache."""
    prompts = [serve.tokens(n, (name, i)) for i, n in enumerate(lengths)]
    tops, taken = {}, {}
    for mode in ("both", "graph", "eager", "both", "graph", "eager"):
        report.trying(f"{name}, {mode}")
        serve.order(mode)
        server.engine.flush_cache()
        before = counts(serve, control)["paths"]
        _, _, top = server.ask(prompts)
        after = counts(serve, control)["paths"]
        taken[mode] = sorted(k for k, n in after.items() if n > before.get(k, 0))
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


def parent(runs: list[str], results: Path, model: str, limit: float, total: float) -> int:
    end, failed = time.monotonic() + total, []
    for run in runs:
        control = results / f"control-{run.replace(':', '-')}"
        control.write_text("done")
        variant = run.partition(":")[2] or "base"
        (results / f"prefill-graph-{run.replace(':', '-')}.json").unlink(missing_ok=True)
        env = (
            os.environ
            | SETTINGS.get(variant, {})
            | {
                "DSV4_PREFILL_GRAPH_CHECK": str(control),
                "DSV4_PREFILL_GRAPH_VARIANT": variant,
                "SGLANG_DSV4_GRAPHS_STRICT": "1",
            }
        )
        seconds = min(limit, end - time.monotonic())
        if seconds < 60:
            print("FAIL", run, "not run: no time left", flush=True)
            failed.append(run)
            continue
        log = results / f"prefill-graph-{run.replace(':', '-')}.log"
        command = [sys.executable, __file__, "--child", run, "--model", model]
        with log.open("w") as out:
            process = subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=out, start_new_session=True, text=True
            )
            print(f"== {run}", flush=True)
            ok = watch(process, out, seconds)
        written = results / f"prefill-graph-{run.replace(':', '-')}.json"
        last = json.loads(written.read_text()) if written.exists() else {"trying": "imports", "checks": []}
        if not ok or last["trying"] != "done":
            print("FAIL", run, f"ended while trying: {last['trying']}", flush=True)
        if not ok or last["trying"] != "done" or not all(c["passed"] for c in last["checks"]):
            failed.append(run)
            for line in log.read_text(errors="replace").splitlines():
                if "dsv4-graphs:" in line or "Error" in line or "illegal" in line:
                    print("   ", line[:300], flush=True)
    print("PASS all" if not failed else f"FAIL {', '.join(failed)}", flush=True)
    return bool(failed)


def watch(process: subprocess.Popen, out, seconds: float) -> bool:
    """Hand the child's PASS and FAIL lines on until it ends; kill its own session when time is up."""

    def hand_on() -> None:
        for line in process.stdout:
            (print(line, end="", flush=True) if line.startswith(("PASS", "FAIL")) else out.write(line))

    thread = threading.Thread(target=hand_on, daemon=True)
    thread.start()
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        code = -1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the child's session: its scheduler outlives a crash
    thread.join(timeout=5)
    return code == 0


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("runs", nargs="*", default=["default", "small"])
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
    return parent(args.runs, results, args.model, args.limit, args.total)


if __name__ == "__main__":
    sys.exit(main())
