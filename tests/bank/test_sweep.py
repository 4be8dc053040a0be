"""The startup sweep on a small model: the order of things, what a failure keeps, and that all ranks keep the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank import sweep, trial_run  # noqa: E402
from sglang_dsv4_graphs.bank.backend import CaptureError  # noqa: E402
from sglang_dsv4_graphs.bank.bank import Bank  # noqa: E402
from sglang_dsv4_graphs.bank.engine_tail import drive_engine_tail, open_engine_tail  # noqa: E402
from sglang_dsv4_graphs.bank.guard import AddressGuard  # noqa: E402
from sglang_dsv4_graphs.bank.ranks import RankError, Ranks  # noqa: E402
from sglang_dsv4_graphs.bank.sweep import Startup  # noqa: E402
from sglang_dsv4_graphs.bank.tape import TapeBackend  # noqa: E402
from sglang_dsv4_graphs.bank.trial import Trial  # noqa: E402
from sglang_dsv4_graphs.bank.trial_run import TrialRun  # noqa: E402
from tests.bank.small_model import LATE, LAYERS, TAIL_ROWS, SmallDummies, World  # noqa: E402

BUCKETS = (4, 8, 16)


class FakeDevice:
    """A device whose free memory falls by 100 bytes a look; plenty of it."""

    def __init__(self, *, is_cuda: bool = False) -> None:
        self.is_cuda = is_cuda
        self.free, self.releases, self.streams = 100 << 30, 0, []
        self.times: Callable[[int], float] = lambda call: 0.0
        self.timed = self.waits = 0

    def free_bytes(self) -> int:
        self.free -= 100
        return self.free

    def room_bytes(self) -> int:
        return self.free

    def release(self) -> None:
        self.releases += 1

    def synchronize(self) -> None:
        self.waits += 1

    def seconds(self, call: Callable[[], object]) -> float:
        call()
        self.timed += 1
        return self.times(self.timed)

    def on(self, stream: Any) -> Any:
        self.streams.append(stream)
        return torch.no_grad()


class OtherRank(Ranks):
    """Rank 0 of two; ``says`` is what the other one answers to (kind, text) of this one's message."""

    def __init__(self, says: Callable[[str, str], tuple[str, str] | None] = lambda kind, text: None) -> None:
        super().__init__(0, 2)
        self.says = says
        self.messages: list[tuple[str, str]] = []

    def swap(self, message: str) -> list[str]:
        kind, depth, place, text = message.split("\x1f", 3)
        self.messages.append((kind, text))
        answer = self.says(kind, text) or (kind, text)
        return [message, "\x1f".join((answer[0], depth, place, answer[1]))]

    def inside(self, part: Callable[[], Any]) -> Any:
        """What ``part`` returns inside a section, as everything of a sweep runs."""
        found: list[Any] = []
        failure = self.together("startup", lambda: found.append(part()))
        if failure is not None:
            raise failure.error or AssertionError(str(failure))
        return found[0]


class Sweep:
    """A sweep over a small world; ``fails`` maps rows to what their capture raises."""

    def __init__(
        self,
        world: World,
        *,
        strict: bool = False,
        ranks: Ranks | None = None,
        chunk: int | None = 16,
        cuda: bool = False,
        store_in_graph: bool = False,
    ) -> None:
        self.world, self.dummies, self.device = world, SmallDummies(world), FakeDevice(is_cuda=cuda)
        self.ranks = ranks or Ranks(0, 1)
        self.guards: list[tuple[int, int]] = []
        self.startup = Startup(
            served=world.served,
            dummies=self.dummies,  # type: ignore[arg-type]
            backend=TapeBackend(world.engine.capture_var, poison=True),
            make_guard=self.make_guard,
            ranks=self.ranks,
            device=self.device,  # type: ignore[arg-type]
            chunk_size=chunk,
            strict=strict,
            store_in_graph=store_in_graph,
        )

    def make_guard(self, first: int, last: int) -> AddressGuard:
        self.guards.append((first, last))
        return AddressGuard([])

    def captured(
        self, first: int = 0, last: int = LATE, fails: dict[int, Exception] | None = None, **options: Any
    ) -> Bank:
        self.startup.grow()
        self.startup.open()
        bank = self.startup.make_bank("full-layer", first, last, BUCKETS)
        real = bank.capture

        def capture(rows: int, *args: Any) -> Any:
            if fails and rows in fails:
                raise fails[rows]
            return real(rows, *args)

        bank.capture = capture  # type: ignore[method-assign]
        length = TAIL_ROWS if first == LATE else None
        self.startup.capture_all(bank, lambda rows: self.dummies.batch(rows, length), **options)
        return bank


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The plugin's log lines so far."""
    caplog.set_level(logging.DEBUG, logger="sglang_dsv4_graphs")
    return lambda: [r.getMessage() for r in caplog.records if r.getMessage().startswith("dsv4-graphs:")]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(3)


def test_the_largest_bucket_comes_first(lines: Callable[[], list[str]]) -> None:
    s = Sweep(World())
    bank = s.captured()
    assert s.dummies.runs == [("layers", 16), ("layers", 16), ("layers", 8), ("layers", 4)]  # the first one grows
    assert bank.buckets == BUCKETS
    *debug, info = lines()
    assert [line.split(" gib")[0] for line in debug] == [
        f"dsv4-graphs: captured bank=full-layer rows={rows} segments={LATE + 1}" for rows in (16, 8, 4)
    ]
    assert info.startswith(
        f"dsv4-graphs: captured bank=full-layer graphs=3 rows=4..16 segments={3 * (LATE + 1)} gib=0.000 seconds="
    )


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


@pytest.mark.parametrize("late", [False, True])
def test_what_was_captured_equals_eager(late: bool) -> None:
    s = Sweep(World(late=late))
    world, bank = s.world, s.captured()
    for rows in (1, 4, 5, 16):
        batch = world.batch([rows])
        before = world.caches()
        calls = [layer.calls for layer in world.model.layers]
        outputs: list[Any] = []

        def replay(live: Any, batch: Any, bank: Bank = bank, outputs: list[Any] = outputs) -> Any:
            bucket = bank.bucket_for(live.rows)
            assert bucket is not None
            outputs.append(bank.replay(bucket, live, batch).cloned())
            return outputs[-1]

        s.startup.visit(bank, batch, replay)
        assert [layer.calls for layer in world.model.layers] == calls  # no layer ran as Python
        world.set_caches(before)
        world.model.end_layer, world.model.late_layer_start = LATE, None
        residual, pre, _ = world.run(batch, plain=True)
        world.model.end_layer, world.model.late_layer_start = LAYERS, LATE if late else None
        assert torch.allclose(outputs[0].residual, residual, atol=1e-6)
        assert torch.allclose(outputs[0].pre, pre, atol=1e-6)


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


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")


@pytest.mark.parametrize(("fails_at", "kept"), [(16, ()), (8, (16,)), (4, (8, 16))])
def test_a_failed_capture_keeps_what_succeeded(
    lines: Callable[[], list[str]], fails_at: int, kept: tuple[int, ...]
) -> None:
    s = Sweep(World())
    bank = s.captured(fails={fails_at: OUT_OF_MEMORY})
    assert bank.buckets == kept
    # After growing, before captures are charged with memory, after the failure, and before the bank's is told.
    assert s.device.releases == 4
    (warning,) = [line for line in lines() if "capture-failed" in line]
    assert warning == (
        f"dsv4-graphs: capture-failed bank=full-layer rows={fails_at} kept={len(kept)} "
        'reason="rank 0: OutOfMemoryError: CUDA out of memory."'
    )
    assert lines()[-1].startswith(f"dsv4-graphs: captured bank=full-layer graphs={len(kept)} ")
    # The server still serves.
    batch = s.world.batch([5])
    before = s.world.caches()
    served = s.world.run(batch)
    s.world.set_caches(before)
    assert torch.equal(served[0], s.world.run(batch, plain=True)[0])


@pytest.mark.parametrize("error", [CaptureError("a host read"), RuntimeError(""), ValueError("8 rows need 9 requests")])
def test_whatever_a_capture_raises_is_contained(lines: Callable[[], list[str]], error: Exception) -> None:
    s = Sweep(World())
    assert s.captured(fails={8: error}).buckets == (16,)
    text = str(error) or "no message"
    assert f'reason="rank 0: {type(error).__name__}: {text}"' in "".join(lines())


def test_a_dummy_step_that_cannot_be_built_is_a_failure() -> None:
    s = Sweep(World())
    real = s.dummies.batch

    def batch(rows: int, request_length: int | None = None) -> Any:
        if rows == 8 and s.startup.banks:
            raise ValueError("8 dummy rows need 9 requests")
        return real(rows)

    s.dummies.batch = batch  # type: ignore[method-assign]
    assert s.captured().buckets == (16,)


def test_a_failed_capture_refuses_a_strict_server() -> None:
    s = Sweep(World(), strict=True)
    with pytest.raises(CaptureError, match="bank=full-layer rows=8: rank 0: OutOfMemoryError: CUDA out of memory"):
        s.captured(fails={8: OUT_OF_MEMORY})


@pytest.mark.parametrize("strict", [False, True])
def test_a_bucket_that_failed_on_another_rank_is_dropped_here(lines: Callable[[], list[str]], strict: bool) -> None:
    done: list[str] = []

    def says(kind: str, text: str) -> tuple[str, str] | None:
        done.extend([kind] if kind == "done" else [])
        return ("failed", "OutOfMemoryError: no room") if kind == "done" and len(done) == 2 else None

    ranks = OtherRank(says)
    s = Sweep(World(), ranks=ranks, strict=strict)
    if strict:
        with pytest.raises(CaptureError, match="rows=8: rank 1: OutOfMemoryError: no room"):
            ranks.inside(s.captured)
    else:
        assert ranks.inside(s.captured).buckets == (16,)
        assert done == ["done"] * 3  # the third is the startup's own: nobody tries the smallest
        assert 'rows=8 kept=1 reason="rank 1: OutOfMemoryError: no room"' in "".join(lines())


def test_a_rank_that_does_not_come_ends_the_sweep() -> None:
    def says(kind: str, text: str) -> None:
        if kind == "done":
            ranks._broken = "rank 0 waited 300 s: nothing came from rank 1"
            raise RankError(ranks._broken)

    ranks = OtherRank(says)
    with pytest.raises(RankError, match="nothing came from rank 1"):
        ranks.inside(Sweep(World(), ranks=ranks).captured)


def test_other_ranks_draw_no_progress_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sweep, "tqdm", lambda rows, desc, disable: shown.append((desc, disable)) or rows)
    for rank in (0, 1):
        s = Sweep(World())
        s.world.served.log.rank = rank
        s.captured()
    # None: a bar where a terminal is attached.
    assert shown == [("Capturing full-layer", None), ("Capturing full-layer", True)]


def test_dspark_collects_every_layer_it_promised() -> None:
    s = Sweep(World())
    s.world.model.dspark_layers_to_capture = [1, 3, 5]
    bank = s.captured()
    assert bank.captured_layers == (1, 3)
    assert bank.buckets == BUCKETS
    calls = [layer.calls for layer in s.world.model.layers]
    s.startup.visit(bank, s.dummies.batch(4), lambda live, batch: bank.replay(4, live, batch))
    # The rest of the model ran too: the step needs layer 5's hidden states.
    assert [a.calls - b for a, b in zip(s.world.model.layers, calls, strict=True)] == [0] * LATE + [1, 1]


@pytest.mark.parametrize("dspark", [False, True])
def test_layers_before_a_range_replay_where_they_have_a_bucket(dspark: bool) -> None:
    s = Sweep(World(late=True))
    world = s.world
    if dspark:
        world.model.dspark_layers_to_capture = [1, 5]
    early, late = s.captured(), s.captured(first=LATE, last=LAYERS)
    early.drop(16)
    found: dict[str, list[Any]] = {"eagerly": [], "replayed": []}
    batches = {rows: s.dummies.batch(rows, TAIL_ROWS) for rows in (3, 8, 10)}
    for way, others in (("eagerly", []), ("replayed", [early])):
        s.startup.banks = [*others, late]
        for rows, batch in batches.items():
            caches, calls = world.caches(), world.model.layers[0].calls

            def visit(live: Any, batch: Any, way: str = way) -> Any:
                found[way] += [live.residual.clone(), live.pre.clone()]
                return late.replay(late.bucket_for(live.rows) or 0, live, batch)

            s.startup.visit(late, batch, visit)
            ran = world.model.layers[0].calls - calls
            assert ran == (way == "eagerly" or rows == 10)
            world.set_caches(caches)
    assert len(found["eagerly"]) == len(found["replayed"]) == 6
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*found.values(), strict=True))


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
    scripted = Scripted(monkeypatch, {16: (1.0, 2.0), 8: (1.0, 0.5)}, several=(1.0, 1.0))
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
    assert warned[1] == f'dsv4-graphs: trimmed bank=full-layer rows=16..16 reason="{sweep.NO_ROOM_FOR_SEVERAL}"'
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


def test_a_trial_that_cannot_be_captured_loses_on_all_ranks() -> None:
    for here, there in ((False, True), (True, False)):
        ranks = OtherRank()
        s = Sweep(World(), cuda=True, ranks=ranks)
        bank = ranks.inside(s.captured)
        if there:
            ranks.says = lambda kind, text: ("failed", "OutOfMemoryError: no room") if kind == "done" else None
        if here:
            s.startup.capture_one = lambda *args: "OutOfMemoryError: no room"  # type: ignore[method-assign]
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


def test_ranks_stop_alike_where_one_has_no_room(lines: Callable[[], list[str]]) -> None:
    """The other rank has 100 MiB left when the second bucket's turn comes."""
    asked: list[str] = []

    def says(kind: str, text: str) -> tuple[str, str] | None:
        asked.extend([text] if len(text.split()) == 2 else [])
        return (kind, f"{100 << 20} 0") if len(asked) == 2 and asked[-1] == text else None

    ranks = OtherRank(says)
    s = Sweep(World(), ranks=ranks, cuda=True)
    assert ranks.inside(s.captured).buckets == (16,)
    (line,) = [line for line in lines() if "capture-failed" in line]
    assert "rows=8 kept=1 " in line
    assert "rank 1 has 0.10 GiB free, a capture of 8 rows takes 0.25" in line


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


class EngineTail:
    """The engine's own tail runner: waits to be told that a full chunk has run."""

    def __init__(self) -> None:
        self.ready_rows: list[int] = []
        self.runner = SimpleNamespace(ready=self.ready_rows.append)


@pytest.mark.parametrize("ours", [True, False])
def test_the_engines_tail_is_driven_where_it_stays_in_charge(ours: bool) -> None:
    s = Sweep(World(late=True), chunk=24)
    s.world.model.decoder_replay_tail = tail = EngineTail()
    if ours:
        bank = s.captured(first=LATE, last=LAYERS)
        assert bank.layers.first == LATE
        assert bank.buckets
    else:
        s.captured(first=0, last=LATE)
    s.dummies.runs.clear()
    s.world.model.seen_tails.clear()
    drive_engine_tail(s.startup)
    assert tail.ready_rows == ([] if ours else [24])
    assert s.dummies.runs == ([] if ours else [("layers", 128)])
    assert s.world.model.seen_tails == ([] if ours else [tail])


def test_an_engines_tail_with_an_engram_is_told_nothing() -> None:
    """It asserts that late layers carry none; in early ones it is none of its business."""
    s = Sweep(World(late=True), chunk=24)
    s.world.model.decoder_replay_tail = tail = EngineTail()
    s.captured(first=0, last=LATE)
    s.dummies.runs.clear()
    s.world.model.layers[LATE].engram = object()
    open_engine_tail(s.startup)
    drive_engine_tail(s.startup)
    assert (tail.ready_rows, s.dummies.runs) == ([], [])
    s.world.model.layers[LATE].engram, s.world.model.layers[0].engram = None, object()
    open_engine_tail(s.startup)
    assert tail.ready_rows == [24]


def test_no_engine_tail_is_nothing_to_drive() -> None:
    s = Sweep(World(late=True))
    s.startup.grow()
    s.dummies.runs.clear()
    open_engine_tail(s.startup)
    drive_engine_tail(s.startup)
    del s.world.model.decoder_replay_tail  # 0.5.22
    drive_engine_tail(s.startup)
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
    monkeypatch.setattr(s.startup, "capture_one", capture)
    monkeypatch.setattr("sglang_dsv4_graphs.bank.sweep.bucket_values", lambda bank, rows: {})
    monkeypatch.setattr("sglang_dsv4_graphs.bank.sweep.bank_values", lambda bank, seconds, used: {"used": used})
    s.startup.capture_all(bank, s.dummies.batch)
    used = int(lines()[-1].removeprefix("dsv4-graphs: captured used="))
    assert 0.9 < used / (1 << 30) < 1.1
