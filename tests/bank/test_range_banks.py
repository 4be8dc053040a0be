"""Both banks in whole steps of a small model: every edge of their ladders, against the loop without a plugin."""

from __future__ import annotations

import gc
import logging
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank import decoder_replay, full_layer  # noqa: E402
from sglang_dsv4_graphs.bank.bank import Bank  # noqa: E402
from sglang_dsv4_graphs.bank.decoder_replay import DecoderReplayBank  # noqa: E402
from sglang_dsv4_graphs.bank.full_layer import FullLayerBank  # noqa: E402
from sglang_dsv4_graphs.bank.guard import AddressGuard, GuardedBuffer, MovedBufferError  # noqa: E402
from sglang_dsv4_graphs.bank.ranks import Ranks  # noqa: E402
from sglang_dsv4_graphs.bank.sweep import Startup  # noqa: E402
from sglang_dsv4_graphs.bank.tape import TapeBackend  # noqa: E402
from tests.bank import small_model  # noqa: E402
from tests.bank.small_model import LATE, LAYERS, TAIL_ROWS, Layer, SmallDummies, World  # noqa: E402
from tests.bank.small_sweep import FakeDevice  # noqa: E402

FULL = (8, 16, 24)
TAILS = (4, 8, 12)


class Pools(TapeBackend):
    """Notes whether a recording has memory of its own."""

    def __init__(self, *args: Any, own: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.own, self.again = own, (args, kwargs)

    def apart(self) -> Pools:
        args, kwargs = self.again
        return Pools(*args, own=True, **kwargs)


class Served:
    """A world with both banks registered, captured and open."""

    def __init__(
        self,
        *,
        late: bool = True,
        dspark: list[int] | None = None,
        chunk: int = 24,
        prefill_graph: bool = False,
        **settings: Any,
    ) -> None:
        self.world = World(late=late, **settings)
        self.world.engine.prefill_graph = prefill_graph
        self.world.model.dspark_layers_to_capture = dspark
        self.decoder, self.full = DecoderReplayBank(), FullLayerBank()
        for bank in (self.decoder, self.full):
            self.world.manager.register(bank, name=bank.name)
        self.others = others = {"workspace": torch.zeros(1)}

        def workspace() -> torch.Tensor:
            return others["workspace"]

        self.dummies = SmallDummies(self.world, most_rows=200)
        self.dummies.most_requests = 6
        self.startup = Startup(
            served=self.world.served,
            dummies=self.dummies,  # type: ignore[arg-type]
            backend=Pools(self.world.engine.capture_var, poison=True),
            make_guard=lambda first, last: AddressGuard([GuardedBuffer("workspace", workspace)]),
            ranks=Ranks(0, 1),
            device=FakeDevice(),  # type: ignore[arg-type]
            chunk_size=chunk,
            strict=True,
        )
        self.startup.grow()
        self.startup.open()
        self.world.manager.hook.dsv4_graphs_startup(startup=self.startup)
        self.served = self.world.served
        self.served.ready = True

    def step(self, lengths: list[int], *, dspark: bool = False) -> list[str]:
        """Run a step with and without the plugin, compare, and return which banks replayed, with buckets."""
        world = self.world
        batch = world.batch(lengths, dspark=dspark)
        before, replays = world.caches(), dict(self.served.replays)
        ours = [t.clone() if isinstance(t, torch.Tensor) else t for t in world.run(batch)]
        after = world.caches()
        world.set_caches(before)
        plain = world.run(batch, plain=True)
        for a, b in zip([*ours[:2], *(ours[2] or ())], [*plain[:2], *(plain[2] or ())], strict=True):
            assert a.shape == b.shape
            assert torch.allclose(a, b, atol=1e-5)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(after, world.caches(), strict=True))
        replayed = [key for key, count in self.served.replays.items() if count > replays.get(key, 0)]
        return sorted(f"{bank} {bucket}" for bank, bucket in replayed)

    def bank(self, which: Any) -> Bank:
        bank = which.bank(self.served)
        assert bank is not None
        return bank


@pytest.fixture(autouse=True)
def small_ladders(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(11)
    monkeypatch.setattr(full_layer, "full_layer_buckets", lambda cap, chunk, limit: FULL if cap else ())
    monkeypatch.setattr(decoder_replay, "decoder_replay_buckets", lambda rows, limit: TAILS if rows else ())
    monkeypatch.setattr(decoder_replay, "DECODER_REPLAY_STEP", TAIL_ROWS)


@pytest.mark.parametrize(("rows", "bucket"), [(1, 8), (7, 8), (8, 8), (9, 16), (16, 16), (17, 24), (23, 24), (24, 24)])
@pytest.mark.parametrize("late", [True, False])
def test_steps_of_one_request(late: bool, rows: int, bucket: int) -> None:
    served = Served(late=late)
    tail = ["decoder-replay 4"] if late else []
    for _ in range(2):
        assert served.step([rows]) == [*tail, f"full-layer {bucket}"]
        served.served.replays.clear()
    assert not served.served.fallbacks


@pytest.mark.parametrize(
    ("lengths", "tail"),
    [([1, 1], 4), ([3, 1], 4), ([4, 4], 4), ([1, 1, 1, 1, 1], 8), ([5, 5, 5], 8), ([2] * 5, 12), ([2] * 6, 12)],
)
def test_steps_of_several_requests(lengths: list[int], tail: int) -> None:
    assert Served().step(lengths)[0] == f"decoder-replay {tail}"


def test_more_rows_than_the_largest_bucket() -> None:
    served = Served()
    assert served.step([25]) == ["decoder-replay 4"]
    assert dict(served.served.fallbacks) == {("full-layer", "more rows than the largest bucket"): 1}


def test_large_buckets_that_pay_for_several_requests_alone() -> None:
    served = Served()
    served.bank(served.full).largest_for_few = 8
    assert served.step([8]) == ["decoder-replay 4", "full-layer 8"]
    served.served.replays.clear()
    for few in ([9], [3, 3, 3]):
        assert not any("full-layer" in replayed for replayed in served.step(few))
    assert dict(served.served.fallbacks) == {("full-layer", "too few requests for so large a graph"): 2}
    assert "full-layer 16" in served.step([3, 3, 3, 3])


def test_more_tails_than_the_largest_bucket() -> None:
    served = Served()
    assert served.step([2] * 7) == ["full-layer 16"]
    assert dict(served.served.fallbacks) == {("decoder-replay", "more rows than the largest bucket"): 1}


def test_mixed_steps_in_any_order() -> None:
    served = Served()
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        count = int(torch.randint(1, 6, (), generator=generator))
        served.step(torch.randint(1, 6, (count,), generator=generator).tolist())


def test_banks_and_their_layers() -> None:
    served = Served()
    full, late = served.bank(served.full), served.bank(served.decoder)
    assert (full.layers.first, full.layers.last, full.buckets) == (0, LATE, FULL)
    assert (late.layers.first, late.layers.last, late.buckets) == (LATE, LAYERS, TAILS)
    assert served.startup.banks == [full, late]  # in the order in which they were captured
    # Without bounded replay the full-layer bank spans every layer, and there is no tail.
    served = Served(late=False)
    assert (served.bank(served.full).layers.last, served.decoder.bank(served.served)) == (LAYERS, None)


@pytest.mark.parametrize(
    ("settings", "banks"),
    [
        ({"full_layer_max_tokens": 0}, ["decoder-replay 4"]),
        ({"decoder_replay_max_rows": 0}, ["full-layer 8"]),
        ({"full_layer_max_tokens": 0, "decoder_replay_max_rows": 0}, []),
    ],
)
def test_a_bank_that_is_switched_off(settings: dict[str, int], banks: list[str]) -> None:
    served = Served(**settings)
    assert served.step([5]) == banks
    assert not served.served.fallbacks


@pytest.mark.parametrize("dspark", [[0, 5], [1, 3], [4, 5], [3, 4, 5], []])
def test_hidden_states_of_captured_layers(dspark: list[int]) -> None:
    served = Served(dspark=dspark)
    for lengths in ([5], [3, 1, 4], [9]):
        assert len(served.step(lengths, dspark=bool(dspark))) == 2
    assert served.world.model.dspark_layers_to_capture == dspark


@pytest.mark.parametrize(("late", "dspark"), [(False, None), (False, [1, 5]), (True, [1, 5])])
def test_rows_that_leave_the_step_are_not_written_by_the_next(late: bool, dspark: list[int] | None) -> None:
    """Under bounded replay the engine scatters them into new rows, unless it collects hidden states."""
    served = Served(late=late, dspark=dspark)
    first = served.world.run(served.world.batch([5], dspark=dspark is not None))
    leaving = [*first[:2], *(first[2] or ())]
    kept = [t.clone() for t in leaving]
    served.world.run(served.world.batch([5], dspark=dspark is not None))
    assert all(torch.equal(a, b) for a, b in zip(leaving, kept, strict=True))


class EngineTail:
    def __init__(self) -> None:
        self.ready: list[int] = []
        self.runner = SimpleNamespace(ready=self.ready.append)


def test_the_engines_tail_graphs_stay_out_of_our_steps() -> None:
    served = Served()
    served.world.model.decoder_replay_tail = EngineTail()
    served.world.model.seen_tails.clear()
    for lengths in ([5], [2] * 7):  # served, and with more tails than the largest bucket
        served.world.run(served.world.batch(lengths))
    assert served.world.model.seen_tails == [None, None]
    served.bank(served.decoder).retire("shut down")
    served.world.run(served.world.batch([5]))
    assert served.world.model.seen_tails[2] is served.world.model.decoder_replay_tail


@pytest.mark.parametrize("which", ["full", "decoder"])
def test_a_moved_buffer_retires_its_bank_before_the_replay(which: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sglang_dsv4_graphs")
    served = Served()
    bank = served.bank(getattr(served, which))
    other = served.bank(served.decoder if which == "full" else served.full)
    # Only this bank's graphs were captured where the buffer was before.
    old, now = served.others["workspace"], torch.zeros(2)
    served.others["workspace"] = now
    for rows in other.buckets:
        other._captured[rows].addresses = other.guard.addresses()
    replayed = served.step([5])
    assert replayed == [{"full": "decoder-replay 4", "decoder": "full-layer 8"}[which]]
    assert bank.buckets == ()
    assert f"buffer=workspace moved: captured at {old.data_ptr():#x}, now at {now.data_ptr():#x}" in str(bank.retired)
    assert served.step([5]) == replayed
    assert dict(served.served.fallbacks) == {(bank.name, "bank retired"): 2}
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert errors[0].startswith(f"dsv4-graphs: moved-buffer rank=0 bank={bank.name} reason=")


def test_a_probe_that_raises_retires_the_bank_and_the_step_is_eager() -> None:
    served = Served()
    assert served.step([5]) == ["decoder-replay 4", "full-layer 8"]
    del served.others["workspace"]
    assert served.step([5]) == []
    assert "workspace moved: captured at 0x" in str(served.bank(served.full).retired)
    assert "KeyError: 'workspace'" in str(served.bank(served.decoder).retired)


def test_every_bank_is_told_of_weight_updates() -> None:
    served = Served()
    compared: list[bool] = []
    for which in (served.full, served.decoder):
        guard = served.bank(which).guard
        guard._buffers = (GuardedBuffer("dear", lambda: compared.append(True), cheap=False),)  # type: ignore[func-returns-value]
        guard._cheap = ()
        for held in served.bank(which)._captured.values():
            held.addresses = guard.addresses()
    compared.clear()
    served.step([5])
    assert compared == []
    for which in (served.full, served.decoder):
        which.weights_changed()
        served.step([5])
        served.step([5])
        assert compared == [True]
        compared.clear()


def test_nothing_captured_is_a_reason_of_its_own() -> None:
    served = Served()
    for rows in FULL:
        served.bank(served.full).drop(rows)
    assert served.step([25]) == served.step([5]) == ["decoder-replay 4"]
    assert dict(served.served.fallbacks) == {("full-layer", "nothing captured"): 2}
    served.bank(served.full).retire("because")
    served.step([5])
    assert served.served.fallbacks["full-layer", "bank retired"] == 1


@pytest.mark.parametrize("shadow", [0, 1])
def test_a_model_that_the_engine_drops_is_freed_with_its_banks(shadow: int) -> None:
    served = Served(shadow=shadow)
    served.step([5])
    held: Any = served.bank(served.full)
    gone = {
        "model": weakref.ref(served.world.model),
        "served": weakref.ref(served.served),
        "rows": weakref.ref(held.owned_tensors()[0]),
        "recording": weakref.ref(held.recording(8)),
    }
    plugin = (served.full, served.decoder, served.world.manager)  # what lives as long as the installation
    del served, held
    gc.collect()
    assert {name: r() for name, r in gone.items()} == dict.fromkeys(gone)
    assert plugin[0].bank is not None


@pytest.mark.parametrize("strict", [False, True])
def test_a_buffer_that_moved_on_another_rank_retires_the_bank_here(strict: bool) -> None:
    served = Served(strict=strict)
    asked: list[bool] = []
    served.served.ranks = SimpleNamespace(who=lambda problem: asked.append(problem) or 0)  # type: ignore[assignment]
    assert served.step([5]) == []
    assert asked == [False, False]
    assert served.bank(served.full).retired == "a guarded buffer moved on rank 0"
    assert {reason for _, reason in served.served.fallbacks} == {"bank retired"}
    assert served.step([5]) == []
    assert asked == [False, False]  # a retired bank asks nobody, on every rank


def test_no_bucket_is_larger_than_any_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step would replay it, and no workspace has grown to it."""
    limits: list[int] = []
    monkeypatch.setattr(full_layer, "full_layer_buckets", lambda cap, chunk, limit: limits.append(limit) or ())
    monkeypatch.setattr(decoder_replay, "decoder_replay_buckets", lambda rows, limit: limits.append(limit) or ())
    served = Served(chunk=24, full_layer_max_tokens=1000)
    assert limits == [24, 128]  # a tail's dummy step is a whole number of 128 rows
    assert served.dummies.runs[0] == ("layers", 128)


def test_every_rank_is_asked_before_each_replay() -> None:
    served = Served()
    asked: list[bool] = []
    served.served.ranks = SimpleNamespace(who=lambda problem: asked.append(problem))  # type: ignore[assignment]
    served.step([5])
    assert asked == [False, False]
    served.step([25])  # nothing of the full-layer bank to ask about: all ranks know the rows
    assert asked == [False, False, False]


def test_a_moved_buffer_ends_a_strict_server() -> None:
    served = Served(strict=True)
    served.others["workspace"] = torch.zeros(2)
    with pytest.raises(MovedBufferError, match="buffer=workspace"):
        served.world.run(served.world.batch([5]))


def test_shadowed_steps_go_on_with_eager_rows(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sglang_dsv4_graphs")
    served = Served(shadow=2)
    for _ in range(3):
        served.step([5])
    shadows = [m for m in caplog.messages if "dsv4-graphs: shadow" in m]
    assert sorted(shadows) == [
        "dsv4-graphs: shadow bank=decoder-replay compared=2 differed=0",
        "dsv4-graphs: shadow bank=full-layer compared=2 differed=0",
    ]


@pytest.mark.parametrize("sources", [[0, LATE - 1], [], None])
def test_a_range_that_cannot_be_run_twice_is_not_shadowed(
    sources: list[int] | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="sglang_dsv4_graphs")
    monkeypatch.setattr(small_model, "LAYER_SOURCES", sources)
    served = Served(shadow=1)
    served.step([5])
    shadows = [m for m in caplog.messages if "dsv4-graphs: shadow" in m]
    assert len(shadows) == 2
    assert shadows[0].startswith('dsv4-graphs: shadow bank=decoder-replay skipped="its layers read')
    assert shadows[1] == "dsv4-graphs: shadow bank=full-layer compared=1 differed=0"


def test_shutdown_releases_every_graph() -> None:
    served = Served()
    banks = [served.bank(served.full), served.bank(served.decoder)]
    served.world.manager.hook.dsv4_graphs_shutdown()
    assert [b.buckets for b in banks] == [(), ()]
    assert served.step([5]) == []
    assert not served.served.fallbacks


def test_tails_inside_a_prefill_graph() -> None:
    """The break of an engine's prefill graph hands the narrowed state over; nothing of the loop runs."""
    served = Served(dspark=[1, 5])
    world = served.world
    assert served.decoder.in_charge(served.served)
    batch = world.batch([9, 4], dspark=True)
    before = world.caches()
    residual, pre, packer = world.run(batch, plain=True)
    entering: list[Any] = []

    def note(*, positions: Any, hidden_states: Any, input_ids: Any, forward_batch: Any) -> Any:
        held = (hidden_states.residual.clone(), hidden_states.pre.clone(), positions, input_ids, forward_batch)
        entering.append(held)
        return Layer.__call__(
            late, positions=positions, hidden_states=hidden_states, input_ids=input_ids, forward_batch=forward_batch
        )

    late = world.model.layers[LATE]
    world.set_caches(before)
    world.model.layers[LATE] = note  # type: ignore[call-overload]
    world.run(batch, plain=True)
    world.model.layers[LATE] = late
    ((rows, mix, positions, ids, narrowed),) = entering
    state = world.engine.HcState(rows, mix)
    world.set_caches(before)
    done = served.decoder.run_tail(served.served, state, positions, ids, narrowed)
    assert done is not None
    assert torch.allclose(done[0], residual, atol=1e-5)
    assert torch.allclose(done[1], pre, atol=1e-5)
    (aux,) = done[2]
    assert torch.allclose(aux, packer[-1], atol=1e-5)
    assert dict(served.served.replays) == {("decoder-replay", 4): 1}

    many = torch.zeros(13, 2, 3)
    assert (
        served.decoder.run_tail(served.served, world.engine.HcState(many, many[..., 0]), many[:, 0, 0], ids, narrowed)
        is None
    )
    other = "rows of another type than the captured ones"
    assert served.decoder.run_tail(served.served, state, positions.int(), ids, narrowed) is None
    reasons = ("more rows than the largest bucket", other)
    assert dict(served.served.fallbacks) == {("decoder-replay", reason): 1 for reason in reasons}
    served.bank(served.decoder).retire("shut down")
    assert not served.decoder.in_charge(served.served)


@pytest.mark.parametrize(
    ("prefill_graph", "dspark", "own"),
    [
        (False, None, False),
        (False, [1, 5], False),
        (True, None, False),
        (True, [5], False),  # collected in the break itself
        (True, [1], True),
        (True, [1, 5], True),
    ],
)
def test_memory_of_hidden_states_that_a_prefill_graph_holds_across_its_break(
    prefill_graph: bool, dspark: list[int] | None, own: bool
) -> None:
    served = Served(prefill_graph=prefill_graph, dspark=dspark)
    assert served.bank(served.decoder)._backend.own is own  # type: ignore[attr-defined]
    assert served.bank(served.full)._backend.own is False  # type: ignore[attr-defined]
    assert len(served.step([5], dspark=dspark is not None)) == 2
