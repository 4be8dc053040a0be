"""Trials on all ranks alike, and what they leave of a ladder."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank import capture_run, sweep, trial_run  # noqa: E402
from sglang_dsv4_graphs.bank.bank import Bank  # noqa: E402
from sglang_dsv4_graphs.bank.capture_run import CaptureRun  # noqa: E402
from sglang_dsv4_graphs.bank.trial import Trial  # noqa: E402
from sglang_dsv4_graphs.bank.trial_run import TrialRun  # noqa: E402
from tests.bank.small_model import LATE, World  # noqa: E402
from tests.bank.small_sweep import BUCKETS, OUT_OF_MEMORY, OtherRank, Sweep  # noqa: E402


class Scripted:
    """Trial times by bucket: (eager, replayed), and those of several requests."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, times: dict[int, tuple[float, float]], several: tuple[float, float]
    ) -> None:
        self.tried: list[tuple[int, int]] = []
        self.times, self.several = times, several
        monkeypatch.setattr(TrialRun, "try_bucket", lambda _, bucket, requests=1: self.try_bucket(bucket, requests))

    def try_bucket(self, bucket: int, requests: int) -> Trial:
        self.tried.append((bucket, requests))
        times = self.times[bucket] if requests == 1 else self.several
        return Trial(bucket, bucket - 1, *times, requests)


def test_the_ladder_ends_where_replays_stop_paying(
    lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_run, "largest_winner", lambda buckets, run: (8, [run(16), run(8)]))
    s = Sweep(World(), cuda=True)
    scripted = Scripted(monkeypatch, {16: (1.0, 2.0), 8: (1.0, 0.5)}, several=(1.0, 1.01))
    bank = s.captured(trim=True)
    assert scripted.tried == [(16, 1), (8, 1), (16, 4)]
    assert bank.planned == bank.buckets == (4, 8)
    assert bank.largest_for_few is None
    assert 'dsv4-graphs: trimmed bank=full-layer rows=16..16 reason="eager is as fast there"' in lines()
    trial = "dsv4-graphs: trial bank=full-layer bucket=16 rows=15 requests=1 eager_s=1.000 replayed_s=2.000"
    assert trial in lines()


def test_larger_buckets_stay_for_steps_of_several_requests(
    lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_run, "largest_winner", lambda buckets, run: (4, [run(16)]))
    s = Sweep(World(), cuda=True)
    scripted = Scripted(monkeypatch, {16: (1.0, 2.0)}, several=(1.0, 0.5))
    bank = s.captured(trim=True)
    assert scripted.tried == [(16, 1), (16, 4)]
    assert bank.buckets == BUCKETS
    assert "dsv4-graphs: several bank=full-layer rows=8..16 requests=4" in lines()
    assert "dsv4-graphs: trial bank=full-layer bucket=16 rows=15 requests=4 eager_s=1.000 replayed_s=0.500" in lines()
    assert not any("trimmed" in line for line in lines())
    assert [bank.pays(b, n) for b, n in ((4, 1), (8, 1), (8, 3), (8, 4), (16, 9))] == [True, False, False, True, True]
    # The rehearsal's steps are of one request each: a bucket that such a step never takes is none of its kinds.
    s.dummies.runs.clear()
    s.startup.rehearse("stream")
    assert s.dummies.runs == [("whole", 3), ("whole", 4), ("whole", 128)]


@pytest.mark.parametrize(("slots", "kept"), [(3, (4,)), (4, BUCKETS)])
def test_a_server_without_slots_for_several_requests_keeps_nothing_for_them(
    monkeypatch: pytest.MonkeyPatch, slots: int, kept: tuple[int, ...]
) -> None:
    monkeypatch.setattr(trial_run, "largest_winner", lambda buckets, run: (4, [run(16)]))
    s = Sweep(World(), cuda=True)
    s.dummies.most_requests = slots
    scripted = Scripted(monkeypatch, {16: (1.0, 2.0)}, several=(1.0, 0.5))
    assert s.captured(trim=True).buckets == kept
    assert scripted.tried == ([(16, 1)] if slots < 4 else [(16, 1), (16, 4)])


@pytest.mark.parametrize("fails_at", BUCKETS)
def test_buckets_for_several_requests_cost_no_other_its_graph(
    lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """They come first, being larger: on a server short of memory they would take the room of those for every step."""
    monkeypatch.setattr(trial_run, "largest_winner", lambda buckets, run: (8, [run(16)]))
    s = Sweep(World(), cuda=True)
    Scripted(monkeypatch, {16: (1.0, 2.0)}, several=(1.0, 0.5))
    fails: dict[int, Exception] = {fails_at: OUT_OF_MEMORY}
    # What was dropped has made room.
    s.device.release = lambda: fails.clear() if s.startup.banks else None  # type: ignore[method-assign]
    bank = s.captured(trim=True, fails=fails)
    assert bank.planned == bank.buckets == (4, 8)
    assert bank.largest_for_few is None
    warned = [line for line in lines() if "capture-failed" in line or "trimmed" in line]
    assert len(warned) == 2
    assert warned[1] == f'dsv4-graphs: trimmed bank=full-layer rows=16..16 reason="{capture_run.NO_ROOM_FOR_SEVERAL}"'
    # What stays still reads what the bank owns.
    world, batch, replayed = s.world, s.world.batch([5]), []
    before = world.caches()
    s.startup.visit(bank, batch, lambda live, b: replayed.append(bank.replay(8, live, b).cloned()) or replayed[-1])
    world.set_caches(before)
    world.model.end_layer = LATE
    assert torch.allclose(replayed[0].residual, world.run(batch, plain=True)[0], atol=1e-6)


def test_a_ladder_that_fails_without_them_too_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_run, "largest_winner", lambda buckets, run: (8, [run(16)]))
    s = Sweep(World(), cuda=True)
    Scripted(monkeypatch, {16: (1.0, 2.0)}, several=(1.0, 0.5))
    bank = s.captured(trim=True, fails={4: OUT_OF_MEMORY})
    assert bank.buckets == (8,)


def test_a_lost_trial_of_several_requests_is_no_reason_for_where_the_ladder_ends(
    lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_run, "largest_winner", lambda buckets, run: (4, [run(16)]))
    s = Sweep(World(), cuda=True)
    Scripted(monkeypatch, {16: (1.0, 2.0)}, several=(0.0, float("inf")))
    assert s.captured(trim=True).buckets == (4,)
    assert 'dsv4-graphs: trimmed bank=full-layer rows=8..16 reason="eager is as fast there"' in lines()


def test_a_trial_of_several_requests_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    s = Sweep(World(), cuda=True)
    bank = s.captured()
    asked: list[tuple[int, ...]] = []
    batch = s.dummies.batch
    s.dummies.batch = lambda *args: asked.append(args) or batch(*args)  # type: ignore[method-assign]
    trial = TrialRun(s.startup, bank, s.dummies.batch).try_bucket(16, 4)
    assert (trial.bucket, trial.rows, trial.requests) == (16, 9, 4)
    # Captured as buckets are, raced with four requests.
    assert asked == [(16,), (9, 3)]


@pytest.mark.parametrize(("cuda", "trim"), [(False, True), (True, False)])
def test_the_ladder_is_kept_where_nobody_asks_or_time_means_nothing(
    cuda: bool, trim: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_run, "largest_winner", lambda buckets, run: (4, [run(16)]))
    s = Sweep(World(), cuda=cuda)
    scripted = Scripted(monkeypatch, {16: (1.0, 2.0)}, several=(1.0, 2.0))
    assert s.captured(trim=trim).buckets == BUCKETS
    assert scripted.tried == []


@pytest.mark.parametrize(("other", "wins"), [("9.0 0.1", True), ("9.0 5.0", False), ("1.0 0.1", False)])
def test_a_trial_takes_the_slowest_replay_and_the_fastest_eager_run(
    other: str, wins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = OtherRank()
    s = Sweep(World(), cuda=True, ranks=ranks)
    bank = ranks.inside(s.captured)
    # Eager runs and replays alternate: 3 s and 2 s here.
    s.device.times = lambda n: 3.0 if n % 2 else 2.0
    # The last meeting of a trial exchanges times; the ones before it have no text or memory.
    ranks.says = lambda kind, text: ("meet", other) if "." in text else None
    made: list[Bank] = []
    monkeypatch.setattr(sweep, "Bank", lambda **options: made.append(Bank(**options)) or made[-1])
    released: list[tuple[int, ...]] = []
    s.device.release = lambda: released.extend(b.buckets for b in made)  # type: ignore[method-assign]
    trial = ranks.inside(lambda: TrialRun(s.startup, bank, s.dummies.batch).try_bucket(8))
    assert ("meet", "3.0 2.0") in ranks.messages
    assert (trial.bucket, trial.rows) == (8, 5)
    assert trial.wins is wins
    assert bank.buckets == BUCKETS
    assert released == [()]  # the trial's own graph is gone before memory is given back


def test_a_trial_that_cannot_be_captured_loses_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for here, there in ((False, True), (True, False)):
        ranks = OtherRank()
        s = Sweep(World(), cuda=True, ranks=ranks)
        bank = ranks.inside(s.captured)
        if there:
            ranks.says = lambda kind, text: ("failed", "OutOfMemoryError: no room") if kind == "done" else None
        if here:
            monkeypatch.setattr(CaptureRun, "one", lambda *args: "OutOfMemoryError: no room")
        s.device.seconds = lambda call: pytest.fail("raced alone")  # type: ignore[method-assign]
        trials: list[Trial] = []

        def run(s: Sweep = s, bank: Bank = bank, trials: list[Trial] = trials) -> None:
            trials.append(TrialRun(s.startup, bank, s.dummies.batch).try_bucket(8))

        ranks.together("startup", run)
        assert not trials[0].wins


def test_a_race_that_fails_on_one_rank_is_lost_on_all(lines: Callable[[], list[str]]) -> None:
    s = Sweep(World(), cuda=True)
    bank = s.captured()

    def seconds(call: Callable[[], object]) -> float:
        raise RuntimeError("illegal address")

    s.device.seconds = seconds  # type: ignore[method-assign]
    trial = TrialRun(s.startup, bank, s.dummies.batch).try_bucket(8, 4)
    assert (trial.wins, trial.requests) == (False, 4)
    failed = 'trial-failed bank=full-layer bucket=8 reason="rank 0: RuntimeError: illegal address"'
    assert lines()[-1] == f"dsv4-graphs: {failed}"
