"""The check of the engine's prefill graph beside the banks (benchmarks/gpu), on a fake engine that has such a graph."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench import fake_engine
from tests.bench.site import ROOT
from tests.distributions import PLUGIN, install_distribution

pytest.importorskip("torch")
SCRIPT = ROOT / "benchmarks" / "gpu" / "prefill_graph.py"
GRAPH_RUNNER = "sglang/srt/model_executor/runner/prefill_cuda_graph_runner"
GRAPH_BACKEND = "sglang/srt/model_executor/runner_backend/breakable_cuda_graph_backend"

ENGINE = (
    fake_engine.MODULES["__init__"]
    + '''

import random
from importlib.metadata import entry_points

from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend


class Engine(Engine):
    """Steps that fit a shape replay the prefill graph, and the late bank in it; others replay both banks."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        assert arguments["cuda_graph_backend_prefill"] == "breakable"
        self.draw = random.Random(5)
        self.shapes = arguments.get("cuda_graph_bs_prefill", [8192])
        names = [found.name for found in entry_points(group="sglang.srt.plugins")]
        assert names == ["dsv4_graphs"], names
        for found in entry_points(group="sglang_dsv4_graphs"):
            built = getattr(found.load(), "dsv4_graphs_model_built", None)
            if built is not None:
                built(served=self.served)

    def answer(self, ids, new_tokens, logprobs):
        fits = [shape for shape in self.shapes if shape >= len(ids)]
        graph = bool(fits) and PrefillCudaGraphRunner().can_run_graph(ids)
        if graph:
            BreakableCudaGraphBackend().replay(SimpleNamespace(size=fits[0]))
        if self.served.ready:
            self.served.replays["decoder-replay", 128] += 1
            self.served.replays["full-layer", 8192] += not graph
        wrong = "wrong" in self.fault and graph and self.served.ready
        noisy = "noisy" in self.fault and len(ids) > 512 and (len(ids) == 2048 or "alone" not in self.fault)
        noisy = noisy and ("ours" not in self.fault or (graph and self.served.ready))
        noise = self.draw.random() / 10 if noisy else 0.0
        top = [[[(-1.25 if wrong else -1.0) + noise, ids[0], None], [-2.0, ids[0] + 1, None]]]
        return {"output_ids": [ids[0]] * new_tokens, "meta_info": {"output_top_logprobs": top}}
'''
)
RUNNER_SOURCE = """
class PrefillCudaGraphRunner:
    def can_run_graph(self, batch):
        return True
"""
BACKEND_SOURCE = """
class BreakableCudaGraphBackend:
    def replay(self, shape_key):
        return shape_key.size
"""


@pytest.fixture(params=[True, False], ids=["installed", "a checkout on the path"])
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Where the fake is installed, and the project is or only seems to be."""
    folder = tmp_path / "site"
    for module in (GRAPH_RUNNER, GRAPH_BACKEND):
        (folder / module).parent.mkdir(parents=True)
    modules = {"sglang/__init__": ENGINE, GRAPH_RUNNER: RUNNER_SOURCE, GRAPH_BACKEND: BACKEND_SOURCE}
    install_distribution(folder, "sglang", {}, **modules)
    return install_distribution(folder, "sglang-dsv4-graphs", PLUGIN if request.param else {})


def check(site: Path, *arguments: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=os.environ | {"PYTHONPATH": path, "RESULTS": str(site.parent / "results"), "FAKE_FAULT": fault},
        text=True,
        capture_output=True,
        timeout=120,
    )


def written(site: Path, run: str) -> dict[str, Any]:
    return json.loads((site.parent / "results" / f"prefill-graph-{run}.json").read_text())


def test_every_mode_takes_its_way(site: Path) -> None:
    done = check(site, "small")
    assert done.stdout.splitlines()[-1] == "PASS all", done.stdout + done.stderr
    assert done.returncode == 0
    record = written(site, "small")
    assert record["trying"] == "done"
    checks = {c["name"]: c for c in record["checks"]}
    assert checks["100"]["paths"] == {
        "both": ["decoder-replay 128", "prefill-graph 128"],
        "graph": ["prefill-graph 128"],
        "eager": [],
    }
    # Past the shapes there is no graph to switch.
    assert checks["2049"]["paths"] == {"both": ["decoder-replay 128", "full-layer 8192"], "graph": [], "eager": []}
    assert checks["8 requests"]["apart"] == {"both graph": 0.0, "both eager": 0.0, "graph eager": 0.0}
    assert done.stdout.count("PASS small ") == len(record["checks"]) == 18


@pytest.mark.parametrize("site", [True], indirect=True)
def test_tokens_that_differ_fail_where_they_differ(site: Path) -> None:
    done = check(site, "small", fault="wrong")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "FAIL small"
    assert "FAIL small 128 " in done.stdout
    assert "PASS small 2049 " in done.stdout
    (found,) = [c for c in written(site, "small")["checks"] if c["name"] == "128"]
    assert found["apart"] == {"both graph": 0.25, "both eager": 0.25, "graph eager": 0.0}


@pytest.mark.parametrize("site", [True], indirect=True)
@pytest.mark.parametrize(("fault", "passed"), [("noisy", True), ("noisy wrong", False)])
def test_where_kernels_differ_from_run_to_run_answers_are_judged_together(site: Path, fault: str, passed: bool) -> None:
    check(site, "small", fault=fault)
    checks = {c["name"]: c for c in written(site, "small")["checks"]}
    found = checks["cases that are not deterministic"]
    assert (found["passed"], found["cases"]) == (passed, ["1000", "2048"])
    assert checks["1000"]["passed"], "one such case alone decides nothing"
    assert checks["128"]["passed"] == passed


@pytest.mark.parametrize("site", [True], indirect=True)
@pytest.mark.parametrize(
    ("fault", "passed"), [("noisy alone", True), ("noisy alone wrong", False), ("noisy alone ours", False)]
)
def test_the_only_case_that_differs_from_run_to_run_can_fail(site: Path, fault: str, passed: bool) -> None:
    """Also where the engine answers alike each time and ours does not: a race of ours is not the engine's noise."""
    check(site, "small", fault=fault)
    (found,) = [c for c in written(site, "small")["checks"] if c["name"] == "cases that are not deterministic"]
    assert (found["passed"], found["cases"]) == (passed, ["2048"])


@pytest.mark.parametrize("site", [True], indirect=True)
def test_a_crash_leaves_what_was_tried(site: Path) -> None:
    done = check(site, "default:no-release", fault="killed")
    assert done.returncode == 1
    assert "FAIL default:no-release ended with code -9 while trying: 1000, eager" in done.stdout
    assert written(site, "default-no-release")["checks"][-1]["name"] == "1"


@pytest.mark.parametrize("site", [True], indirect=True)
def test_the_engine_alone_is_asked_without_an_agent(site: Path) -> None:
    done = check(site, "small:plain")
    assert done.stdout.splitlines()[-1] == "PASS all", done.stdout + done.stderr
    found = [c["name"] for c in written(site, "small-plain")["checks"]]
    assert (found.count("128"), found.count("8192"), found[-1]) == (2, 2, "40 steps in turn")


@pytest.mark.parametrize("site", [True], indirect=True)
def test_what_is_no_run_is_refused(site: Path) -> None:
    for run in ("large", "small:grow-early"):
        done = check(site, run)
        assert done.returncode == 2
        assert f"{run!r}: default or small" in done.stderr


@pytest.mark.engine
def test_the_engine_has_what_the_check_switches_and_counts() -> None:
    pytest.importorskip("sglang.srt.model_executor.runner.prefill_cuda_graph_runner")
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
    from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend

    from sglang_dsv4_graphs.bank.device import Device
    from sglang_dsv4_graphs.hooks.runtime import Runtime

    for owner, names in (
        (PrefillCudaGraphRunner, ("can_run_graph", "capture", "capture_prepare")),
        (BreakableCudaGraphBackend, ("replay",)),
        (Runtime, ("_pending",)),
        (Device, ("release",)),
    ):
        assert [name for name in names if name not in vars(owner)] == []
