"""Results on disk and what follows from them: written after every case, so that a run cut short keeps what it has."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sglang_dsv4_graphs.bench.variants import VARIANTS
from sglang_dsv4_graphs.log import PREFIX

Result = dict[str, Any]
SUMMARY_FILE = "bench.json"
_ORDER = [variant.name for variant in VARIANTS]
_PAIR = re.compile(r'(\w+)=("[^"]*"|\S+)')


def write_json(path: Path, value: object) -> None:
    """Write ``value`` so that a reader sees the old file or the whole new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(new, path)


def read_json(path: Path) -> Result | None:
    """What was written, or None if nothing was."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def captured_lines(log: str) -> list[Result]:
    """The plugin's ``captured`` lines of a server's log, as values; ``bank=total`` is the last."""
    marker = f"{PREFIX} captured "
    found = [line.partition(marker)[2] for line in log.splitlines() if marker in line]
    return [{key: _value(text) for key, text in _PAIR.findall(line)} for line in found]


def eager_reason(log: str) -> str | None:
    """Why the plugin left a server eager, if its log says so."""
    found = re.findall(rf'{re.escape(PREFIX)} eager reason="([^"]*)"', log)
    return found[-1] if found else None


def _value(text: str) -> object:
    text = text.strip('"')
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated between the two nearest values."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summary_of(samples: Sequence[float]) -> Result:
    """Median and p99 of ``samples``, in their unit; p99 of fewer than a hundred is close to the largest."""
    return {
        "median": round(statistics.median(samples), 3),
        "p99": round(percentile(samples, 99), 3),
        "samples": len(samples),
    }


def summarize(processes: Iterable[Result]) -> dict[str, dict[str, Result]]:
    """Per case and variant: median, p99 over all rounds, each round's median, and the ratio to eager's median."""
    pooled: dict[str, dict[str, list[list[float]]]] = {}
    for process in processes:
        for case in process.get("cases", ()):
            for variant, samples in _samples(process["variant"], case):
                if samples:
                    pooled.setdefault(case["case"], {}).setdefault(variant, []).append(samples)
    summaries: dict[str, dict[str, Result]] = {}
    for case_name, variants in pooled.items():
        row = {}
        for variant in sorted(variants, key=_ORDER.index):
            rounds = variants[variant]
            row[variant] = summary_of([ms for one in rounds for ms in one])
            row[variant]["round_medians"] = [round(statistics.median(one), 3) for one in rounds]
        if "eager" in row:
            for value in row.values():
                value["times_faster"] = round(row["eager"]["median"] / value["median"], 3)
        summaries[case_name] = row
    return summaries


def _samples(variant: str, case: Result) -> list[tuple[str, list[float]]]:
    """A toggling process has samples of both modes; any other has its variant's."""
    if "modes" in case:
        return [({"on": "plugin", "off": "eager"}[mode], ms) for mode, ms in case["modes"].items()]
    return [(variant, case["ttft_ms"])]
