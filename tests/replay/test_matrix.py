"""What stands down, what falls back, and what is served: one row each, as docs/fallbacks.md lists them.

The facts are the engine's: its published arguments, its accessors, its batches. Each row checks the reason where
people will look for it, and that the step is the engine's either way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.replay.judge import Judge, same
from tests.replay.server import DECODER_REPLAY, DECODER_REPLAY_CAP, FULL_LAYER, FULL_LAYER_CAP, Server, Servers
from tests.replay.story import Story

pytestmark = pytest.mark.engine

SETTINGS = {FULL_LAYER_CAP: "64", DECODER_REPLAY_CAP: "128"}


def equal_to_eager(server: Server) -> None:
    """Steps are the engine's to the bit: nothing is replayed, nothing is patched into them."""
    story = Story(server, Judge.of(server))
    for step in ({"a": 61}, {"a": 40, "b": 3}):
        batch = story.batch(step)
        right = server.eager_tail(batch)
        assert same(server.runner.forward(batch).tail, right)


# Servers that stand down


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, value)
        yield


@contextmanager
def parallel(server: Server, **widths: int) -> Iterator[None]:
    """The engine's widths as in a world of several processes; its own override checks them against this world."""
    context = server.installation.runtime.engine.get_parallel()
    with pytest.MonkeyPatch.context() as patch:
        for name, width in widths.items():
            patch.setitem(context._overrides, name, width)
        yield


def pool_borrowing(server: Server) -> Any:
    return server.installation.runtime.engine.envs.SGLANG_ENABLE_GRAPH_POOL_BORROW.override(True)


def offload(**arguments: int) -> Callable[[Server], Any]:
    return lambda server: server.installation.runtime.engine.get_exec().offload.override(**arguments)


def expert_all_to_all(server: Server) -> Any:
    from sglang.srt.layers.moe.utils import MoeA2ABackend
    from sglang.srt.runtime_context import get_flags

    return get_flags().moe.override(a2a_backend=MoeA2ABackend.DEEPEP)


@contextmanager
def unified_kv(server: Server) -> Iterator[None]:
    """An AMD GPU with the backend that has it, as the engine's own gate sees them."""
    import importlib

    engine = server.installation.runtime.engine
    gate = engine.unified_kv
    module = importlib.import_module(gate.__module__)
    with pytest.MonkeyPatch.context() as patch, engine.envs.SGLANG_HACK_FLASHMLA_BACKEND.override("unified_kv_triton"):
        patch.setattr(module, "is_hip", lambda: True)
        gate.cache_clear()
        yield
    gate.cache_clear()


def no_backend(server: Server) -> Any:
    supply = next(p for p in server.manager.get_plugins() if hasattr(p, "backend"))
    return attribute(supply, "backend", None)


# Row: how the server comes to be such a one, from the built server; the reason's beginning.
FACTS: dict[str, tuple[Callable[[Server], Any], str]] = {
    "DP attention": (lambda s: parallel(s, attn_dp_size=2), "DP attention: "),
    "context parallelism": (lambda s: parallel(s, attn_cp_size=2), "context parallelism: "),
    "pipeline parallelism": (lambda s: parallel(s, pp_size=2), "pipeline parallelism: "),
    "two-batch overlap": (
        lambda s: s.installation.runtime.engine.get_exec().overlap.override(enable_two_batch_overlap=True),
        "two-batch overlap: ",
    ),
    "not CUDA": (no_backend, "device cpu: CUDA graphs need an NVIDIA GPU"),
    "unified KV": (unified_kv, "unified KV: "),
    "HiSparse": (lambda s: attribute(s.runner, "hisparse_coordinator", object()), "HiSparse: "),
    "LoRA": (lambda s: attribute(s.runner, "lora_manager", object()), "LoRA: "),
    "weight offload": (offload(cpu_offload_gb=1), "weight offload: "),
    "weight offload in groups": (offload(offload_group_size=2), "weight offload: "),
    "experts on the CPU": (
        lambda s: s.installation.runtime.engine.get_exec().moe.override(kt_weight_path="/experts"),
        "weight offload: ",
    ),
    "expert all-to-all": (expert_all_to_all, "expert all-to-all: "),
    "graph-pool borrowing": (pool_borrowing, "graph-pool borrowing: "),
    "forward hooks": (
        lambda s: s.installation.runtime.engine.get_observability().override(forward_hooks=[{"name": "mine"}]),
        "forward hooks: ",
    ),
    "not V4.1": (lambda s: attribute(s.model, "hc_pre_from_prev_sublayer", False), "model without lagged hyper-"),
}


def stood_down(server: Server, reason: str) -> None:
    """One line says why, and the server is ready for nothing."""
    assert not server.served.ready
    (line,) = [line for line in server.log.lines if line.startswith("dsv4-graphs:")]
    assert re.fullmatch(rf'dsv4-graphs: eager reason="{re.escape(reason)}.*"', line)
    assert (server.bank(FULL_LAYER), server.bank(DECODER_REPLAY)) == (None, None)


@pytest.mark.parametrize(("fact", "reason"), FACTS.values(), ids=FACTS.keys())
def test_a_server_that_stands_down(servers: Servers, fact: Callable[[Server], Any], reason: str) -> None:
    server = servers.shared("undecided", SETTINGS, startup=False)
    server.served.stand_down = None
    server.installation.runtime._decided.discard(server.served)
    server.log.lines.clear()
    with fact(server):
        server.runner.startup()
    stood_down(server, reason)
    equal_to_eager(server)
    assert (server.served.replays, server.served.fallbacks) == ({}, {})
    # Decided once: a second startup asks nobody.
    server.runner.startup()
    stood_down(server, reason)


ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "memory saver": ({"enable_memory_saver": True}, "memory saver: "),
    "disaggregated decode": ({"disaggregation_mode": "decode"}, "disaggregated decode: "),
    # The engine refuses it together with decoder SWA bounded replay.
    "full prefill graph": (
        {"cuda_graph_backend_prefill": "full", "bounded_replay": False},
        "full prefill graph: not shown to be safe beside the banks",
    ),
}


@pytest.mark.parametrize(("arguments", "reason"), ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_a_server_whose_arguments_stand_down(servers: Servers, arguments: dict[str, Any], reason: str) -> None:
    server = servers.own(SETTINGS, graphs=False, **arguments)
    stood_down(server, reason)
    equal_to_eager(server)


@pytest.mark.parametrize("bounded", [True, False])
def test_a_breakable_prefill_graph_is_served(servers: Servers, bounded: bool) -> None:
    """Steps that it does not take replay the banks, as on a server without one."""
    server = servers.own(SETTINGS, cuda_graph_backend_prefill="breakable", bounded_replay=bounded)
    assert server.installation.runtime.engine.captures_prefill()
    replays, _ = Story(server, Judge.of(server)).step({"a": 50})
    assert [bank for bank, _ in replays] == [FULL_LAYER, DECODER_REPLAY][: 1 + bounded]
    assert server.log.having("eager reason=") == []


@pytest.mark.parametrize(
    ("kind", "error"),
    [("full", "cannot be combined with the prefill CUDA graph"), ("tc_piecewise", "'tc_piecewise' not allowed")],
)
def test_the_engine_refuses_other_prefill_graphs_of_this_model(servers: Servers, kind: str, error: str) -> None:
    """With decoder SWA bounded replay, and at all."""
    with pytest.raises(ValueError, match=error):
        servers.own(SETTINGS, startup=False, cuda_graph_backend_prefill=kind)


def test_strict_refuses_to_stand_down(servers: Servers) -> None:
    server = servers.own({**SETTINGS, "SGLANG_DSV4_GRAPHS_STRICT": "1"}, startup=False)
    with (
        attribute(server.runner, "lora_manager", object()),
        pytest.raises(RuntimeError, match=r"SGLANG_DSV4_GRAPHS_STRICT=1 and prefill stays eager: LoRA: "),
    ):
        server.runner.startup()


def test_the_engine_refuses_two_batch_overlap_of_this_model(servers: Servers) -> None:
    """So the row above is for engines that come to allow it."""
    with pytest.raises(ValueError, match="does not support two-batch overlap"):
        servers.own(SETTINGS, startup=False, enable_two_batch_overlap=True)


# Steps


@pytest.fixture
def server(servers: Servers) -> Server:
    return servers.shared("steps", SETTINGS)


def falls_back(server: Server, batch: Any, reason: str) -> None:
    """``batch`` runs as the engine runs it, and is counted."""
    right = server.eager_tail(batch)
    step, replays, fallbacks = server.new_counts(lambda: server.runner.forward(batch))
    assert (replays, fallbacks) == ({}, {("all", reason): 1})
    assert same(step.tail, right)
    lines = server.log.having(f'fallback bank=all reason="{reason}"')
    assert len(lines) == 1, "the first is logged, all are counted"


@pytest.mark.parametrize("what", ["image", "audio", "video"])
def test_multimodal_input(server: Server, what: str) -> None:
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs

    batch = Story(server, Judge.of(server)).batch({"a": 50, "b": 20})
    item = MultimodalDataItem(modality=Modality.from_str(what))
    batch.mm_inputs = [None, MultimodalInputs(mm_items=[item])]
    falls_back(server, batch, "multimodal input")


def test_expert_recorder(server: Server) -> None:
    from sglang.srt.eplb import expert_distribution as engine

    class Recording(engine.ExpertDistributionRecorder):
        recording = True

    before = engine.get_global_expert_distribution_recorder()
    batch = Story(server, Judge.of(server)).batch({"a": 50})
    engine.set_global_expert_distribution_recorder(Recording())
    try:
        falls_back(server, batch, "expert recorder active")
    finally:
        engine.set_global_expert_distribution_recorder(before)
    Story(server, Judge.of(server)).step({"a": 50})


def test_prompt_logprobs_at_the_end(server: Server) -> None:
    """A request that asks for those of its last token alone has an ordinary tail."""
    story = Story(server, Judge.of(server))
    batch = story.batch({"a": 50})
    batch.return_logprob = True
    _, fallbacks, verdicts = story.run(batch)
    assert (fallbacks, len(verdicts)) == ({}, 2)


def test_mixed_chunk(server: Server) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    story = Story(server, Judge.of(server))
    story.step({"a": 30, "b": 7})
    batch = story.batch({"c": 60, "a": 1, "b": 1})  # the last two decode
    batch.forward_mode = ForwardMode.MIXED
    _, fallbacks, verdicts = story.run(batch)
    assert (fallbacks, [(v.bank, v.rows) for v in verdicts]) == ({}, [(FULL_LAYER, 62), (DECODER_REPLAY, 62)])


class Loop:
    """The engine's loop, called with the model itself or with a view of it."""

    def __init__(self) -> None:
        self.models: list[Any] = []

    def __call__(self, model: Any, *args: Any) -> None:
        self.models.append(model)


def through_the_loop(server: Server, batch: Any, global_ids: Any = None) -> tuple[Any, dict[Any, int], dict[Any, int]]:
    """What model the loop gets for a batch that the stand-in's backend cannot run; replays and fallbacks."""
    loop, ids = Loop(), batch.input_ids
    args = (batch.positions, None, batch, ids, ids if global_ids is None else global_ids, False, None)
    with server.runner.forward_context(batch):
        server.runner.attn_backend.init_forward_metadata(Story(server, Judge.of(server)).batch({"z": 9}))
        _, replays, fallbacks = server.new_counts(lambda: server.served.run_loop(loop, *args))
    (model,) = loop.models
    return model, replays, fallbacks


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("EXTEND", None),
        ("TARGET_VERIFY", "speculative verify or draft"),
        # Steps that are no prefill of the target are not candidates, and not counted.
        ("DRAFT_EXTEND_V2", ""),
        ("IDLE", ""),
        ("DECODE", ""),
    ],
)
def test_forward_modes(server: Server, mode: str, reason: str | None) -> None:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    batch = Story(server, Judge.of(server)).batch({"a": 50})
    batch.forward_mode = ForwardMode[mode]
    model, replays, fallbacks = through_the_loop(server, batch)
    assert replays == {}
    if reason is None:
        # The control: an extend gets a view in which banks stand.
        assert (model is server.model, fallbacks) == (False, {})
        return
    assert model is server.model
    assert fallbacks == ({("all", reason): 1} if reason else {})


def test_a_context_parallel_step(server: Server) -> None:
    batch = Story(server, Judge.of(server)).batch({"a": 50})
    batch.attn_cp_metadata = object()
    model, _, fallbacks = through_the_loop(server, batch)
    assert (model, fallbacks) == (server.model, {("all", "context-parallel step"): 1})


def test_token_ids_of_other_ranks(server: Server) -> None:
    batch = Story(server, Judge.of(server)).batch({"a": 50})
    model, _, fallbacks = through_the_loop(server, batch, batch.input_ids.clone())
    assert (model, fallbacks) == (server.model, {("all", "global token ids differ from local ones"): 1})


def test_a_row_count_that_is_not_the_batchs(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    batch = Story(server, Judge.of(server)).batch({"a": 50})
    monkeypatch.setattr(type(batch), "moe_num_token_non_padded", lambda self: torch.tensor(3))
    model, _, fallbacks = through_the_loop(server, batch)
    assert (model, fallbacks) == (server.model, {("all", "MoE row count that a graph cannot own"): 1})


def test_steps_while_the_engine_captures(server: Server) -> None:
    from sglang.srt.model_executor.runner_utils import capture_mode

    batch = Story(server, Judge.of(server)).batch({"a": 50})
    with capture_mode.model_capture_mode():
        model, _, fallbacks = through_the_loop(server, batch)
    assert (model is server.model, fallbacks) == (True, {})


def test_every_row_of_the_docs_is_here() -> None:
    """A reason that the code gives and the docs do not list is one that nobody finds."""
    from pathlib import Path

    from sglang_dsv4_graphs.bank import decide

    docs = (Path(__file__).parents[2] / "docs" / "fallbacks.md").read_text()
    servers_ = [reason.split(":")[0] for _, reason in decide._SERVER_REASONS]
    steps = [reason for name, reason in decide._STEP_REASONS] + [
        decide.TOO_MANY_ROWS,
        decide.TOO_FEW_REQUESTS,
        decide.RETIRED,
    ]
    assert [reason for reason in [*servers_, *steps] if f"`{reason}`" not in docs] == []
    rows = [reason for _, reason in [*FACTS.values(), *ARGUMENTS.values()]]
    assert [reason for reason in servers_ if not any(row.startswith(reason) for row in rows)] == []
