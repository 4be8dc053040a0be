"""The startup sweep on a small model: growing, guards, memory, the rehearsal, the summary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.backend import CaptureError  # noqa: E402
from sglang_dsv4_graphs.bank.capture_run import CaptureRun  # noqa: E402
from sglang_dsv4_graphs.bank.tape import TapeBackend  # noqa: E402
from tests.bank.small_model import LATE, LAYERS, World  # noqa: E402
from tests.bank.small_sweep import BUCKETS, OtherRank, Sweep  # noqa: E402


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("in_graph", [False, True])
def test_banks_are_told_how_to_break(lean: bool, in_graph: bool) -> None:
    s = Sweep(World(lean_breaks=lean), store_in_graph=in_graph)
    engine, slots, shared = s.world.engine, [], []
    engine.window_slots = lambda batch: batch.out_cache_loc  # type: ignore[attr-defined]
    engine.storing_into = lambda given: slots.append(given) or nullcontext()  # type: ignore[method-assign]
    engine.sharing = lambda given: shared.append(given) or nullcontext()  # type: ignore[method-assign]
    bank = s.captured()
    assert [given is not None for given in slots] == [in_graph] * len(BUCKETS)
    s.startup.visit(bank, s.world.batch([4]), lambda live, batch: bank.replay(4, live, batch))
    assert [given is not None for given in shared] == [lean]


def test_growing_is_one_eager_step_of_the_largest_kind() -> None:
    s = Sweep(World(), chunk=24)
    s.world.model.decoder_replay_tail = tail = object()
    s.startup.grow()
    assert s.dummies.runs == [("layers", 24)]
    assert [layer.calls for layer in s.world.model.layers] == [1] * LAYERS
    assert s.world.model.seen_tails == [None]  # the engine's tail graphs are not captured in passing
    assert s.world.model.decoder_replay_tail is tail
    s.dummies.most_rows = 10
    s.startup.grow()
    assert s.dummies.runs[1:] == [("layers", 10)]


@pytest.mark.parametrize(
    ("chunk", "setting", "rows"),
    [(4096, -1, 4096), (4096, 8192, 4096), (None, -1, 8192), (0, 16384, 16384), (-1, 0, 8192)],
)
def test_the_largest_step(chunk: int | None, setting: int, rows: int) -> None:
    assert Sweep(World(full_layer_max_tokens=setting), chunk=chunk).startup.largest_step == rows


@pytest.mark.parametrize(("late", "cap", "rows"), [(False, 2048, 200), (True, 2048, 256), (True, 128, 200)])
def test_growing_covers_the_largest_dummy_step_of_a_tail(late: bool, cap: int, rows: int) -> None:
    """Tails are captured in whole steps of 128 rows, which may be more than the chunk."""
    s = Sweep(World(late=late, decoder_replay_max_rows=cap), chunk=200)
    s.startup.grow()
    assert s.dummies.runs == [("layers", rows)]
    assert s.startup.largest_tail == 256
    s.dummies.most_requests = 1
    assert s.startup.largest_tail == 128


def test_nothing_is_captured_before_growing() -> None:
    with pytest.raises(CaptureError, match=r"grow\(\) comes before captures"):
        Sweep(World()).startup.make_bank("full-layer", 0, LATE, BUCKETS)


def test_each_range_has_a_guard_made_when_workspaces_have_grown() -> None:
    s = Sweep(World())
    s.startup.grow()
    s.startup.open()
    assert s.guards == []
    ranges = {"one": (0, LATE), "two": (LATE, LAYERS), "three": (0, LATE)}
    banks = [s.startup.make_bank(name, first, last, BUCKETS) for name, (first, last) in ranges.items()]
    assert s.guards == [(0, LATE), (LATE, LAYERS)]
    assert banks[0].guard is banks[2].guard is not banks[1].guard
    assert s.startup.banks == banks


def test_a_bank_waits_for_its_device_before_it_is_retired() -> None:
    s = Sweep(World())
    bank = s.captured()
    waits = s.device.waits
    bank.retire("because")
    assert s.device.waits == waits + 1


def test_what_went_with_the_last_collection_is_settled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken-off capture's graph lives in its error's frames until garbage is collected."""
    s = Sweep(World())
    s.captured()
    at: list[int] = []
    monkeypatch.setattr(TapeBackend, "settle", lambda self: at.append(s.device.releases))
    s.startup.abandon("startup failed: no room")
    assert at[-1] == s.device.releases


def test_a_rank_that_failed_leaves_no_graph_and_no_step_path() -> None:
    s = Sweep(World())
    bank = s.captured()
    releases = s.device.releases
    s.startup.abandon("startup failed: no room")
    assert (bank.buckets, bank.retired) == ((), "startup failed: no room")
    assert (s.startup.banks, s.startup._guards) == ([], {})
    assert s.device.releases == releases + 1


def test_a_dummy_step_is_run_where_every_rank_could_build_one() -> None:
    ranks = OtherRank()
    s = Sweep(World(), ranks=ranks)
    ranks.says = lambda kind, text: ("failed", "ValueError: no slots") if len(ranks.messages) == 2 else None
    failure = ranks.together("begin", s.startup.grow)
    assert str(failure) == "rank 1: ValueError: no slots"
    assert s.dummies.runs == []


def test_the_rehearsal_runs_everything_on_the_serving_stream() -> None:
    s = Sweep(World())
    s.dummies.most_rows = 60
    open_during: list[bool] = []
    run = s.dummies.run_whole
    s.dummies.run_whole = lambda batch: open_during.append(s.world.served.ready) or run(batch)  # type: ignore[method-assign]
    s.world.served.ready = False
    s.startup.rehearse("stream")
    assert s.dummies.runs == [("whole", 3), ("whole", 60)]
    assert (open_during, s.world.served.ready) == ([True, True], False)
    assert s.device.streams == ["stream"]
    assert not s.world.served.rehearsing


def test_the_rehearsal_runs_each_kind_of_step() -> None:
    s = Sweep(World())
    s.captured()
    s.dummies.runs.clear()
    served, seen = s.world.served, []
    run = s.dummies.run_whole
    s.dummies.run_whole = lambda batch: seen.append((served.ready, served.rehearsing)) or run(batch)  # type: ignore[method-assign]
    s.startup.rehearse("stream")
    # A few rows, the largest bucket, and a tail of one request.
    assert s.dummies.runs == [("whole", 3), ("whole", 16), ("whole", 128)]
    assert seen == [(True, True)] * 3
    assert not served.ready
    assert not served.rehearsing


def test_the_summary_counts_memory_and_graphs_of_all_banks(lines: Callable[[], list[str]]) -> None:
    s = Sweep(World())
    s.device.free = 10 << 30
    s.captured()
    s.device.free = 8 << 30
    s.startup.release()
    # What the rehearsal allocates is not the graphs'.
    s.device.free = 5 << 30
    s.startup.summary()
    assert lines()[-1].startswith(
        f"dsv4-graphs: captured bank=total graphs=3 segments={3 * (LATE + 1)} gib=2.000 "
        "free_gib_before=10.000 free_gib_after=8.000 seconds="
    )


def test_a_bank_is_charged_with_what_a_release_does_not_give_back(
    lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = Sweep(World())
    s.device.free = 10 << 30
    release = s.device.release
    s.startup.open()
    assert s.device.releases == 1

    def given_back() -> None:
        release()
        s.device.free = 9 << 30

    def capture(*args: Any) -> str:
        # The warm-ups leave three more in the allocator's cache.
        s.device.free = 6 << 30
        return ""

    s.startup.grow()
    bank = s.startup.make_bank("full-layer", 0, LATE, (4,))
    monkeypatch.setattr(s.device, "release", given_back)
    monkeypatch.setattr(CaptureRun, "one", capture)
    monkeypatch.setattr("sglang_dsv4_graphs.bank.capture_run.bucket_values", lambda bank, rows: {})
    monkeypatch.setattr("sglang_dsv4_graphs.bank.sweep.bank_values", lambda bank, seconds, used: {"used": used})
    s.startup.capture_all(bank, s.dummies.batch)
    used = int(lines()[-1].removeprefix("dsv4-graphs: captured used="))
    assert 0.9 < used / (1 << 30) < 1.1
