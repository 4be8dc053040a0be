"""The benchmark's tables: plain text of plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dsv4_graphs.bench.compare import DISTANCE

Result = dict[str, Any]


def align(titles: Sequence[str], lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table with a rule under its titles; the first ``left`` columns to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (titles, *lines)) for i in range(len(titles))]

    def text(line: Sequence[str]) -> str:
        cells = [c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([text(titles), "  ".join("-" * w for w in widths), *map(text, lines)])


def ttft_table(bench: Result) -> str:
    """Time to first token: per case and variant median, p99 and times faster than eager."""
    variants = _variants(bench)
    titles = ["TTFT, ms", *(t for v in variants for t in (v, "p99", *(["x eager"] if v != "eager" else [])))]
    lines = []
    for case, row in bench["summary"].items():
        line = [case]
        for v in variants:
            value = row.get(v)
            line += ["-", "-"] if value is None else [f"{value['median']:.1f}", f"{value['p99']:.1f}"]
            if v != "eager":
                faster = (value or {}).get("times_faster")
                line.append("-" if faster is None else f"{faster:.2f}")
        lines.append(line)
    return align(titles, lines)


def _variants(bench: Result) -> list[str]:
    seen = {v: None for row in bench["summary"].values() for v in row}
    return list(seen)


def server_table(bench: Result) -> str:
    """Per process: startup, first request, memory, what was captured, and the GPU's own time of single steps."""
    titles = ["server", "round", "startup s", "first ms", "GiB", "graphs", "graphs GiB", "GPU busy, ms", "state"]
    lines = []
    for p in bench["processes"]:
        total: Result = next((c for c in reversed(p.get("captured", ())) if c.get("bank") == "total"), {})
        busy = ", ".join(f"{case.split()[-1]}: {_number(ms)}" for case, ms in p.get("gpu_busy_ms", {}).items())
        first = p.get("first_requests_ms") or [None]
        cells = [p.get("startup_s"), first[0], p.get("gib_after_startup"), total.get("graphs"), total.get("gib")]
        state = "complete" if p.get("complete") else f"cut short: {p.get('problem', 'running')}".splitlines()[0]
        lines.append([p["variant"], str(p["round"]), *map(_number, cells), busy or "-", state])
    return align(titles, lines)


def throughput_table(bench: Result) -> str:
    """Mixed load per variant."""
    keys = ("request_throughput", "input_throughput", "output_throughput", "median_ttft_ms", "p99_ttft_ms")
    titles = ["mixed load", "requests/s", "tokens in/s", "tokens out/s", "TTFT median", "TTFT p99"]
    rows = bench.get("throughput", [])
    return align(titles, [[row["variant"], *(_number(row.get(key)) for key in keys)] for row in rows])


def breakdown_table(row: Result) -> str:
    """Host time of one step of one length, part by part."""
    titles = ["part", "bank", "count", "us", "mean us"]
    lines = [
        [p["part"], p["bank"] or "", _number(p["count"]), _number(p["us"]), _number(p["mean_us"])] for p in row["parts"]
    ]
    if row.get("gpu_busy_us") is not None:
        lines.append(["GPU busy in an equal step", "", "", _number(row["gpu_busy_us"]), ""])
    title = f"{row['tokens']} tokens, medians of {len(row['steps'])} steps; a timer costs {row['timer_us']} us"
    notes = [row["note"]] if "note" in row else []
    return "\n".join([title, *notes, align(titles, lines, left=2)])


def decode_table(rows: Sequence[Result]) -> str:
    """Decoded tokens: replayed against eager, eager against itself."""
    titles = ["decoded after", "tokens", "replayed = eager", "eager = itself", "log-prob. differs by", "eager's own"]
    titles += ["chance"]
    lines = [
        [
            r["case"],
            str(r["tokens"]),
            str(r["replayed equals eager"]),
            str(r["eager equals itself"]),
            _number(r["replayed equals eager" + DISTANCE], 5),
            _number(r["eager equals itself" + DISTANCE], 5),
            # Of files before there was one, none.
            _number(min(r.get("chance", {"": None}).values()), 3),
        ]
        for r in rows
    ]
    return align(titles, lines)


def checks_table(report: Result) -> str:
    """Replay against eager inside the server, per bank."""
    titles = [
        "bank",
        "row counts",
        "equal",
        "eager differs from itself",
        "largest elsewhere",
        "in churn",
        "least chance",
    ]
    lines = []
    for name, bank in report.items():
        steady = [r for r in bank["rows"] if r["eager_vs_eager"] == 0.0]
        churn = bank.get("churn", {}).get("eager_equals_itself", {})
        worst = max((r["replay_vs_eager"] for r in steady), default=None)
        equal = sum(r["replay_vs_eager"] == 0.0 for r in bank["rows"])
        # Of a row in which replays lie apart, where eager does not equal itself.
        chance = min((r["apart"]["chance"] for r in bank["rows"] if "apart" in r), default=None)
        unsteady = len(bank["rows"]) - len(steady)
        cells = [len(bank["rows"]), equal, unsteady, worst, churn.get("largest_difference"), chance]
        lines.append([name, *(_number(c, 6) for c in cells)])
    return align(titles, lines)


def whole_report(bench: Result) -> str:
    """Every table that the results fill."""
    parts = []
    if bench.get("summary"):
        parts.append(ttft_table(bench))
    for process in bench["processes"]:
        if process.get("decode"):
            parts.append(decode_table(process["decode"]))
        parts += [breakdown_table(row) for row in process.get("breakdown", ())]
        if process.get("checks"):
            parts.append(checks_table(process["checks"]))
    if bench.get("throughput"):
        parts.append(throughput_table(bench))
    if bench["processes"]:
        parts.append(server_table(bench))
    return "\n\n".join(parts)


def _number(value: Any, digits: int = 1) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or value == int(value):
        return str(int(value))
    return f"{value:.{digits}f}"
