"""Measure time to first token with the plugin beside every other choice: tables, JSON, chart.

With a CUDA GPU: servers with dummy weights, one process per variant, rounds alternating in order. Without one (or with
--cpu): host microseconds of replayed steps and of each kind of break, on the tape and the engine's model on the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from sglang_dsv4_graphs.arguments import positive
from sglang_dsv4_graphs.bench import cases
from sglang_dsv4_graphs.bench.errors import BenchError
from sglang_dsv4_graphs.bench.variants import PLUGIN, PREFILL_BACKEND, VARIANTS, Variant, parse_variants
from sglang_dsv4_graphs.demo.preflight import DemoError, check_installed

NAME = "bench"
BREAKDOWN_LENGTHS = "128,1000,2048"
BUSY_LENGTHS = "128,1000,2048,4096"
# What the part without a GPU heeds.
CPU_OPTIONS = ("cpu", "requests", "out", "redraw")


def configure(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is measured (default: every variant, in processes of its own)")
    what.add_argument("--toggle", action="store_true", help="one plugin server, banks on and off request by request")
    what.add_argument("--breakdown", action="store_true", help="host time of a replayed step, part by part")
    what.add_argument("--checks", action="store_true", help="replay against eager inside a server, every bucket")
    modes = what.add_mutually_exclusive_group()
    modes.add_argument("--cpu", action="store_true", help="the counterpart without a GPU (default where there is none)")
    modes.add_argument("--redraw", metavar="DIR", help="print the tables and draw the chart of an earlier --out")
    names = ",".join(v.name for v in VARIANTS)
    what.add_argument("--variants", default=names, metavar="LIST", help=f"of {names} (default all)")
    what.add_argument(
        "--cases", default="cold,hits,batches", metavar="LIST", help=f"of {','.join(cases.GROUPS)}, or none"
    )
    what.add_argument("--rounds", type=positive, default=2, metavar="N", help="rounds of all variants (default 2)")
    what.add_argument(
        "--requests", type=positive, default=7, metavar="N", help="requests per case and process (default 7)"
    )
    what.add_argument(
        "--busy", default=BUSY_LENGTHS, metavar="LIST", help="prompt lengths whose GPU time is taken, or none"
    )
    what.add_argument("--lengths", default=BREAKDOWN_LENGTHS, metavar="LIST", help="prompt lengths of --breakdown")
    what.add_argument("--throughput", action="store_true", help="also a mixed load through sglang.bench_serving")
    what.add_argument(
        "--output-tokens",
        type=positive,
        metavar="N",
        help="--throughput: most tokens of an answer (default 16; 1: prefill alone, no decode kernel is compiled)",
    )
    what.add_argument("--decode", type=positive, default=0, metavar="N", help="--toggle: compare N decoded tokens")
    what.add_argument(
        "--compare", default="cold,batches", metavar="LIST", help="--decode: cases whose tokens are compared"
    )
    what.add_argument(
        "--repeats", type=_several, metavar="N", help="--decode: answers of each kind (default 2; 4 judge)"
    )
    what.add_argument("--profile", action="store_true", help="--toggle: host profile of small replayed steps")
    server = parser.add_argument_group("servers")
    server.add_argument("--gpu", action="store_true", help="never take the part without a GPU, also if torch sees none")
    server.add_argument(
        "--model", metavar="DIR", help="config folder (default: V4.1-Flash as one rank of four sees it)"
    )
    server.add_argument(
        "--engine-args", default="{}", metavar="JSON", help="sglang.Engine arguments that override ours"
    )
    server.add_argument("--limit", type=positive, default=1800, metavar="S", help="seconds per process (default 1800)")
    server.add_argument(
        "--no-warm-process", action="store_true", help="no unmeasured first process that compiles kernels"
    )
    parser.add_argument("--out", metavar="DIR", default="bench-results", help="results (default bench-results)")


def _several(text: str) -> int:
    if positive(text) < 2:
        raise argparse.ArgumentTypeError("from 2 on: one answer has nothing of its own kind to be compared with")
    return int(text)


def run(options: argparse.Namespace) -> int:
    """Run the benchmark; 0: complete, 1: a part failed, 2: it could not run."""
    try:
        if options.redraw:
            return _redraw(Path(options.redraw))
        check_installed()
        if options.cpu or not (options.gpu or _has_gpu()):
            _refuse_on_cpu(options)
            from sglang_dsv4_graphs.bench import cpu

            return _show(cpu.run(_out(options), options.requests), _out(options))
        return _run_on_gpu(options)
    except (BenchError, DemoError) as e:
        print(f"bench: cannot run: {e}", file=sys.stderr)
        return 2


def _run_on_gpu(options: argparse.Namespace) -> int:
    from sglang_dsv4_graphs.bench import chart, gpu, process

    process.raise_on_term()
    with tempfile.TemporaryDirectory(prefix="dsv4_graphs_") as folder:
        plan = _plan(options, options.model or _default_model(Path(folder)))
        if plan.groups and not chart.available():
            _say(chart.MISSING)
        record = gpu.Bench(plan, sys.argv, _say).run()
    return _show(record, plan.out)


def _plan(options: argparse.Namespace, model: str) -> Any:
    from sglang_dsv4_graphs.bench import gpu, throughput

    # Asked together, they share one server; checks come last, since they write over what is cached.
    modes = tuple(m for m in ("toggle", "breakdown", "checks") if getattr(options, m)) or ("measure",)
    asks = "measure" in modes or "toggle" in modes
    variants = parse_variants(options.variants) if "measure" in modes else [PLUGIN]
    groups = cases.parse_groups(options.cases) if asks else []
    _refuse_ignored(options, modes)
    return gpu.Plan(
        out=_out(options),
        model=model,
        modes=modes,
        variants=variants,
        rounds=options.rounds if "measure" in modes else 1,
        groups=groups,
        requests=options.requests,
        engine_args=_engine_args(options.engine_args, modes, variants),
        limit_s=options.limit,
        warm_process=not options.no_warm_process,
        busy=tuple(cases.parse_lengths(options.busy, "--busy")) if asks and options.busy != "none" else (),
        lengths=tuple(cases.parse_lengths(options.lengths, "--lengths")),
        decode=options.decode,
        repeats=options.repeats or 2,
        compare=tuple(cases.parse_groups(options.compare, "--compare")),
        load=throughput.Load(output_tokens=options.output_tokens or 16) if options.throughput else None,
        profile=options.profile,
    )


def _refuse_ignored(options: argparse.Namespace, modes: tuple[str, ...]) -> None:
    """An option that would do nothing is an error: who gave it waits minutes for what never comes."""
    for option, needs in (("decode", "toggle"), ("profile", "toggle"), ("throughput", "measure")):
        if getattr(options, option) and needs not in modes:
            asked = f"needs --{needs}" if needs != "measure" else f"does not go with --{modes[0]}"
            raise BenchError(f"--{option} {asked}")
    if options.repeats and not options.decode:
        raise BenchError("--repeats needs --decode")
    if options.output_tokens and not options.throughput:
        raise BenchError("--output-tokens needs --throughput")
    if options.model and not (Path(options.model) / "config.json").is_file():
        raise BenchError(f"--model {options.model}: no config.json there")


def _refuse_on_cpu(options: argparse.Namespace) -> None:
    """An option for servers, where none is started: its user would take what comes for what was asked."""
    parser = argparse.ArgumentParser()
    configure(parser)
    defaults = vars(parser.parse_args([]))
    given = [name for name, value in defaults.items() if name not in CPU_OPTIONS and getattr(options, name) != value]
    if not given:
        return
    names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
    if options.cpu:
        raise BenchError(f"--cpu does not go with {names}: it takes --requests and --out")
    raise BenchError(
        f"torch sees no CUDA GPU, and without one the benchmark takes --requests and --out, not {names}; "
        "--gpu starts servers all the same"
    )


def _engine_args(text: str, modes: tuple[str, ...], variants: list[Variant]) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as e:
        raise BenchError(f"--engine-args {text!r} is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise BenchError(f"--engine-args {text!r}: give an object, such as '{{\"tp_size\": 2}}'")
    if "measure" in modes and len(variants) > 1 and PREFILL_BACKEND in value:
        raise BenchError(
            f"--engine-args sets {PREFILL_BACKEND}, in which the variants differ; choose them by --variants"
        )
    return value


def _out(options: argparse.Namespace) -> Path:
    out = Path(options.out).resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise BenchError(f"--out {options.out}: {e.strerror}") from e
    return out


def _default_model(folder: Path) -> str:
    from sglang_dsv4_graphs.demo import served_model

    served_model.write_config(folder)
    return str(folder)


def _redraw(out: Path) -> int:
    from sglang_dsv4_graphs.bench.results import SUMMARY_FILE, read_json

    record = read_json(out / SUMMARY_FILE)
    if record is None:
        raise BenchError(f"--redraw {out}: no {SUMMARY_FILE} there")
    return _show(record, out)


def _show(record: dict[str, Any], out: Path) -> int:
    from sglang_dsv4_graphs.bench import chart, gpu
    from sglang_dsv4_graphs.bench.report import whole_report

    print("\n" + whole_report(record))
    if record.get("summary"):
        try:
            chart.draw(record, out / "bench.png")
            _say(f"chart: {out / 'bench.png'}")
        except BenchError as e:
            _say(str(e))
    _say(f"results: {out}")
    problem = gpu.problems_line(record)
    if problem:
        _say(problem)
    return 1 if problem else 0


def _say(text: str) -> None:
    print(text, flush=True)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available() and torch.version.cuda is not None
