"""The sweep in the engine's startup: its order, what a failure leaves, where a ladder ends."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dsv4_graphs.extend import hookimpl
from tests.replay.judge import Judge, same
from tests.replay.server import (
    DECODER_REPLAY,
    DECODER_REPLAY_CAP,
    FULL_LAYER,
    FULL_LAYER_CAP,
    SMALL,
    Servers,
    freeze_imports,
)
from tests.replay.story import TOO_MANY, Story, serves
from tests.replay.sweeps import Clock, Event, out_of_memory, watch_steps, watched_backend

pytestmark = pytest.mark.engine

# A chunk that is more than the largest bucket.
LARGE = 320
ONE_BUCKET = {FULL_LAYER_CAP: "64", DECODER_REPLAY_CAP: "128"}
# The full-layer ladder up to the chunk.
AUTOMATIC = {DECODER_REPLAY_CAP: "128"}
STRICT = {"SGLANG_DSV4_GRAPHS_STRICT": "1"}


def test_grow_then_the_larger_first_and_full_layer_first(servers: Servers) -> None:
    events: list[Event] = []
    server = servers.own(
        SMALL, make_backend=watched_backend(events), prepare=watch_steps(events), chunked_prefill_size=LARGE
    )
    captures = [(FULL_LAYER, 256), (FULL_LAYER, 128), (FULL_LAYER, 64), (DECODER_REPLAY, 256), (DECODER_REPLAY, 128)]
    steps = [("step", rows) for _, rows in captures]
    # Workspaces reach their size before any capture.
    # A few rows, a tail of one request, then the largest bucket.
    rehearsed = [("step", 3), ("step", 128), ("step", 256)]
    assert events == [("step", LARGE), *(e for pair in zip(steps, captures, strict=True) for e in pair), *rehearsed]
    messages = [line.split(" gib")[0].split(" segments")[0] for line in server.log.lines]
    assert messages == [
        f"dsv4-graphs: installed engine={server.installation.runtime.engine.version} banks=full-layer,decoder-replay",
        *(f"dsv4-graphs: captured bank={bank} rows={rows}" for bank, rows in captures[:3]),
        "dsv4-graphs: captured bank=full-layer graphs=3 rows=64..256",
        *(f"dsv4-graphs: captured bank={bank} rows={rows}" for bank, rows in captures[3:]),
        "dsv4-graphs: captured bank=decoder-replay graphs=2 rows=128..256",
        "dsv4-graphs: captured bank=total graphs=5",
    ]


def test_grow_comes_before_the_engines_prefill_captures(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace that grew after them would leave their graphs with freed memory."""
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup as engine

    events: list[Event] = []

    def in_the_engines_order(runner: Any) -> None:
        watch_steps(events)(runner)
        monkeypatch.setattr(engine, "PrefillCudaGraphRunner", lambda *a, **k: events.append(("engine", 0)))
        engine.capture_prefill_graph(model_runner=runner, eager_runner=None)
        events.append(("engine done", 0))

    servers.own(
        ONE_BUCKET, make_backend=watched_backend(events), prepare=in_the_engines_order, chunked_prefill_size=LARGE
    )
    assert events[0] == ("step", LARGE)
    assert [e for e in events if "engine" in e[0]][-1] == events[events.index(("engine done", 0))]
    assert events.count(("step", LARGE)) == 1
    assert events.index(("engine done", 0)) < events.index((FULL_LAYER, 64))


def test_the_workspace_is_held_before_the_engine_captures(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held later, it is the engine's graphs' own, and would go with the first graph of ours that goes.

    The engine's own startup up to the end of its captures, on a server whose banks are to be CUDA graphs.
    """
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup as engine

    from sglang_dsv4_graphs.hooks import start
    from sglang_dsv4_graphs.hooks.runtime import Runtime

    events: list[str] = []

    def noted(event: str, result: Any = None) -> Any:
        return lambda *args, **kwargs: events.append(event) or result

    server = servers.own(ONE_BUCKET, make_backend=lambda installation: None, startup=False)
    ours = server.installation.runtime.engine
    monkeypatch.setattr(Runtime, "_devices", lambda self, runner: ("cpu",))
    monkeypatch.setattr(ours, "global_capture_stream", lambda: "the engine's stream")
    monkeypatch.setattr(ours, "global_graph_pool", lambda device: "the engine's pool")
    monkeypatch.setattr(start, "hold_workspace", lambda stream: noted(f"held for {stream}", True)())
    monkeypatch.setattr(engine.GraphSharedOutput, "create_for_model_runner", lambda runner: None)
    monkeypatch.setattr(engine, "EagerRunner", noted("eager runner"))
    # The first that the engine's prefill capture asks; answered so, it is over.
    monkeypatch.setattr(engine, "check_cuda_graph_backend", noted("prefill captures", True))
    monkeypatch.setattr(engine, "capture_decode_graph", noted("decode captures"))
    able = SimpleNamespace(capabilities=SimpleNamespace(graph_capture=True))
    monkeypatch.setattr(engine, "current_platform", able)
    engine.capture_cuda_graphs(model_runner=server.runner, finalize=False)
    assert server.served.stand_down is None
    assert events == ["eager runner", "held for the engine's stream", "prefill captures", "decode captures"]


@pytest.mark.parametrize(("tokens", "last"), [(2 * LARGE, True), (200, False)])
def test_the_rehearsal_loads_its_inputs_as_the_engines_eager_steps_do(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, tokens: int, last: bool
) -> None:
    """By the engine's own runner and buffers: their kernels are loaded, and compiled, before the first request.

    The buffers of a server whose KV pool holds fewer tokens than the largest bucket do not hold that bucket's step,
    which then runs on inputs that are not loaded: no server may lose its banks to its rehearsal.
    """
    import torch
    from sglang.srt.model_executor.cuda_graph_buffer_registry import build_eager_registry
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup as engine
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner

    loaded: list[tuple[int, bool]] = []

    def in_the_engines_order(runner: Any) -> None:
        eager = object.__new__(EagerRunner)
        eager._eager_registry = registry = build_eager_registry(
            device=torch.device("cpu"), max_bs=16, max_num_token=tokens, cache_loc_dtype=torch.int64
        )
        monkeypatch.setattr(engine, "PrefillCudaGraphRunner", lambda *a, **k: None)
        engine.capture_prefill_graph(model_runner=runner, eager_runner=eager)
        forward = runner.model.forward

        def noted(input_ids: Any, positions: Any, batch: Any) -> Any:
            buffers = [registry.get_slot(name).buffer.data_ptr() for name in ("input_ids", "positions")]
            loaded.append((input_ids.shape[0], [input_ids.data_ptr(), positions.data_ptr()] == buffers))
            return forward(input_ids, positions, batch)

        runner.model.forward = noted

    server = servers.own(SMALL, prepare=in_the_engines_order, chunked_prefill_size=LARGE)
    assert server.served.stand_down is None
    assert loaded == [(3, True), (128, True), (256, last)]


def test_nothing_of_the_rehearsal_is_left(servers: Servers) -> None:
    server = servers.own(SMALL)
    assert (server.served.replays, server.served.fallbacks) == ({}, {})
    assert server.log.having("fallback") == []


def test_a_rehearsal_that_has_no_bucket_is_no_fallback(servers: Servers) -> None:
    """Its rows are more than this largest bucket; users would look for the step that fell back."""
    server = servers.own(ONE_BUCKET)
    assert (server.served.replays, server.served.fallbacks) == ({}, {})
    assert server.log.having("fallback") == []
    # The first step of that reason is logged, then.
    story = Story(server, Judge.of(server))
    story.step({"a": 100})
    (line,) = server.log.having("fallback")
    assert line == f'dsv4-graphs: fallback bank=full-layer reason="{TOO_MANY}" rows=100'


# Captures that fail


@pytest.mark.parametrize(
    ("fails", "full", "late"),
    [
        ((FULL_LAYER, 64), (128,), (128, 256)),
        ((FULL_LAYER, 128), (), (128, 256)),
        ((DECODER_REPLAY, 128), (64, 128), (256,)),
        ((DECODER_REPLAY, 256), (64, 128), ()),
    ],
)
def test_a_failed_capture_keeps_the_larger_ones(
    servers: Servers, fails: Event, full: tuple[int, ...], late: tuple[int, ...]
) -> None:
    settings = {FULL_LAYER_CAP: "128", DECODER_REPLAY_CAP: "256"}
    server = servers.own(settings, make_backend=watched_backend([], out_of_memory(fails)))
    assert (server.bank(FULL_LAYER).buckets, server.bank(DECODER_REPLAY).buckets) == (full, late)
    (line,) = server.log.having("capture-failed")
    kept = len(full if fails[0] == FULL_LAYER else late)
    reason = "rank 0: OutOfMemoryError: CUDA out of memory."
    assert line == f'dsv4-graphs: capture-failed bank={fails[0]} rows={fails[1]} kept={kept} reason="{reason}"'
    assert server.log.having("captured bank=total", f"graphs={len(full) + len(late)} ")
    serves(server, {"a": 1}, {"a": 70, "b": 33}, {"c": 128})


def test_a_server_without_any_graph_serves(servers: Servers) -> None:
    fails = out_of_memory((FULL_LAYER, 64), (DECODER_REPLAY, 128))
    server = servers.own(ONE_BUCKET, make_backend=watched_backend([], fails))
    assert server.log.having("captured bank=total", "graphs=0 ")
    serves(server, {"a": 60}, {"a": 33, "b": 2})
    assert server.served.replays == {}


@pytest.mark.parametrize("fails", [(FULL_LAYER, 64), (DECODER_REPLAY, 128)])
def test_strict_refuses_a_failed_capture(servers: Servers, fails: Event) -> None:
    from sglang_dsv4_graphs.bank.backend import CaptureError

    backend = watched_backend([], out_of_memory(fails))
    server = servers.own(ONE_BUCKET | STRICT, make_backend=backend, startup=False)
    with pytest.raises(CaptureError, match=rf"bank={fails[0]} rows={fails[1]}: rank 0: OutOfMemoryError"):
        server.runner.startup()
    assert not server.served.ready


def test_a_body_that_reads_the_host_fails_its_capture(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a real capture arrives as the reason, too."""
    from sglang_dsv4_graphs.bank.layer_range import LayerRange

    original = LayerRange.body

    def reading(self: Any, inputs: Any, *args: Any) -> Any:
        inputs.residual.sum().item()
        return original(self, inputs, *args)

    monkeypatch.setattr(LayerRange, "body", reading)
    server = servers.own(ONE_BUCKET)
    lines = server.log.having("capture-failed", "rank 0: CaptureError")
    assert len(lines) == 2
    assert all("_local_scalar_dense" in line for line in lines)
    serves(server, {"a": 60})


@pytest.mark.parametrize("strict", [False, True])
def test_a_startup_that_breaks_down(servers: Servers, monkeypatch: pytest.MonkeyPatch, strict: bool) -> None:
    from sglang_dsv4_graphs.bank.dummies import Dummies

    monkeypatch.setattr(Dummies, "_input_ids", lambda self, rows: 1 / 0)
    server = servers.own(ONE_BUCKET | (STRICT if strict else {}), startup=False)
    if strict:
        with pytest.raises(ZeroDivisionError):
            server.runner.startup()
        return
    server.runner.startup()
    (line,) = server.log.having(" eager ")
    assert line == 'dsv4-graphs: eager reason="startup failed: ZeroDivisionError: division by zero"'
    story = Story(server, Judge.of(server))
    batch = story.batch({"a": 40})
    right = server.eager_tail(batch)
    step, replays, fallbacks = server.new_counts(lambda: server.runner.forward(batch))
    assert same(step.tail, right)
    assert (replays, fallbacks) == ({}, {})


# Where the ladder ends: a trial on a device whose clock is ours


@pytest.fixture
def small_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of buckets that a CPU captures in time: of 128 and 192 rows."""
    from sglang_dsv4_graphs.bank import trial

    monkeypatch.setattr(trial, "ALWAYS", 64)
    monkeypatch.setattr(trial, "COARSE", 64)


@pytest.mark.parametrize(
    ("eager_from", "buckets", "raced", "trimmed"),
    [
        # Rows of a trial are the fewest of its bucket; the largest bucket comes first, and last for several requests.
        (999, (64, 128, 192), [129], None),
        (100, (64, 128), [129, 65, 129], "192..192"),
        (10, (64,), [129, 65, 129], "128..192"),
    ],
)
def test_the_ladder_ends_where_eager_is_as_fast(
    servers: Servers,
    monkeypatch: pytest.MonkeyPatch,
    small_trials: None,
    eager_from: int,
    buckets: tuple[int, ...],
    raced: list[int],
    trimmed: str | None,
) -> None:
    from sglang_dsv4_graphs.hooks import start

    clock = Clock(eager=lambda rows: 1.0 if rows > eager_from else 3.0, replayed=lambda rows: 2.0)
    monkeypatch.setattr(start, "Device", clock)
    server = servers.own(AUTOMATIC, chunked_prefill_size=192)
    assert server.bank(FULL_LAYER).buckets == buckets
    assert clock.raced == [(kind, rows) for rows in raced for _ in range(2) for kind in ("eager", "replayed")]
    lines = server.log.having("trimmed")
    reason = 'reason="eager is as fast there"'
    assert lines == ([f"dsv4-graphs: trimmed bank=full-layer rows={trimmed} {reason}"] if trimmed else [])
    assert len(server.log.having("trial bank=full-layer")) == len(raced)
    serves(server, {"a": 60}, {"a": 70, "b": 33}, {"c": 130})


def test_larger_buckets_serve_steps_of_several_requests(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, small_trials: None
) -> None:
    from sglang_dsv4_graphs.bank.decide import TOO_FEW_REQUESTS
    from sglang_dsv4_graphs.hooks import start

    clock = Clock(eager=lambda rows: 1.0 if rows > 64 else 3.0, replayed=lambda rows: 2.0, each=0.5)
    monkeypatch.setattr(start, "Device", clock)
    server = servers.own(AUTOMATIC, chunked_prefill_size=192)
    assert clock.raced[-4:] == [("eager", 129), ("replayed", 129)] * 2
    assert clock.requests[-4:] == [4] * 4
    assert server.bank(FULL_LAYER).buckets == (64, 128, 192)
    assert server.log.having("several") == ["dsv4-graphs: several bank=full-layer rows=128..192 requests=4"]
    story = Story(server, Judge.of(server))
    taken = []
    for step in ({"a": 130}, {"b": 30, "c": 40, "d": 30, "e": 29}, {"f": 9}):
        replays, fallbacks, _ = story.run(story.batch(step))
        taken.append([key for key in (*replays, *fallbacks) if key[0] == FULL_LAYER])
    assert taken == [[(FULL_LAYER, TOO_FEW_REQUESTS)], [(FULL_LAYER, 192)], [(FULL_LAYER, 64)]]


def test_no_bucket_is_for_steps_of_more_requests_than_one_can_have(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, small_trials: None
) -> None:
    from sglang_dsv4_graphs.hooks import start

    clock = Clock(eager=lambda rows: 1.0 if rows > 64 else 3.0, replayed=lambda rows: 2.0, each=0.5)
    monkeypatch.setattr(start, "Device", clock)
    server = servers.own(AUTOMATIC, chunked_prefill_size=192, prefill_max_requests=3)
    assert set(clock.requests) == {1}
    assert server.bank(FULL_LAYER).buckets == (64,)


def test_a_bucket_whose_trial_cannot_be_captured_loses(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, small_trials: None
) -> None:
    from sglang_dsv4_graphs.hooks import start

    clock = Clock(eager=lambda rows: 3.0, replayed=lambda rows: 2.0)
    monkeypatch.setattr(start, "Device", clock)
    backend = watched_backend([], out_of_memory((FULL_LAYER, 192)))
    server = servers.own(AUTOMATIC, make_backend=backend, chunked_prefill_size=192)
    assert server.bank(FULL_LAYER).buckets == (64, 128)
    assert server.log.having("capture-failed") == []
    serves(server, {"a": 128})


def test_a_cap_that_somebody_set_is_not_tried(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, small_trials: None
) -> None:
    from sglang_dsv4_graphs.hooks import start

    clock = Clock(eager=lambda rows: 1.0, replayed=lambda rows: 2.0)
    monkeypatch.setattr(start, "Device", clock)
    server = servers.own({FULL_LAYER_CAP: "128", DECODER_REPLAY_CAP: "0"})
    assert server.bank(FULL_LAYER).buckets == (64, 128)
    assert clock.raced == []


@pytest.mark.parametrize("collects", [False, True])
def test_collections_of_the_sweep_leave_out_what_was_there(servers: Servers, thawed: None, collects: bool) -> None:
    """As in the engine's captures, unless its user wants whole collections (--enable-cudagraph-gc)."""
    freeze_imports()
    gc.unfreeze()
    frozen: list[bool] = []

    class Looks:
        @hookimpl
        def dsv4_graphs_startup(self, startup: Any) -> None:
            frozen.append(gc.get_freeze_count() > 0)

    servers.own(ONE_BUCKET, extensions=[Looks()], enable_cudagraph_gc=collects)
    assert (frozen, gc.get_freeze_count()) == ([not collects], 0)
