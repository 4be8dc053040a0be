"""The pure parts: cases, variants, results."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sglang_dsv4_graphs.bank.buckets import full_layer_buckets
from sglang_dsv4_graphs.bench import busy, cases, chart, memory, results, variants
from sglang_dsv4_graphs.bench.breakdown import reduce_steps
from sglang_dsv4_graphs.bench.errors import BenchError


def test_prompts_repeat_for_equal_seeds_only_and_share_only_the_prefix() -> None:
    (case,) = (c for c in cases.cases_of(["hits"]) if c.tokens == 300)
    (one,), (same,), (other,) = case.prompts((1, "on")), case.prompts((1, "on")), case.prompts((1, "off"))
    assert one == same != other
    assert len(one) == 16384 + 300
    assert one[:16384] == other[:16384] == cases.prefix_prompt(16384)
    assert one[16384] != other[16384]
    batch = next(c for c in cases.cases_of(["batches"]) if c.requests == 4).prompts(0)
    assert len({tuple(p) for p in batch}) == 4


def test_cases_are_those_that_were_asked_for() -> None:
    assert [c.tokens for c in cases.cases_of(["cold"])] == [64, 128, 256, 1000, 2048, 4096, 8192]
    assert [c.name for c in cases.cases_of(["chunked", "batches"])][-1] == "chunked 32768"
    assert cases.parse_groups("none") == []


def test_every_case_has_its_panel_in_the_chart() -> None:
    measured = {case.name: {} for case in cases.cases_of(cases.GROUPS)}
    panels = chart._by_group(measured)
    assert list(panels) == list(cases.GROUPS)
    assert set(panels) == set(chart._TITLES)


def test_edges_pad_most() -> None:
    buckets = full_layer_buckets(-1, 8192, 1 << 20)
    for case in cases.cases_of(["edges"]):
        assert case.tokens - 1 in buckets
    assert cases.parse_groups(" hits, cold") == ["hits", "cold"]


def test_every_second_round_is_reversed() -> None:
    order = variants.schedule(variants.parse_variants("eager,plugin"), 3)
    assert [(n, v.name) for n, v in order] == [
        (1, "eager"),
        (1, "plugin"),
        (2, "plugin"),
        (2, "eager"),
        (3, "eager"),
        (3, "plugin"),
    ]


def test_variants_differ_in_the_plugin_and_the_prefill_graph() -> None:
    seen = {v.name: (v.environment["SGLANG_DSV4_GRAPHS"], *v.engine_args.values()) for v in variants.VARIANTS}
    assert seen == {
        "eager": ("0", "disabled"),
        "prefill-graph": ("0", "breakable"),
        "plugin": ("1", "disabled"),
        "plugin+prefill-graph": ("1", "breakable"),
    }


def test_percentiles_are_interpolated() -> None:
    assert results.percentile([1, 2, 3], 50) == 2
    assert results.percentile(range(101), 99) == 99
    assert results.percentile([0, 10], 99) == pytest.approx(9.9)
    assert results.percentile([5], 99) == 5


def test_overlapping_work_counts_once() -> None:
    assert busy.union_us([]) == 0
    assert busy.union_us([(5, 6), (0, 3), (2, 4), (2, 3)]) == 5


def test_a_chart_names_the_extra_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(chart, "available", lambda: False)
    with pytest.raises(BenchError, match=r"pip install 'sglang-dsv4-graphs\[bench\]'"):
        chart.draw({"summary": {}, "processes": []}, tmp_path / "x.png")
    monkeypatch.setattr(chart, "available", lambda: True)
    with pytest.raises(BenchError, match="no case was measured"):
        chart.draw({"summary": {}, "processes": []}, tmp_path / "x.png")


@pytest.mark.parametrize(("told", "gib"), [("2048", 2.0), ("[N/A]", None)])
def test_memory_is_nvidia_smi_s(told: str, gib: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{told}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert memory.used_gib() == gib
    assert memory.machine()["gpus"] == [told]
    monkeypatch.setattr(memory, "PACKAGES", ("pytest", "no-such-package"))
    assert memory.machine()["packages"] == {"pytest": pytest.__version__, "no-such-package": None}


def test_the_reason_of_a_server_that_stayed_eager_is_found() -> None:
    log = '[TP0] dsv4-graphs: eager reason="prefill_graph is on"\nother\n'
    assert results.eager_reason(log) == "prefill_graph is on"
    assert results.eager_reason("nothing") is None


def spent(part: str, us: float, count: int = 1, bank: str | None = None, kind: str | None = None) -> dict[str, object]:
    return {"part": part, "us": us, "count": count, "bank": bank, "kind": kind}


def test_a_breakdown_s_parts_add_up() -> None:
    step = [
        spent("forward", 1000),
        spent("metadata", 100),
        spent("loop", 700),
        spent("guard", 10, bank="b"),
        spent("range", 500, bank="b"),
        spent("copy-in", 20, bank="b"),
        spent("segments", 120, count=3, bank="b"),
        spent("break", 200, count=2, bank="b", kind="attention"),
        spent("break", 60, count=1, bank="b", kind="sources"),
        spent("hand-off", 5, bank="b"),
        spent("drain", 400),
    ]
    row = {"steps": [{"spent": step}], "ttft_ms": [2.0], "timer_us": 0.5}
    parts = {(p["bank"], p["part"]): (p["count"], p["us"], p["mean_us"]) for p in reduce_steps(row)}
    timers = parts.pop((None, "timers themselves, spread over the above"))
    assert timers == (14, 7.0, 0.5)
    assert sum(us for _, us, _ in parts.values()) == 2000
    assert parts["b", "break: attention"] == (2, 200, 100)
    assert parts["b", "segment launches"] == (3, 120, 40)
    assert parts["b", "rest of the replay (counts, contexts)"] == (1, 100, 100)
    assert parts[None, "request path (client to scheduler and back)"] == (1, 600, 600)
    assert parts[None, "layer loop outside the banks"] == (1, 185, 185)
    assert reduce_steps({"steps": [], "timer_us": 1}) == []


def test_a_breakdown_without_segments_is_no_result() -> None:
    step = [spent("forward", 9), spent("range", 5, bank="b"), spent("break", 4, bank="b", kind="attention")]
    with pytest.raises(BenchError, match="met no segment of bank b"):
        reduce_steps({"steps": [{"spent": step}], "timer_us": 1})
