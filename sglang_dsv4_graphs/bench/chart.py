"""The chart: time to first token per case and variant, with the GPU's own time as the floor. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from sglang_dsv4_graphs.bench.cases import GROUPS, cases_of
from sglang_dsv4_graphs.bench.errors import BenchError

MISSING = "no chart: matplotlib is not installed; pip install 'sglang-dsv4-graphs[bench]', then bench --redraw DIR"
_COLOURS = {"eager": "#7f7f7f", "prefill-graph": "#ff7f0e", "plugin": "#1f77b4", "plugin+prefill-graph": "#2ca02c"}
_TITLES = {
    "cold": "cold prompts",
    "edges": "one token more than a bucket",
    "hits": "new tokens on a cached prefix",
    "batches": "batches",
    "chunked": "chunked",
}
# By the first word of a case's name, which is all that a record says of it.
_GROUP_OF = {case.name.split()[0]: case.group for case in cases_of(GROUPS)}


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def draw(bench: dict[str, Any], path: Path) -> None:
    """Write the chart of ``bench`` as a PNG.

    Raises:
        BenchError: matplotlib is not installed, or there is nothing to draw.
    """
    if not available():
        raise BenchError(MISSING)
    groups = _by_group(bench["summary"])
    if not groups:
        raise BenchError("no chart: no case was measured")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    widths = [len(cases) for cases in groups.values()]
    figure, axes = pyplot.subplots(
        1, len(groups), figsize=(2.5 + 1.3 * sum(widths), 5), squeeze=False, gridspec_kw={"width_ratios": widths}
    )
    try:
        for axis, (group, cases) in zip(axes[0], groups.items(), strict=True):
            _panel(axis, cases, _floor(bench))
            axis.set_title(_TITLES[group])
        axes[0][0].set_ylabel("time to first token, ms (median; line to p99)")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=max(1, len(labels)), frameon=False)
        figure.tight_layout(rect=(0, 0, 1, 0.93))
        figure.savefig(path, dpi=150)
    finally:
        pyplot.close(figure)


def _by_group(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for case, row in summary.items():
        groups.setdefault(_GROUP_OF[case.split()[0]], {})[case] = row
    return groups


def _floor(bench: dict[str, Any]) -> dict[str, float]:
    """The least GPU time that any server needed per case."""
    floors: dict[str, float] = {}
    for process in bench["processes"]:
        for case, ms in process.get("gpu_busy_ms", {}).items():
            if ms is not None:
                floors[case] = min(ms, floors.get(case, ms))
    return floors


def _panel(axis: Any, cases: dict[str, Any], floors: dict[str, float]) -> None:
    variants = list({v: None for row in cases.values() for v in row})
    width = 0.8 / len(variants)
    for i, variant in enumerate(variants):
        there = [(at, row[variant]) for at, row in enumerate(cases.values()) if variant in row]
        x = [at - 0.4 + width * (i + 0.5) for at, _ in there]
        medians = [value["median"] for _, value in there]
        up = [max(0.0, value["p99"] - value["median"]) for _, value in there]
        errors = [[0.0] * len(up), up]
        axis.bar(x, medians, width, label=variant, color=_COLOURS.get(variant), yerr=errors, capsize=2)
    marks = [(at, floors[case]) for at, case in enumerate(cases) if case in floors]
    if marks:
        left, right = [at - 0.42 for at, _ in marks], [at + 0.42 for at, _ in marks]
        axis.hlines([ms for _, ms in marks], left, right, colors="black", linestyles="dotted", label="GPU busy")
    labels = [case.split(" ", 1)[1].split(" on ")[0] for case in cases]
    axis.set_xticks(range(len(cases)), labels)
    axis.set_xlabel("tokens")
