"""The whole command on a fake engine: what it measures, writes, prints and draws, and what it refuses."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_dsv4_graphs import cli
from sglang_dsv4_graphs.bench import command
from tests.bench.site import bench, make_site

pytest.importorskip("torch")
EAGER = {"median": 13.25, "p99": 13.75, "samples": 6, "round_medians": [13.25, 13.25], "times_faster": 1.0}
PLUGIN = {"median": 3.25, "p99": 3.75, "samples": 6, "round_medians": [3.25, 3.25], "times_faster": 4.077}
COLD = [64, 128, 256, 1000, 2048, 4096, 8192]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_site(tmp_path_factory.mktemp("bench") / "site")


def results(out: Path) -> dict[str, Any]:
    return json.loads((out / "bench.json").read_text())


@pytest.fixture(scope="module")
def measured(site: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One run of two variants and two rounds: its results and what it printed."""
    out = tmp_path_factory.mktemp("measured")
    options = [
        "--variants",
        "eager,plugin",
        "--cases",
        "cold,hits",
        "--rounds",
        2,
        "--requests",
        3,
        "--busy",
        "128,1000",
    ]
    done = bench(site, "--out", out, *options, "--throughput", "--output-tokens", 3)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def test_rounds_alternate_in_processes_of_their_own(measured: tuple[Path, str]) -> None:
    record = results(measured[0])
    order = [(p["variant"], p["round"]) for p in record["processes"]]
    assert order == [("eager", 0), ("eager", 1), ("plugin", 1), ("plugin", 2), ("eager", 2)]
    assert all(p["complete"] for p in record["processes"])
    assert record["state"] == "complete"
    for p in record["processes"]:
        assert json.loads((measured[0] / f"{p['variant']}-{p['round']}.json").read_text()) == p


def test_samples_are_raw_and_summed_up_over_rounds(measured: tuple[Path, str]) -> None:
    record = results(measured[0])
    names = [f"cold {n}" for n in COLD] + [f"hit {n} on 16384" for n in (1, 30, 128, 300, 600, 1000, 2000)]
    assert list(record["summary"]) == names
    for name, row in record["summary"].items():
        assert list(row) == ["eager", "plugin"]
        # The fake's layers take 12 ms eagerly and 2 ms replayed, the rest 1.25 ms, of every third request 1.75 ms; of
        # the unmeasured process nothing is in here.
        assert row["eager"] == EAGER, name
        assert row["plugin"] == EAGER | {
            "median": 3.25,
            "p99": 3.75,
            "round_medians": [3.25, 3.25],
            "times_faster": 4.077,
        }
    cases = record["processes"][1]["cases"]
    assert all(len(c["ttft_ms"]) == 3 for c in cases)
    # No cold prompt was seen before, and every hit found the prefix.
    assert {tuple(c["cached"]) for c in cases if c["group"] == "cold"} == {(0, 0, 0)}
    assert {tuple(c["cached"]) for c in cases if c["group"] == "hits"} == {(16384, 16384, 16384)}


def test_what_a_server_took_is_kept(measured: tuple[Path, str]) -> None:
    processes = results(measured[0])["processes"]
    plugin, eager = processes[2], processes[4]
    assert plugin["captured"][-1] == {"bank": "total", "graphs": 2, "segments": 9, "gib": 0.25, "seconds": 2.0}
    assert plugin["captured"][0]["rows"] == "64..128"
    assert eager["captured"] == []
    assert len(plugin["first_requests_ms"]) == 8
    assert plugin["startup_s"] == 3.0
    assert "gib_after_startup" in plugin
    # Kernels of 3 and 2 ms overlap by one; the copy adds half, what the CPU did adds nothing.
    assert plugin["gpu_busy_ms"] == {"cold 128": 4.5, "cold 1000": 4.5}
    assert plugin["engine_args"]["cuda_graph_backend_prefill"] == "disabled"


def test_throughput_is_of_the_same_variants(measured: tuple[Path, str]) -> None:
    rows = results(measured[0])["throughput"]
    assert [(r["variant"], r["request_throughput"], r["completed"]) for r in rows] == [
        ("eager", 10.0, 200),
        ("plugin", 20.0, 200),
    ]
    assert all(r["load"]["output_tokens"] == 3 for r in rows)


def test_the_tables_show_ratios(measured: tuple[Path, str]) -> None:
    out = measured[1]
    assert re.search(r"^TTFT, ms +eager +p99 +plugin +p99 +x eager$", out, flags=re.MULTILINE)
    (line,) = re.findall(r"^cold 128 .*$", out, flags=re.MULTILINE)
    ratio = results(measured[0])["summary"]["cold 128"]["plugin"]["times_faster"]
    assert line.split()[-1] == f"{ratio:.2f}"
    assert re.search(r"^plugin +2 .*128: 4\.5, 1000: 4\.5 +complete$", out, flags=re.MULTILINE)
    assert re.search(r"^plugin +20 ", out, flags=re.MULTILINE)


def test_the_chart_is_drawn_or_its_extra_named(measured: tuple[Path, str], site: Path) -> None:
    out, printed = measured
    if not (out / "bench.png").exists():
        assert "pip install 'sglang-dsv4-graphs[bench]'" in printed
        pytest.skip("needs matplotlib (extra bench)")
    assert (out / "bench.png").read_bytes().startswith(b"\x89PNG")
    (out / "bench.png").unlink()
    again = bench(site, "--redraw", out)
    assert again.returncode == 0, again.stderr
    assert (out / "bench.png").exists()
    # The same tables as before, from the file alone.
    assert printed.partition("TTFT, ms")[2] == again.stdout.partition("TTFT, ms")[2]


def test_toggle_compares_within_one_process(site: Path, tmp_path: Path) -> None:
    options = ["--cases", "batches", "--requests", 2, "--busy", "none", "--decode", 5, "--compare", "batches"]
    done = bench(site, "--out", tmp_path, "--toggle", *options, "--profile")
    assert done.returncode == 0, done.stdout + done.stderr
    (process,) = results(tmp_path)["processes"]
    assert [c["case"] for c in process["cases"]] == [f"batch {n} x 200" for n in (2, 4, 8, 16)]
    for case in process["cases"]:
        assert {mode: len(ms) for mode, ms in case["modes"].items()} == {"on": 2, "off": 2}
        assert max(case["modes"]["on"]) < min(case["modes"]["off"])
        # Each mode had prompts of its own.
        assert case["cached"] == [0, 0, 0, 0]
    # The first requests, two profiles of three, half of the warm-up and half of the measured steps replayed; decoding
    # came later.
    warm_up = 8 + 6 + 1 + 30
    assert process["counts"]["replays"] == [["full-layer", 128, warm_up + 2 * 30]]
    row = process["decode"][0]
    # The fake's replays leave eager's tokens after the third.
    assert (row["tokens"], row["replayed equals eager"], row["eager equals itself"]) == (10, 6, 10)
    assert row["replayed equals itself"] == 10
    assert row["replayed equals eager, log-probabilities differ by"] == 0.25
    assert row["eager equals itself, log-probabilities differ by"] == 0.0
    assert len(row["eager top"]) == len(row["replayed top"]) == 2
    assert row["cached"] == {kind: [[0, 0]] * 2 for kind in ("eager", "replayed")}
    # Two answers of each kind, all equal within their kind and apart from the other: 2 of 6 ways to deal them.
    assert row["chance"] == {"tokens": 0.3333, "log-probabilities": 0.3333}
    assert "run_loop" in (tmp_path / "profile-1.txt").read_text()
    for which in ("first", "later"):
        # Of one whole request, and the way in of the one in whose forward it ended.
        (line,) = [x for x in (tmp_path / f"profile-1-{which}.txt").read_text().splitlines() if "(generate)" in x][:1]
        assert line.split()[0] == "2"
        assert process[f"profiled_{which}_ms"] > 0
    # A profiled request is no time of a first one.
    assert "first_requests_ms" not in process


def test_breakdown_adds_up_to_the_client_s_time(site: Path, tmp_path: Path) -> None:
    done = bench(site, "--out", tmp_path, "--breakdown", "--lengths", "128,300", "--requests", 3)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = results(tmp_path)["processes"][0]["breakdown"]
    assert [r["tokens"] for r in rows] == [128, 300]
    for row in rows:
        assert [s["rows"] for s in row["steps"]] == [row["tokens"]] * 3
        parts = {p["part"]: p["us"] for p in row["parts"] if not p["part"].startswith("timers")}
        assert sum(parts.values()) == pytest.approx(sorted(row["ttft_ms"])[1] * 1e3, abs=0.1)
        assert parts["engine's metadata"] == 250
        assert parts["layer loop outside the banks"] == 2000
        assert parts["request path (client to scheduler and back)"] == 1000
    assert "a timer costs" in done.stdout


def test_toggle_and_breakdown_share_a_server(site: Path, tmp_path: Path) -> None:
    options = ["--toggle", "--breakdown", "--cases", "batches", "--requests", 2, "--busy", "128", "--lengths", "128"]
    done = bench(site, "--out", tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    record = results(tmp_path)
    assert record["mode"] == "toggle+breakdown"
    (process,) = record["processes"]
    assert len(process["cases"]) == 4
    assert [row["tokens"] for row in process["breakdown"]] == [128]
    assert process["gpu_busy_ms"] == {"cold 128": 4.5}
    assert "gpu_busy_us" in process["breakdown"][0]


def test_a_server_that_fails_is_told_and_the_others_run(site: Path, tmp_path: Path) -> None:
    options = ["--variants", "plugin,eager", "--cases", "none", "--rounds", 1, "--busy", "64"]
    done = bench(site, "--out", tmp_path, *options, FAKE_FAULT="start")
    assert done.returncode == 1
    assert "plugin-1 ended with code 1; its log ends:" in done.stdout
    assert "out of memory, says the fake" in done.stdout
    plugin, eager = results(tmp_path)["processes"]
    assert "out of memory" in plugin["problem"]
    assert eager["complete"]
    assert eager["gpu_busy_ms"] == {"cold 64": 4.5}


def test_a_plugin_that_captured_nothing_is_no_result(site: Path, tmp_path: Path) -> None:
    options = ["--variants", "plugin", "--cases", "none", "--rounds", 1, "--busy", "64"]
    done = bench(site, "--out", tmp_path, *options, FAKE_FAULT="captures nothing")
    assert done.returncode == 1
    assert "the plugin captured nothing: prefill_graph" in done.stdout


def test_a_run_cut_short_keeps_what_it_has_and_leaves_no_server(site: Path, tmp_path: Path) -> None:
    options = ["--variants", "plugin", "--cases", "cold", "--rounds", 1, "--requests", 2]
    done = bench(site, "--out", tmp_path, *options, "--no-warm-process", FAKE_FAULT="killed")
    assert done.returncode == 1
    (process,) = results(tmp_path)["processes"]
    assert "ended with code -9" in process["problem"]
    assert not process["complete"]
    assert len(process["first_requests_ms"]) == 8
    assert [(c["case"], len(c["ttft_ms"])) for c in process["cases"]] == [("cold 64", 2)]
    assert list(results(tmp_path)["summary"]) == ["cold 64"]
    assert "cut short: ended with code -9" in done.stdout
    assert running(str(tmp_path)) == []


def running(word: str) -> list[str]:
    """Command lines with ``word`` of processes other than this one's."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if word in line and entry.parent.name != str(os.getpid()):
            found.append(line)
    return found


def test_throughput_says_what_the_server_said(site: Path, tmp_path: Path) -> None:
    options = ["--variants", "plugin", "--cases", "none", "--busy", "none", "--throughput"]
    done = bench(site, "--out", tmp_path, *options, FAKE_FAULT="no server")
    assert done.returncode == 1
    assert "sglang.launch_server did not come up: it ended with code 1" in done.stdout
    assert "no such flag, says the fake" in done.stdout


Refusal = Callable[..., str]


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """What the command says to arguments with which it cannot run."""
    monkeypatch.setattr(command, "check_installed", lambda: None)

    def said(*arguments: str) -> str:
        assert cli.main(["bench", *arguments]) == 2
        return capsys.readouterr().err

    return said


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--cases", "warm"], "'warm': warm is no case; give cold,edges,hits,batches,chunked or none"),
        (["--variants", "eager,eager"], "give each variant once"),
        (["--variants", "fast"], "fast is no variant; there are eager, prefill-graph, plugin, plugin+prefill-graph"),
        (["--toggle", "--decode", "4", "--compare", "warm"], "--compare 'warm': warm is no case"),
        (["--decode", "4"], "--decode needs --toggle"),
        (["--profile"], "--profile needs --toggle"),
        (["--toggle", "--repeats", "3"], "--repeats needs --decode"),
        (["--output-tokens", "1"], "--output-tokens needs --throughput"),
        (["--toggle", "--throughput"], "--throughput does not go with --toggle"),
        (["--engine-args", "[]"], "--engine-args '[]': give an object"),
        (["--engine-args", "{"], "--engine-args '{' is not JSON"),
        (["--engine-args", '{"cuda_graph_backend_prefill": "x"}'], "in which the variants differ"),
        (["--busy", "x"], "--busy 'x': give token counts"),
        (["--breakdown", "--lengths", "0"], "--lengths '0': give token counts"),
        (["--model", "/nowhere"], "--model /nowhere: no config.json there"),
        (["--redraw", "/nowhere"], "no bench.json there"),
        (["--out", "/dev/null/x"], "--out /dev/null/x: Not a directory"),
    ],
)
def test_bad_arguments_are_named(refusal: Refusal, arguments: list[str], problem: str, tmp_path: Path) -> None:
    out = [] if "--out" in arguments else ["--out", str(tmp_path)]
    assert problem in refusal("--gpu", *out, *arguments)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--toggle", "--engine-args", "{}"], "torch sees no CUDA GPU, and without one the benchmark takes"),
        (["--toggle", "--no-warm-process"], "not --toggle, --no-warm-process; --gpu starts servers all the same"),
        (["--cpu", "--gpu"], "--cpu does not go with --gpu"),
        (["--cpu", "--requests", "3", "--cases", "warm"], "--cpu does not go with --cases: it takes --requests"),
    ],
)
def test_options_for_servers_are_refused_without_a_gpu(
    refusal: Refusal, arguments: list[str], problem: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "_has_gpu", lambda: False)
    assert problem in refusal("--out", str(tmp_path / "out"), *arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["--requests", "0"], ["--cpu", "--redraw", "x"], ["--limit", "soon"]])
def test_bad_numbers_and_two_modes_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", *arguments])
    assert end.value.code == 2
    assert "sglang-dsv4-graphs bench: error:" in capsys.readouterr().err
