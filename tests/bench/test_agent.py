"""The agent in a real serving process on the CPU: its orders do what they say and leave nothing behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_dsv4_graphs.bench import agent
from sglang_dsv4_graphs.bench.errors import BenchError
from sglang_dsv4_graphs.bench.orders import SOCKET_ENV, Agents
from tests.replay.server import DECODER_REPLAY, FULL_LAYER, Server, Servers

pytestmark = [pytest.mark.engine]


@pytest.fixture(scope="module")
def server(server_path: str) -> Iterator[Server]:
    pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch, Servers() as servers:
        patch.setenv(SOCKET_ENV, server_path)
        patch.setattr("sglang_dsv4_graphs.bench.checks.CHURN", 12)
        patch.setattr("sglang_dsv4_graphs.bench.checks._GARBAGE_MIB", 2)
        found = servers.own(extensions=[agent])
        found.agents = Agents(server_path)
        yield found


def step(server: Server, rows: int, seed: int = 0) -> Any:
    """One cold step; its tail rows."""
    from sglang_dsv4_graphs.cpu_engine import Request

    request = Request.of(rows, seed)
    tail = server.runner.extend([request]).tail.clone()
    server.runner.release(request)
    return tail


def test_banks_go_off_and_on(server: Server) -> None:
    server.agents.order("off")
    assert server.new_counts(lambda: step(server, 40))[1] == {}
    server.agents.order("on")
    replays = server.new_counts(lambda: step(server, 40))[1]
    assert replays == {(FULL_LAYER, 64): 1, (DECODER_REPLAY, 128): 1}
    counts = server.agents.order("counts")["replays"]
    assert [FULL_LAYER, 64, server.served.replays[FULL_LAYER, 64]] in counts


def test_an_unknown_order_is_refused_and_the_agent_goes_on(server: Server) -> None:
    with pytest.raises(BenchError, match=r"could not do 'of'.*no order 'of'; there are breakdown-start.*, on, "):
        server.agents.order("of")
    with pytest.raises(BenchError, match="no breakdown is under way"):
        server.agents.order("breakdown-stop")
    with pytest.raises(BenchError, match="nothing was ordered"):
        server.agents.order("result")
    server.agents.order("on")


def parts_of(server: Server) -> list[Any]:
    return [
        server.bank(name).recording(64 if name == FULL_LAYER else 128)._parts for name in (FULL_LAYER, DECODER_REPLAY)
    ]


def test_a_breakdown_times_every_part_changes_no_output_and_leaves_nothing(server: Server) -> None:
    import torch

    def patched() -> list[set[str]]:
        bank = server.bank(FULL_LAYER)
        owners = (server.runner, server.runner.attn_backend, server.served, bank, bank._statics)
        return [set(vars(owner)) for owner in owners] + [{str(id(p)) for p in parts} for parts in parts_of(server)]

    plain, before, state = step(server, 50), patched(), server.state()
    server.load_state(state)
    server.agents.order("breakdown-start")
    assert patched() != before
    with pytest.raises(BenchError, match="a breakdown is under way"):
        server.agents.order("gpu-busy")
    timed = step(server, 50)
    taken = server.agents.order("breakdown-stop")
    assert patched() == before
    assert torch.equal(plain, timed)
    step(server, 50)  # is not counted any more
    (only,) = taken["steps"]
    assert only["rows"] == 50
    assert 0 < taken["timer_us"] < 50
    counts = {(r["bank"], r["part"], r["kind"]): r["count"] for r in only["spent"]}
    for bank in (FULL_LAYER, DECODER_REPLAY):
        recording = server.bank(bank).recording(64 if bank == FULL_LAYER else 128)
        assert counts[bank, "segments", None] == recording.segments
        assert sum(n for (b, part, _), n in counts.items() if (b, part) == (bank, "break")) == recording.breaks
        for part in ("guard", "range", "copy-in", "hand-off"):
            assert counts[bank, part, None] == 1, part
    # The K store is part of the segments.
    assert sum(n for (_, _, kind), n in counts.items() if kind == "attention") == server.runner.shape.layers
    assert {kind for _, part, kind in counts if part == "break"} == {"attention", "low-ratio sources"}
    assert counts[None, "forward", None] == counts[None, "metadata", None] == counts[None, "loop", None] == 1


def test_gpu_time_needs_a_gpu(server: Server) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    server.agents.order("gpu-busy")
    step(server, 40)
    assert server.agents.order("result") == {"value": None}
    assert "forward" not in vars(server.runner)


def checked(server: Server, into: Path, rows: list[int]) -> dict[str, Any]:
    server.agents.order("checks", into=str(into), rows=rows)
    step(server, 40)
    report = server.agents.order("result")["value"]
    assert json.loads(into.read_text()) == report
    return report


def test_checks_find_replays_equal_and_churn_harmless(server: Server, tmp_path: Path) -> None:
    report = checked(server, tmp_path / "checks.json", [1, 64, 65, 200])
    assert list(report) == [FULL_LAYER, DECODER_REPLAY]
    # 0.5.22's late range cannot be run twice in one step.
    twice = [name for name, bank in report.items() if "skipped" not in bank]
    assert twice == list(report) or server.installation.runtime.engine.release == "0.5.22"
    assert FULL_LAYER in twice
    for bank in (report[name] for name in twice):
        assert [row["rows"] for row in bank["rows"]] == [1, 64, 65, 200]
        assert {row["replay_vs_eager"] for row in bank["rows"]} == {0.0}
        assert {row["eager_vs_eager"] for row in bank["rows"]} == {0.0}
        assert all(row["finite"] and row["mean_abs"] > 0 for row in bank["rows"])
        churn = bank["churn"]
        assert sum(r["compared"] for r in churn["eager_equals_itself"]["rows"]) == churn["replays"] - 4
        assert churn["eager_equals_itself"]["largest_difference"] == 0.0
        assert churn["eager_differs_from_itself"]["rows"] == []
    if DECODER_REPLAY in twice:
        assert {row["requests"] for row in report[DECODER_REPLAY]["rows"]} == {1, 2}


def test_checks_find_a_wrong_replay(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = server.bank(FULL_LAYER)
    replay, drift = bank.replay, iter(range(1, 1000))

    def wrong(bucket: int, live: Any, batch: Any) -> Any:
        outputs = replay(bucket, live, batch)
        outputs.residual[-1, 0, 0] += next(drift)
        return outputs

    monkeypatch.setattr(bank, "replay", wrong)
    report = checked(server, tmp_path / "checks.json", [64])
    (row,) = report[FULL_LAYER]["rows"]
    assert row["replay_vs_eager"] >= 1
    assert row["eager_vs_eager"] == 0.0
    assert report[FULL_LAYER]["churn"]["eager_equals_itself"]["largest_difference"] >= 1
    assert all(row["replay_vs_eager"] == 0.0 for row in report[DECODER_REPLAY]["rows"])


def test_rows_whose_eager_differs_from_itself_are_listed_apart(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = server.bank(FULL_LAYER)
    run, drift = bank.run_eagerly, iter(range(1, 1000))

    def unsteady(bucket: int, live: Any, batch: Any) -> Any:
        outputs = run(bucket, live, batch)
        if live.rows == 65:
            outputs.residual[0, 0, 0] += next(drift)
        return outputs

    monkeypatch.setattr(bank, "run_eagerly", unsteady)
    report = checked(server, tmp_path / "checks.json", [64, 65])[FULL_LAYER]
    churn = report["churn"]
    steady, unsteady_row = report["rows"]
    assert "apart" not in steady
    # Eager runs that drift from 1 on, one by one, where replays stand still: the first row lies apart, if any does.
    assert (unsteady_row["apart"]["answers"], unsteady_row["apart"]["row"]) == (8, 0)
    assert [r["rows"] for r in churn["eager_equals_itself"]["rows"]] == [64]
    assert [r["rows"] for r in churn["eager_differs_from_itself"]["rows"]] == [65]


def test_an_order_that_fails_does_not_end_the_step(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    right = step(server, 40)
    monkeypatch.setattr(server.bank(FULL_LAYER), "check", lambda *args, **kwargs: 1 / 0)
    server.agents.order("checks", into=str(tmp_path / "x"), rows=[64])
    server.agents.order("off")
    assert torch.allclose(step(server, 40), right, atol=1e-4)
    server.agents.order("on")
    with pytest.raises(BenchError, match="ZeroDivisionError"):
        server.agents.order("result")


def test_shutting_down_closes_the_socket_and_takes_timers_away(socket_path: str) -> None:
    pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch, Servers() as servers:
        patch.setenv(SOCKET_ENV, socket_path)
        server = servers.own(extensions=[agent])
        Agents(socket_path).order("breakdown-start")
        server.installation.undo()
        assert "forward" not in vars(server.runner)
        with pytest.raises(BenchError, match="no agent listens"):
            Agents(socket_path).order("on")
