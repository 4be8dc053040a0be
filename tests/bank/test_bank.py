"""A bank on the tape: captured with one step's rows, replayed with others', equal to eager on the same padded rows."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.backend import CaptureError, ReplayFault  # noqa: E402
from sglang_dsv4_graphs.bank.bank import Bank  # noqa: E402
from sglang_dsv4_graphs.bank.guard import AddressGuard, GuardedBuffer, MovedBufferError  # noqa: E402
from sglang_dsv4_graphs.bank.layer_range import RangeInputs, RangeOutputs  # noqa: E402
from sglang_dsv4_graphs.bank.tape import TapeBackend  # noqa: E402
from sglang_dsv4_graphs.breaks.shared import StepShared  # noqa: E402
from tests.bank.small_range import SmallRange, live_batch, live_rows  # noqa: E402

BUCKETS = (4, 8)
MakeBank = Callable[..., Bank]


@pytest.fixture
def make_bank() -> MakeBank:
    torch.manual_seed(7)

    def make(**options: Any) -> Bank:
        variable: ContextVar[Any] = ContextVar("capture", default=None)
        values: dict[str, Any] = {
            "name": "full-layer",
            "layers": SmallRange(variable),
            "buckets": BUCKETS,
            "backend": TapeBackend(variable, poison=True),
            "guard": AddressGuard([]),
            "local_rows": lambda rows, bucket, sharded: rows,
        }
        return Bank(**{**values, **options})

    return make


def captured(bank: Bank, *, pre: bool = True, counted: bool = True) -> Bank:
    for bucket in reversed(BUCKETS):
        bank.capture(bucket, live_rows(bucket, pre=pre), live_batch(bucket, counted=counted), SimpleNamespace())
    return bank


def assert_same(one: RangeOutputs, other: RangeOutputs) -> None:
    for a, b in ((one.residual, other.residual), (one.pre, other.pre), (one.aux, other.aux)):
        assert (a is None) == (b is None)
        assert a is None or (torch.equal(a, b) and not a.isnan().any())


@pytest.mark.parametrize("pre", [True, False], ids=["pre-mix", "first layers"])
@pytest.mark.parametrize("counted", [True, False], ids=["counts", "no counts"])
@pytest.mark.parametrize("layers", [(), (1, 2)], ids=["", "captured layers"])
@pytest.mark.parametrize("in_graph", [False, True], ids=["", "store in the graph"])
def test_replay_equals_eager_on_other_rows(
    make_bank: MakeBank, pre: bool, counted: bool, layers: tuple[int, ...], in_graph: bool
) -> None:
    bank = captured(make_bank(captured_layers=layers, store_in_graph=in_graph), pre=pre, counted=counted)
    small = bank.layers
    assert isinstance(small, SmallRange)
    for rows in (1, 3, 4, 5, 8, 2, 8, 1):
        bucket = bank.bucket_for(rows)
        assert bucket == (4 if rows <= 4 else 8)
        live, batch = live_rows(rows, pre=pre), live_batch(rows, counted=counted)
        before = small.cache.clone()
        replayed = bank.replay(bucket, live, batch).cloned()
        after = small.cache.clone()

        small.cache.copy_(before)
        eager = bank.run_eagerly(bucket, live, batch).cloned()
        assert_same(replayed, eager)
        # Eager stores the step's rows alone; slot 0 takes what padding rows of a graph store.
        assert torch.equal(after[1:], small.cache[1:])
        assert replayed.residual.shape[0] == rows
        assert (replayed.aux is not None) == bool(layers)

        # The same rows alone: here nothing depends on the padding, and nothing at all on earlier steps' rows.
        small.cache.copy_(before)
        with small.capture_scope(batch):
            residual, mix, *_ = small.body(live, batch, layers)
        assert torch.allclose(replayed.residual, residual)
        assert torch.allclose(replayed.pre, mix)


def test_breaks_read_the_step_and_its_real_rows(make_bank: MakeBank) -> None:
    bank = captured(make_bank())
    small = bank.layers
    small.seen.clear()
    small.cache.zero_()
    batch = live_batch(3)
    batch.global_num_token_non_padded_cpu = None  # the rows that came are the rows that count
    bank.replay(4, live_rows(3), batch)
    assert small.seen == [("store", 3), ("attend", 3)]
    assert small.cache.any(1).nonzero().flatten().tolist() == sorted(batch.out_cache_loc.tolist())
    assert small.scopes == []


def test_a_captured_store_writes_the_steps_slots_and_for_padding_slot_0(make_bank: MakeBank) -> None:
    bank = captured(make_bank(store_in_graph=True))
    assert [s.segments for s in bank.stats] == [2, 2]  # around the attention alone
    small, rubbish = bank.layers, float("nan")
    for rows in (8, 5, 7, 1):  # fewer rows leave slots of the step before behind them
        small.seen.clear()
        small.cache.fill_(rubbish)
        live, batch = live_rows(rows), live_batch(rows)
        bank.replay(8, live, batch)
        assert small.seen == [("attend", rows)]
        written = (~small.cache.isnan()).any(1).nonzero().flatten().tolist()
        assert written == sorted([*([0] if rows < 8 else []), *batch.out_cache_loc.tolist()])
        stored = small.cache[batch.out_cache_loc].clone()
        small.cache.fill_(rubbish)
        bank.run_eagerly(8, live, batch)
        assert torch.equal(stored, small.cache[batch.out_cache_loc])
        assert small.cache[0].isnan().all()


def test_slots_are_those_of_the_step_under_way(make_bank: MakeBank) -> None:
    bank = make_bank(store_in_graph=True)
    small, asked = bank.layers, []

    def window_slots(batch: Any) -> Any:
        asked.append((small.scopes[-1:] and small.scopes[-1][1] is batch, batch.global_num_token_non_padded_cpu))
        return torch.cat([batch.out_cache_loc, torch.tensor([-7])])  # may be longer than the step's rows

    small.window_slots = window_slots  # type: ignore[method-assign]
    bank.capture(8, live_rows(8), live_batch(8), SimpleNamespace())
    asked.clear()
    small.cache.zero_()
    batch = live_batch(3)
    bank.replay(8, live_rows(3), batch)
    assert asked == [(True, 3)]  # with the step's contexts around it: the engine asks its metadata
    assert small.cache[1:].any(1).nonzero().flatten().tolist() == sorted((batch.out_cache_loc - 1).tolist())
    assert small.slots is None


@pytest.mark.parametrize("short", [1, 2])  # one slot would also fit every row, as a broadcast
def test_a_step_with_fewer_slots_than_rows_is_refused(make_bank: MakeBank, short: int) -> None:
    bank = captured(make_bank(store_in_graph=True))
    batch = live_batch(3)
    batch.out_cache_loc = batch.out_cache_loc[:short]
    with pytest.raises(ValueError, match=f"{short} window slots for 3 rows"):
        bank.replay(8, live_rows(3), batch)


def test_a_store_that_breaks_asks_for_no_slots(make_bank: MakeBank) -> None:
    bank = make_bank()
    bank.layers.window_slots = None  # type: ignore[method-assign]
    captured(bank)
    bank.replay(8, live_rows(3), live_batch(3))
    assert [s.segments for s in bank.stats] == [3, 3]


def test_each_replay_shares_among_its_breaks_alone(make_bank: MakeBank) -> None:
    bank = captured(make_bank())
    small = bank.layers
    live, batch = live_rows(3), live_batch(3)
    assert set(small.shared_in_breaks) == {None}  # captures and their warm-ups
    seen = small.shared_in_breaks
    for replay in (1, 2):
        seen.clear()
        bank.replay(4, live, batch)
        assert len(seen) == 2
        assert isinstance(seen[0], StepShared)
        assert seen[0] is seen[1]
        # As a break would: nothing of it may reach the next replay.
        assert seen[0].get("rows", lambda replay=replay: replay) == replay
    seen.clear()
    bank.run_eagerly(4, live, batch)
    assert seen == [None, None]
    batch.out_cache_loc = torch.tensor([1, 2, 10**6])
    with pytest.raises(IndexError):
        bank.replay(4, live, batch)
    assert small.shared is None


def test_without_lean_breaks_nothing_is_shared(make_bank: MakeBank) -> None:
    bank = captured(make_bank(lean=False))
    bank.replay(4, live_rows(3), live_batch(3))
    assert set(bank.layers.shared_in_breaks) == {None}


def test_the_steps_batch_stays_as_it_is(make_bank: MakeBank) -> None:
    bank = make_bank()
    capture_batch = live_batch(8)
    step = live_batch(3)
    before = [copy.copy(vars(b)) for b in (capture_batch, step)]
    values = [b.num_token_non_padded.clone() for b in (capture_batch, step)]
    bank.capture(8, live_rows(8), capture_batch, SimpleNamespace())
    bank.replay(8, live_rows(3), step)
    bank.run_eagerly(8, live_rows(3), step)
    for batch, held, value in zip((capture_batch, step), before, values, strict=True):
        assert all(getattr(batch, name) is item for name, item in held.items())
        assert torch.equal(batch.num_token_non_padded, value)


def test_counts_are_the_ranks_own_share(make_bank: MakeBank) -> None:
    asked: list[tuple[int, int, bool]] = []

    def local_rows(rows: int, bucket: int, sharded: bool) -> int:
        asked.append((rows, bucket, sharded))
        return rows // 2

    bank = make_bank(local_rows=local_rows)
    bank.capture(8, live_rows(8), live_batch(8, sharded=True), SimpleNamespace())
    asked.clear()
    live, batch = live_rows(6), live_batch(6, sharded=True)
    outputs = bank.replay(8, live, batch)
    assert asked == [(6, 8, True)]
    # This range masks by the local count: rows from the third on entered as zeros.
    assert torch.equal(
        outputs.residual[3:], live.residual[3:] + bank.layers.cache[batch.out_cache_loc].cumsum(0)[3:, None]
    )
    assert not torch.equal(outputs.residual[2], live.residual[2])


@pytest.mark.parametrize("in_graph", [False, True])
def test_graphs_read_nothing_that_the_bank_does_not_own(make_bank: MakeBank, in_graph: bool) -> None:
    bank = captured(make_bank(store_in_graph=in_graph))
    kept = [*bank.owned_tensors(), bank.layers.weight, bank.layers.cache]
    for bucket in BUCKETS:
        recording = bank.recording(bucket)
        assert recording.external_reads(keep=kept) == []
        assert recording.external_reads(keep=[bank.layers.weight, bank.layers.cache])
        recording.poison(kept)
    live, batch = live_rows(3), live_batch(3)
    replayed = bank.replay(4, live, batch).cloned()
    assert_same(replayed, bank.run_eagerly(4, live, batch))


def test_outputs_are_views_until_the_next_replay(make_bank: MakeBank) -> None:
    bank = captured(make_bank())
    first = bank.replay(8, live_rows(5), live_batch(5))
    copied, residual = first.cloned(), first.residual.clone()
    second = bank.replay(4, live_rows(2), live_batch(2))
    assert second.residual.data_ptr() == first.residual.data_ptr()
    assert not torch.equal(first.residual, residual)
    assert torch.equal(copied.residual, residual)
    assert torch.equal(bank.outputs(4, 2).residual, second.residual)


@pytest.mark.parametrize("in_graph", [False, True])
def test_all_buckets_share_the_static_rows(make_bank: MakeBank, in_graph: bool) -> None:
    bank = make_bank(store_in_graph=in_graph)
    bank.capture(8, live_rows(8), live_batch(8), SimpleNamespace())
    held, size = [t.data_ptr() for t in bank.owned_tensors()], bank.static_bytes
    bank.capture(4, live_rows(4), live_batch(4), SimpleNamespace())
    assert [t.data_ptr() for t in bank.owned_tensors()] == held
    assert bank.static_bytes == size > 0


def test_what_was_captured_lives_as_long_as_its_graph(make_bank: MakeBank) -> None:
    bank = make_bank()
    metadata, batch = SimpleNamespace(pages=torch.zeros(3)), live_batch(8)
    pages, slots = weakref.ref(metadata.pages), weakref.ref(batch.out_cache_loc)
    bank.capture(8, live_rows(8), batch, metadata)
    del metadata, batch
    gc.collect()
    assert pages() is not None
    assert slots() is not None
    bank.drop(8)
    gc.collect()
    assert pages() is None
    assert slots() is None


def test_stats(make_bank: MakeBank) -> None:
    free = iter([100, 60, 60, 75])
    bank = captured(make_bank(free_bytes=lambda: next(free)))
    assert [(s.rows, s.segments, s.bytes) for s in bank.stats] == [(4, 3, 0), (8, 3, 40)]
    assert all(s.seconds > 0 for s in bank.stats)


def test_drop_and_retire(make_bank: MakeBank) -> None:
    bank = captured(make_bank())
    assert bank.buckets == BUCKETS
    bank.drop(8)
    bank.drop(8)
    assert (bank.buckets, bank.bucket_for(5), bank.bucket_for(4)) == ((4,), None, 4)
    bank.replay(4, live_rows(2), live_batch(2))
    assert bank.retired is None
    bank.retire("shut down")
    assert (bank.retired, bank.buckets, bank.stats, bank.bucket_for(1)) == ("shut down", (), [], None)


def test_a_ladder_that_ends_early_has_no_rows_for_more(make_bank: MakeBank) -> None:
    bank = make_bank()
    bank.end_ladder(7)
    assert bank.planned == (4,)
    bank.capture(4, live_rows(4), live_batch(4), SimpleNamespace())
    assert {len(t) for t in bank._statics.tensors} == {4}


def test_what_graphs_shared_is_made_whole_once_they_are_gone(
    make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = captured(make_bank())
    recording = weakref.ref(bank.recording(8))
    left: list[Any] = []
    monkeypatch.setattr(TapeBackend, "settle", lambda self: left.append((recording(), len(bank._captured))))
    bank.drop(8)
    bank.retire("moved")
    assert left == [(None, 1), (None, 0)]


def test_a_bank_is_free_of_what_went_before_the_rest_is_made_whole(
    make_bank: MakeBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle(backend: TapeBackend) -> None:
        raise RuntimeError("no memory")

    bank = captured(make_bank())
    monkeypatch.setattr(TapeBackend, "settle", settle)
    with pytest.raises(RuntimeError):
        bank.drop(8)
    assert bank.bucket_for(8) is None
    with pytest.raises(RuntimeError):
        bank.retire("moved")
    assert (bank.owned_tensors(), bank.static_bytes) == ([], 0)


@pytest.mark.parametrize("in_graph", [False, True])
def test_retiring_waits_and_frees_everything_the_bank_owns(make_bank: MakeBank, in_graph: bool) -> None:
    graphs_at_wait: list[int] = []
    bank = make_bank(store_in_graph=in_graph, synchronize=lambda: graphs_at_wait.append(len(bank._captured)))
    metadata = SimpleNamespace(q_pad_buffer=torch.zeros(8))
    bank.capture(8, live_rows(8), live_batch(8), metadata)
    held = bank.replay(8, live_rows(5), live_batch(5))
    residual = held.residual.clone()
    owned = [weakref.ref(t) for t in bank.owned_tensors()]
    recording = weakref.ref(bank.recording(8))
    assert len(owned) > 2
    assert graphs_at_wait == []
    del metadata
    bank.retire("moved")
    bank.retire("shut down")
    gc.collect()
    assert torch.equal(held.residual, residual)  # a step under way keeps what it was given
    del held
    assert graphs_at_wait == [1]  # once, while the graph in flight still lives
    assert recording() is None
    assert [t() for t in owned] == [None] * len(owned)
    assert (bank.owned_tensors(), bank.static_bytes) == ([], 0)


def test_check_names_bank_and_bucket(make_bank: MakeBank) -> None:
    held = [torch.zeros(3), torch.zeros(3), torch.zeros(3)]
    current = {"workspace": held[0], "rare": held[0]}
    guard = AddressGuard(
        [
            GuardedBuffer("workspace", lambda: current["workspace"]),
            GuardedBuffer("rare", lambda: current["rare"], cheap=False),
        ]
    )
    bank = make_bank(guard=guard)
    bank.capture(8, live_rows(8), live_batch(8), SimpleNamespace())
    current["workspace"] = held[1]  # grown between two captures: only the first graph is stale
    bank.capture(4, live_rows(4), live_batch(4), SimpleNamespace())
    bank.check(4, everything=True)
    with pytest.raises(MovedBufferError, match="bank=full-layer bucket=8 buffer=workspace moved"):
        bank.check(8)
    current["rare"] = held[2]
    bank.check(4)
    with pytest.raises(MovedBufferError, match="bank=full-layer bucket=4 buffer=rare moved"):
        bank.check(4, everything=True)


@pytest.mark.parametrize("error", [CaptureError("refused"), torch.OutOfMemoryError("no room"), RuntimeError("kernel")])
def test_a_failed_capture_leaves_nothing_and_the_rest_works(make_bank: MakeBank, error: Exception) -> None:
    bank = make_bank()
    bank.capture(8, live_rows(8), live_batch(8), SimpleNamespace())
    bank.layers.fails = error
    with pytest.raises(type(error), match=str(error)):
        bank.capture(4, live_rows(4), live_batch(4), SimpleNamespace())
    assert bank.buckets == (8,)
    assert bank.layers.scopes == []
    bank.layers.fails = None
    live, batch = live_rows(3), live_batch(3)
    assert_same(bank.replay(8, live, batch).cloned(), bank.run_eagerly(8, live, batch))
    bank.capture(4, live_rows(4), live_batch(4), SimpleNamespace())
    assert bank.buckets == BUCKETS


def test_a_host_read_is_refused(make_bank: MakeBank) -> None:
    bank = make_bank()
    body = bank.layers.body
    bank.layers.body = lambda inputs, *rest: body(inputs, *rest) if inputs.positions.sum().item() else []  # type: ignore[method-assign]
    with pytest.raises(CaptureError):
        bank.capture(8, live_rows(8), live_batch(8), SimpleNamespace())
    assert bank.buckets == ()


def test_debug_names_the_break_that_fails(make_bank: MakeBank) -> None:
    banks = {debug: captured(make_bank(debug=debug)) for debug in (False, True)}
    step = live_batch(3)
    step.out_cache_loc = torch.tensor([1, 2, 10**6])
    with pytest.raises(IndexError):
        banks[False].replay(4, live_rows(3), step)
    with pytest.raises(ReplayFault, match=r"break 0 .*_store_live_rows.*IndexError"):
        banks[True].replay(4, live_rows(3), step)


def test_rows_of_another_model_are_refused(make_bank: MakeBank) -> None:
    bank = captured(make_bank())
    live = live_rows(3)
    wrong = RangeInputs(live.residual.double(), live.pre, live.positions, live.input_ids)
    with pytest.raises(ValueError, match="the graphs were captured for rows of"):
        bank.replay(4, wrong, live_batch(3))
    with pytest.raises(ValueError, match="rows"):
        bank.replay(4, live_rows(3, pre=False), live_batch(3))


def test_a_bank_that_captured_nothing_has_no_bucket(make_bank: MakeBank) -> None:
    bank = make_bank()
    assert (bank.buckets, bank.bucket_for(1), bank.owned_tensors(), bank.static_bytes) == ((), None, [], 0)
    assert make_bank(buckets=()).bucket_for(1) is None


def test_outputs_without_residual_are_refused() -> None:
    with pytest.raises(ValueError, match="without residual"):
        RangeOutputs.of([None, torch.zeros(3)], 2)
