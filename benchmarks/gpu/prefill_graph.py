"""Does a prefill graph of the engine's run beside the banks? One server process per run, PASS and FAIL lines, JSON.

    RESULTS=dir MODELS=dir python3 benchmarks/gpu/prefill_graph.py default small
    RESULTS=dir MODELS=dir python3 benchmarks/gpu/prefill_graph.py small:grow-late small:private-pool

A run is a set of shapes (``default``: the engine's own; ``small``: up to 2048, below the chunk) and a variant:
``base`` is the server as it is, ``plain`` the engine without the plugin; the others each change one thing that was a
suspect once (docs/notes/prefill-graph.md): grow-late, keep-batches, no-release, private-pool, no-tail-bank,
no-full-bank. Each is a process of its own, killed after --limit seconds (the whole ends within --total; kernels that
were never compiled on the machine take a minute more, so the first run may need ``--limit 230`` alone), and writes
RESULTS/prefill-graph-<run>.json after every check, so that a crash of the server leaves what came before and the last
thing it tried. MODELS holds a config folder ``rank``. Needs the engine, one GPU with nothing else on it, and this
project, installed or as a checkout on PYTHONPATH; weights that carry signal, if the model is to have any, come with
the engine's environment.

Last, times to the first token of every choice in turn: eager, the engine's graph, banks, both.

What must be seen: every check passes with ``default`` and with ``small``. Tokens are compared in one process: graph and
banks ("both") against the engine's own ("graph", "eager"), beside how far each differs from itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from prefill_graph_run import child, run_name

from sglang_dsv4_graphs.bench.orders import SOCKET_ENV, new_socket_path
from sglang_dsv4_graphs.bench.process import how_it_ended, raise_on_term, run_to_end

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# ``plain`` is the engine without the plugin.
VARIANTS = ("base", "plain", "grow-late", "keep-batches", "no-release", "private-pool", "no-tail-bank", "no-full-bank")
SETTINGS = {
    "plain": {"SGLANG_DSV4_GRAPHS": "0", "DSV4_PREFILL_GRAPH_VARIANT": ""},
    "private-pool": {"SGLANG_DSV4_EAGER_GRAPH_GLOBAL_POOL": "0"},
    "no-tail-bank": {"SGLANG_DSV4_DECODER_REPLAY_GRAPH_MAX_ROWS": "0"},
    "no-full-bank": {"SGLANG_DSV4_FULL_LAYER_GRAPH_MAX_TOKENS": "0"},
}


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


def parent(runs: list[str], results: Path, model: str, limit: float, total: float, options: list[str]) -> int:
    end, failed = time.monotonic() + total, []
    for run in runs:
        seconds = min(limit, end - time.monotonic())
        if seconds < 60:
            print("FAIL", run, "not run: no time left", flush=True)
        if seconds < 60 or not one(run, results, model, seconds, options):
            failed.append(run)
    print("PASS all" if not failed else f"FAIL {', '.join(failed)}", flush=True)
    return int(bool(failed))


def one(run: str, results: Path, model: str, seconds: float, options: list[str]) -> bool:
    """One run in a process of its own: its PASS and FAIL lines as they come, and why it ended if it did not pass."""
    variant = run.partition(":")[2] or "base"
    written = results / f"prefill-graph-{run_name(run)}.json"
    written.unlink(missing_ok=True)
    agent = new_socket_path()
    folder = Path(agent).parent
    environment = {
        SOCKET_ENV: agent,
        "DSV4_PREFILL_GRAPH_VARIANT": variant,
        "SGLANG_DSV4_GRAPHS": "1",
        "SGLANG_DSV4_GRAPHS_STRICT": "1",
        "PYTHONPATH": check_path(folder),
    } | SETTINGS.get(variant, {})
    log = results / f"prefill-graph-{run_name(run)}.log"
    print(f"== {run}", flush=True)
    try:
        command = [sys.executable, __file__, "--child", run, "--model", model, *options]
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
    ap.add_argument("--engine-args", type=json.loads, default={}, metavar="JSON", help="arguments of sglang.Engine")
    ap.add_argument("--no-times", action="store_true", help="compare only")
    ap.add_argument("--child", help=argparse.SUPPRESS)
    args = ap.parse_args()
    results = Path(os.environ["RESULTS"])
    results.mkdir(parents=True, exist_ok=True)
    if args.child:
        child(args.child, results, args.model, args.engine_args, timed=not args.no_times)
        return 0
    raise_on_term()
    options = ["--engine-args", json.dumps(args.engine_args), *(["--no-times"] if args.no_times else [])]
    return parent(args.runs, results, args.model, args.limit, args.total, options)


if __name__ == "__main__":
    sys.exit(main())
