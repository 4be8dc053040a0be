"""The demo passes where replays are right, and fails where they are not.

The engine ones run the command as a person does, in a process of its own.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sglang_dsv4_graphs.demo import gpu, report, serve, served_model, steps
from sglang_dsv4_graphs.demo.layer_calls import LayerCalls
from sglang_dsv4_graphs.demo.preflight import DemoError
from sglang_dsv4_graphs.demo.report import BankPart, StepReport
from tests.distributions import PLUGIN, install_distribution
from tests.fresh import in_fresh_process
from tests.replay.server import DECODER_REPLAY_CAP, FULL_LAYER_CAP

ROOT = Path(__file__).resolve().parent.parent
LADDER = (64, 128, 256, 384)
BANKS = ["full-layer", "decoder-replay"]


# The plan


def test_plan_meets_every_edge_of_the_ladder() -> None:
    planned = steps.plan(LADDER)
    rows = {step.rows for step in planned}
    assert len(planned) >= 12
    assert {1, 63, 64, 65, 384, 385} <= rows
    assert {len(step.parts) for step in planned} >= {1, 2, 3, 8}
    assert any(step.image for step in planned)


def test_plan_has_prefix_hits_of_odd_and_even_prefixes() -> None:
    done: dict[str, int] = {}
    prefixes = set()
    for step in steps.plan(LADDER):
        for name, tokens in step.parts:
            prefixes |= {done[name] % 2} if name in done else set()
            done[name] = done.get(name, 0) + tokens
    assert prefixes == {0, 1}
    assert steps.prompt_lengths(steps.plan(LADDER)) == done


@pytest.mark.parametrize("ladder", [(), (64,), (4, 8)])
def test_plan_refuses_a_ladder_without_edges(ladder: Sequence[int]) -> None:
    with pytest.raises(ValueError, match="need two buckets"):
        steps.plan(ladder)


def test_plan_of_other_ladders_has_no_empty_step() -> None:
    for ladder in ((16, 17), (64, 128), (128, 256, 512)):
        assert all(tokens > 0 for step in steps.plan(ladder) for _, tokens in step.parts)


def test_parts_are_told_apart() -> None:
    assert steps.describe_parts([0, 0], [40, 21]) == "40+21"
    assert steps.describe_parts([63, 0], [42, 5]) == "42@63+5"
    assert steps.describe_parts([1, 0, 5, 0], [1, 1, 1, 1]) == "4 (2 hits)"


# The report


def good_report(number: int = 1, **changes: Any) -> StepReport:
    parts = {name: BankPart(64, 0.0) for name in BANKS}
    values: dict[str, Any] = {"parts": parts, "calls_without": 7, "whole": 1e-6} | changes
    return StepReport(number, "one row", "1", 1, 1, **values)


def test_a_good_report_passes() -> None:
    reports = [good_report(), good_report(2, parts={}, reasons=("all: multimodal input",), calls_with=7)]
    assert report.problems(reports, BANKS) == []
    last = report.summary(reports, BANKS, [])
    assert last.startswith("demo: passed: 2 steps, 2 replays of 2 bank(s), largest difference to eager 0, 1 steps")
    assert "7 of 14 layer calls saved" in last


@pytest.mark.parametrize(
    ("changes", "banks", "problem"),
    [
        ({"parts": {"full-layer": BankPart(64, 1e-30)}}, ["full-layer"], "full-layer differs from eager by 1e-30"),
        ({"parts": {"full-layer": BankPart(64, float("nan"))}}, ["full-layer"], "differs from eager by nan"),
        ({"parts": {"full-layer": BankPart(64, None)}}, ["full-layer"], "replayed and was not compared"),
        ({"whole": 0.01}, BANKS, "the whole step differs by 0.01"),
        ({"whole": float("nan")}, BANKS, "the whole step differs by nan"),
        ({}, [*BANKS, "third"], "third never replayed"),
        ({"parts": {}}, [], "no bank was captured"),
    ],
)
def test_whatever_does_not_hold_is_named(changes: dict[str, Any], banks: list[str], problem: str) -> None:
    reports = [good_report(**changes)]
    (found,) = report.problems(reports, banks)
    assert problem in found
    assert report.summary(reports, banks, [found]) == f"demo: FAILED: {found}"


def test_table_has_a_column_per_bank_and_the_reason() -> None:
    reports = [good_report(), good_report(2, parts={"x": BankPart(128, 0.5)}, reasons=("full-layer: no rows",))]
    titles, _, first, second = report.table(reports, ["full-layer", "x"]).splitlines()
    assert re.split(r"  +", titles)[4:9] == ["tail", "full-layer", "diff.", "x", "diff."]
    assert re.split(r"  +", first.strip())[5:11] == ["replay 64", "0", "eager", "-", "7 of 7", "1.0e-06"]
    assert re.split(r"  +", second.strip())[5:9] == ["eager", "-", "replay 128", "0.5"]
    assert second.endswith("full-layer: no rows")


def test_layer_calls_are_counted_at_either_entry() -> None:
    class Layer:
        def forward(self, x: int) -> int:
            return x + 1

        def forward_hc_pre_from_prev(self, *, state: int) -> int:
            return state + 2

    one, other = Layer(), Layer()
    calls = LayerCalls([one, other])
    assert (one.forward(1), other.forward_hc_pre_from_prev(state=1)) == (2, 3)
    with calls.paused():
        one.forward(1)
    assert calls.count == 2
    one.forward(1)
    assert calls.count == 3


# The demo on a CPU


def rows_of(output: str) -> list[list[str]]:
    """The table's lines, cut where two spaces are."""
    table = output.partition("\n----")[2].splitlines()[1:]
    lines = [line for line in table if re.match(r" *\d+  ", line)]
    return [re.split(r"  +", line.strip()) for line in lines]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder to put on the path; whether the project is installed here does not matter then."""
    return install_distribution(tmp_path / "installed", "sglang-dsv4-graphs", PLUGIN)


@pytest.mark.engine
def test_demo_passes_and_shows_every_step(installed: Path, tmp_path: Path) -> None:
    path = [str(installed), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "sglang_dsv4_graphs", "demo", "--device", "cpu"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Executed general plugin: dsv4_graphs" in done.stdout
    rows = rows_of(done.stdout)
    assert [row[0] for row in rows] == [str(i) for i in range(1, len(steps.plan(LADDER)) + 1)]
    # Both banks replay, at several buckets; every replay was compared and equal.
    full_layer, decoder_replay, saved, reason = 5, 7, 9, 11
    for at in (full_layer, decoder_replay):
        assert {row[at + 1] for row in rows if row[at] != "eager"} == {"0"}
        assert {row[at + 1] for row in rows if row[at] == "eager"} == {"-"}
    assert {row[full_layer] for row in rows} == {"eager", *(f"replay {bucket}" for bucket in LADDER)}
    assert {row[decoder_replay] for row in rows} == {"eager", "replay 128", "replay 256"}
    assert {row[saved] for row in rows if "eager" not in row} == {"7 of 7"}
    assert {row[saved] for row in rows if row[full_layer] == row[decoder_replay] == "eager"} == {"0 of 7"}
    assert {row[reason] for row in rows if len(row) > reason} == {
        "full-layer: more rows than the largest bucket",
        "decoder-replay: more rows than the largest bucket",
        "all: multimodal input",
    }
    assert re.search(r"^demo: passed: \d+ steps, \d+ replays of 2 bank\(s\)", done.stdout, flags=re.MULTILINE)


def run_three_steps(spoil: str) -> None:
    """In a fresh process: the demo's first steps, after ``spoil`` (a function here) made something wrong."""
    from sglang_dsv4_graphs.cli import main
    from sglang_dsv4_graphs.demo import cpu

    # As few graphs as a plan can be made for; the first steps need no more.
    cpu.SETTINGS |= {FULL_LAYER_CAP: "128", DECODER_REPLAY_CAP: "128"}
    whole = steps.plan
    steps.plan = lambda ladder: whole(ladder)[:3]
    globals()[spoil]()
    sys.exit(main(["demo", "--device", "cpu"]))


def leave_everything_stale() -> None:
    """Nothing is replayed once the server is up, whose startup replays too, and nothing uninstalled."""
    from sglang_dsv4_graphs.bank.sweep import Startup
    from sglang_dsv4_graphs.bank.tape import TapeRecording
    from sglang_dsv4_graphs.hooks.ledger import Ledger

    summary = Startup.summary

    def last_of_startup(startup: Startup) -> None:
        summary(startup)
        TapeRecording.replay = lambda self: None  # type: ignore[method-assign]

    Startup.summary = last_of_startup  # type: ignore[method-assign]
    Ledger.undo = lambda self: None  # type: ignore[method-assign]


def spoil_two_steps() -> None:
    """Step 1 writes KV that no eager step writes, step 3 hands on one wrong number in its last row."""
    from sglang_dsv4_graphs.bank.bank import Bank

    replay = Bank.replay

    def wrong(bank: Any, bucket: int, live: Any, batch: Any) -> Any:
        outputs = replay(bank, bucket, live, batch)
        if bank.name == "full-layer" and live.rows == 1:
            bank.layers._engine.get_attn_backend().token_to_kv_pool.swa[0][5] += 1
        if bank.name == "full-layer" and live.rows == 64:
            outputs.residual[-1, 0, 0] += 0.25
        return outputs

    Bank.replay = wrong  # type: ignore[method-assign]


def spoil_nothing() -> None: ...


@pytest.mark.engine
def test_demo_fails_where_nothing_is_replayed_or_uninstalled(installed: Path) -> None:
    done = in_fresh_process(run_three_steps, "leave_everything_stale", path=[installed], code=1)
    (last,) = re.findall(r"^demo: FAILED: (.*)$", done.output, flags=re.MULTILINE)
    for number in (1, 2, 3):
        assert f"step {number}: full-layer differs from eager" in last
        assert f"step {number}: decoder-replay differs from eager" in last
    assert "still patched: sglang.srt.models.deepseek_v4.DeepseekV4Model.__init__" in last


@pytest.mark.engine
def test_demo_fails_on_a_wrong_slot_and_on_a_wrong_row(installed: Path) -> None:
    done = in_fresh_process(run_three_steps, "spoil_two_steps", path=[installed], code=1)
    (last,) = re.findall(r"^demo: FAILED: (.*)$", done.output, flags=re.MULTILINE)
    assert "step 1: full-layer differs from eager by 1;" in last
    assert re.search(r"step 3: full-layer differs from eager by 0\.25\b", last)
    assert "step 2: full-layer" not in last
    assert "decoder-replay differs" not in last


@pytest.mark.engine
def test_demo_cannot_run_where_the_plugin_is_switched_off(installed: Path) -> None:
    off = {"SGLANG_DSV4_GRAPHS": "0"}
    done = in_fresh_process(run_three_steps, "spoil_nothing", path=[installed], env=off, code=2)
    assert 'dsv4-graphs: eager reason="SGLANG_DSV4_GRAPHS=0"' in done.output
    assert "ours installed nothing" in done.output


# The demo on a GPU, without one


def script(*lines: str, code: int = 0) -> list[str]:
    """A stand-in for a server: prints ``lines`` and ends."""
    body = [f"print({line!r}, flush=True)" for line in lines]
    return [sys.executable, "-c", "\n".join([*body, f"import sys; sys.exit({code})"])]


def row(length: int, *ms: float) -> str:
    return serve.ROW + json.dumps({"length": length, "ms": ms})


CAPTURED = "[2026 TP0] dsv4-graphs: captured bank=total graphs=34"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(gpu, "POLL_S", 0.02)
    return monkeypatch


def servers(monkeypatch: pytest.MonkeyPatch, on: list[str], off: list[str]) -> None:
    """Let the two modes run these commands, each in the environment that belongs to it."""
    given = {"1": on, "0": off}
    check = "import os, sys; sys.exit(os.environ['SGLANG_DSV4_GRAPHS'] != '{}')"

    def measure(command: Sequence[str], environment: dict[str, str], log: Path) -> Any:
        assert command[1:3] == ["-m", "sglang_dsv4_graphs.demo.serve"]
        value = environment["SGLANG_DSV4_GRAPHS"]
        code = check.format(value)
        assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
        return real(given[value], environment, log)

    real = gpu.measure
    monkeypatch.setattr(gpu, "measure", measure)


def test_gpu_demo_prints_medians_of_both_servers(quick: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    on = script("loading", CAPTURED, row(64, 40, 50, 900), row(128, 60, 61, 62))
    servers(quick, on, script(row(64, 100, 120, 101), row(128, 61, 61, 61)))
    assert gpu.run(3) == 0
    out = capsys.readouterr().out
    assert "  dsv4-graphs: captured bank=total graphs=34\n" in out
    assert re.search(r"^ +64 +101\.0 +50\.0 +2\.02$", out, flags=re.MULTILINE)
    assert re.search(r"^ +128 +61\.0 +61\.0 +1\.00$", out, flags=re.MULTILINE)
    assert "medians of 3" in out


def test_gpu_demo_refuses_a_server_without_graphs(quick: pytest.MonkeyPatch) -> None:
    off = script(row(64, 1))
    servers(quick, script('dsv4-graphs: eager reason="why"', row(64, 1)), off)
    with pytest.raises(DemoError, match=r"captured nothing(.|\n)*eager reason"):
        gpu.run(1)


def test_gpu_demo_refuses_a_switch_that_does_nothing(quick: pytest.MonkeyPatch) -> None:
    both = script(CAPTURED, row(64, 1))
    servers(quick, both, both)
    with pytest.raises(DemoError, match="captured all the same"):
        gpu.run(1)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (script("out of memory", code=3), r"ended with code 3(.|\n)*out of memory"),
        (script("nothing to see"), r"ended with code 0(.|\n)*nothing to see"),
        ([sys.executable, "-c", "import time; print('at it', flush=True); time.sleep(60)"], r"within 1 s(.|\n)*at it"),
    ],
    ids=["failed", "measured nothing", "too slow"],
)
def test_a_server_that_measured_nothing_is_an_error(
    quick: pytest.MonkeyPatch, tmp_path: Path, command: list[str], problem: str
) -> None:
    with pytest.raises(DemoError, match=problem):
        gpu.measure(command, {}, tmp_path / "log", limit_s=1)


def test_what_a_server_leaves_running_is_ended(quick: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = "import time; time.sleep(60)"
    start = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {child!r}]); print('child', p.pid)"
    command = [sys.executable, "-c", f"{start}\nprint({row(64, 1)!r}, flush=True)"]
    measured = gpu.measure(command, {}, tmp_path / "log")
    (pid,) = re.findall(r"child (\d+)", measured.log)
    state = Path(f"/proc/{pid}/stat")
    # Gone, or a zombie that nobody has collected yet.
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.engine
def test_the_engine_takes_the_server_s_arguments() -> None:
    from sglang.srt.server_args import ServerArgs

    known = set(inspect.signature(ServerArgs).parameters)
    assert set(serve.engine_arguments("model")) - known == set()


@pytest.mark.engine
def test_the_engine_reads_the_served_model(tmp_path: Path) -> None:
    from sglang_dsv4_graphs.cpu_engine.torchvision_shim import ensure_torchvision

    ensure_torchvision()
    from sglang.srt.utils.hf_transformers_utils import get_config

    served_model.write_config(tmp_path)
    config = get_config(str(tmp_path), trust_remote_code=False)
    text = getattr(config, "text_config", config)
    assert text.num_hidden_layers == len(text.compress_ratios) == 40
    assert text.compress_ratios[:3] == [0, 0, 2]
    assert text.compress_ratios[19:21] == [2, 1]
    assert text.kv_source_layer_ids == [2, 8, 14, 20]
    assert text.index_source_layer_ids == [2, 8, 14, 20, 24, 28, 32, 36]
    assert max(gpu.LENGTHS) <= serve.CHUNK <= text.max_position_embeddings
