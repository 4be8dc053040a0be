"""The engine by our names: the real functions on both versions, and what we add around them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.engine import Engine, facts  # noqa: E402
from sglang_dsv4_graphs.engine.contract import resolve  # noqa: E402

pytestmark = pytest.mark.engine


@pytest.fixture
def engine() -> Engine:
    version = facts.installed_version()
    assert version is not None
    return Engine(version)


@pytest.fixture
def newer(engine: Engine) -> bool:
    """0.5.23 rather than 0.5.22."""
    return engine.release == "0.5.23"


def test_attributes_are_the_contracts_targets(engine: Engine) -> None:
    for contract in facts.contracts_for(engine.version):
        assert engine.has(contract.name)
        # Bound anew at each access, so equal instead of identical.
        assert getattr(engine, contract.name) == resolve(contract.target)


def test_anything_else_is_an_attribute_error(engine: Engine) -> None:
    assert not engine.has("no_such_thing")
    with pytest.raises(AttributeError, match=f"engine {engine.version} has no contract 'no_such_thing'"):
        _ = engine.no_such_thing


def test_hook_targets_are_looked_up_at_each_use(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup

    assert engine.startup is cuda_graph_setup.finalize_cuda_graph_capture
    monkeypatch.setattr(cuda_graph_setup, "finalize_cuda_graph_capture", "patched")
    assert engine.startup == "patched"


def test_everything_else_is_looked_up_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor import forward_context

    kept = engine.get_attn_backend
    monkeypatch.setattr(forward_context, "get_attn_backend", "patched")
    assert engine.get_attn_backend is kept


def test_what_only_one_version_has(engine: Engine, newer: bool) -> None:
    for name in ("AuxHiddenStatePacker", "residual_write", "tail_scope", "tail_run"):
        assert engine.has(name) is newer
    for name in ("kv_store", "low_ratio_sources"):
        assert engine.has(name) is not newer


def test_packing_captured_layers(engine: Engine, newer: bool) -> None:
    layers = [torch.full((5, 3), float(i)) for i in range(2)]
    packer = engine.new_packer(2)
    for hidden in layers:
        packer.append(hidden)
    packed = engine.packed(packer)
    assert isinstance(packer, list) is not newer
    assert torch.equal(packed, torch.cat(layers, dim=-1))

    step = engine.new_packer(2)
    engine.collect_aux(step, packed, 2, None)
    assert torch.equal(engine.packed(step), packed)

    tail = SimpleNamespace(rows=lambda t: t[[0, 4]])
    packed[4] += 1
    step = engine.new_packer(2)
    engine.collect_aux(step, packed, 2, tail)
    assert torch.equal(engine.packed(step), packed[[0, 4]])


def test_hand_over(engine: Engine, newer: bool) -> None:
    state = engine.HcState(torch.randn(4, 2, 8), torch.rand(4, 2))
    batch = SimpleNamespace(residual_stream=None)
    handed = engine.hand_over(state, batch)
    if newer:  # the next layer reads it from the batch, and takes what it was handed for a key
        assert batch.residual_stream.residual is state
    assert handed is state


def test_a_store_that_a_failed_capture_left_ends_with_its_scope(engine: Engine) -> None:
    def failing() -> None:
        with engine.range_capture_scope():
            engine.pending_stores[3] = ("store", object())
            with engine.range_capture_scope():
                assert engine.pending_stores == {}
            assert list(engine.pending_stores) == [3]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert engine.pending_stores == {}


def test_range_capture_scope_nests_and_ends_after_an_error(engine: Engine) -> None:
    assert not engine.capturing_range
    with engine.range_capture_scope():
        assert engine.capturing_range
        with engine.outside_range_capture():
            assert not engine.capturing_range
        assert engine.capturing_range
        with engine.range_capture_scope():
            assert engine.capturing_range
        assert engine.capturing_range
    assert not engine.capturing_range
    for scope in (engine.range_capture_scope, engine.outside_range_capture):
        before = engine.capturing_range
        with pytest.raises(ZeroDivisionError), scope():
            raise ZeroDivisionError
        assert engine.capturing_range is before


@pytest.mark.parametrize(("scope", "attribute"), [("sharing", "step_shared"), ("storing_into", "static_slots")])
def test_scopes_of_replays_and_captures_nest_and_end_after_an_error(engine: Engine, scope: str, attribute: str) -> None:
    given = [object(), object()]

    def now() -> Any:
        return getattr(engine, attribute)

    enter = getattr(engine, scope)
    assert now() is None
    with enter(given[0]):
        assert now() is given[0]
        with enter(given[1]):
            assert now() is given[1]
        assert now() is given[0]
        with enter(None):  # what is inside has none, whatever is around it
            assert now() is None
        with pytest.raises(ZeroDivisionError), enter(given[1]):
            raise ZeroDivisionError
        assert now() is given[0]
    assert now() is None


def test_stores_in_graphs_of_an_ordinary_pool_alone(engine: Engine) -> None:
    def backend(**pool: Any) -> Any:
        return SimpleNamespace(token_to_kv_pool=SimpleNamespace(**pool))

    plain = backend(request_window=None)
    assert engine.stores_in_graph(plain)
    assert engine.stores_in_graph(backend())
    assert not engine.stores_in_graph(backend(request_window=object()))
    with engine.envs.SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE.override(True):
        assert not engine.stores_in_graph(plain)
    assert engine.stores_in_graph(plain)


def test_a_store_takes_its_slots_from_its_backend_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is why slots can be given to a captured store: nothing else of the step's batch is looked at."""
    from sglang.srt.models import deepseek_v4

    stored: list[dict[str, Any]] = []
    pool = SimpleNamespace(set_swa_key_buffer_radix_fused_norm_rope=lambda **given: stored.append(given))
    monkeypatch.setattr(deepseek_v4, "get_token_to_kv_pool", lambda: pool)
    attention = SimpleNamespace(
        layer_id=3,
        q_lora_rank=2,
        kv_norm=SimpleNamespace(weight=torch.ones(3)),
        eps=1e-6,
        freqs_cis="angles",
    )
    asked: list[Any] = []
    backend = SimpleNamespace(get_swa_out_cache_loc=lambda batch: asked.append(batch) or "slots")
    batch, qkv, positions = object(), torch.randn(4, 5), torch.arange(4)
    store = deepseek_v4.MQALayer._compute_kv_to_cache
    store(attention, torch.randn(4, 8), positions, batch, backend, qkv_a=qkv)
    ((given,), (asked_with,)) = (stored, asked)
    assert asked_with is batch
    assert (given["swa_loc"], given["layer_id"], given["positions"]) == ("slots", 3, positions)
    assert torch.equal(given["kv"], qkv[:, 2:])


def test_window_slots_are_the_attention_backends(engine: Engine) -> None:
    slots = torch.arange(4)
    backend = SimpleNamespace(get_swa_out_cache_loc=lambda batch: slots if batch == "the step's" else None)
    with engine.fresh_step_context(backend, SimpleNamespace(moe_num_token_non_padded=lambda: None)):
        assert engine.window_slots("the step's") is slots


def test_range_capture_scope_is_the_engines_tail_scope(engine: Engine, newer: bool) -> None:
    if not newer:
        pytest.skip("0.5.22 has none")
    from sglang.srt.models import deepseek_v4_replay_tail as module

    assert not module.in_replay_tail_graph()
    with engine.range_capture_scope():
        assert module.in_replay_tail_graph()
    assert not module.in_replay_tail_graph()


def test_step_context_without_a_forward_is_none(engine: Engine) -> None:
    assert not engine.has_forward_context()
    with engine.step_context(object()):
        assert not engine.has_forward_context()


def test_contexts_of_steps(engine: Engine, newer: bool) -> None:
    backend, counts = object(), [torch.tensor(n, dtype=torch.int32) for n in (3, 4)]
    batches = [SimpleNamespace(moe_num_token_non_padded=lambda c=c: c) for c in counts]

    def bound() -> Any:
        return engine.get_forward_context().moe_num_token_non_padded()

    with engine.fresh_step_context(backend, batches[0]):
        assert engine.get_attn_backend() is backend
        assert not newer or bound() is counts[0]
        with engine.step_context(batches[1]):
            assert engine.get_attn_backend() is backend
            assert not newer or bound() is counts[1]  # 0.5.23 reads a step's counts through the context
        assert not newer or bound() is counts[0]
    assert not engine.has_forward_context()


def test_local_rows_of_an_unsharded_batch_are_all(engine: Engine) -> None:
    assert engine.local_rows(40, 64, False) == 40


@pytest.mark.parametrize(("rank", "rows"), [(0, 32), (1, 8)])
def test_local_rows_of_a_sharded_batch(engine: Engine, monkeypatch: pytest.MonkeyPatch, rank: int, rows: int) -> None:
    from sglang.srt.model_executor import forward_batch_info as module

    parallel = SimpleNamespace(attn_tp_size=2, attn_tp_rank=rank)
    monkeypatch.setattr(module, "get_parallel", lambda: parallel)
    assert engine.local_rows(40, 64, True) == rows


class Runner:
    """What ``extend_batch`` and ``prepare_metadata`` ask of a model runner."""

    device = "cpu"
    model = SimpleNamespace()

    def __init__(self) -> None:
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.spec_algorithm = SpeculativeAlgorithm.NONE
        self.kv_index_translator = SimpleNamespace(bind_runner_slots=self.called.append)

    @property
    def called(self) -> list[Any]:
        return self.__dict__.setdefault("_called", [])

    def prepare_dummy_forward_batch(self, batch: Any) -> Any:
        self.called.append(batch)
        return batch


@pytest.mark.parametrize("counted", [False, True])
def test_extend_batch(engine: Engine, monkeypatch: pytest.MonkeyPatch, counted: bool) -> None:
    engine.counts_padding = lambda: counted
    runner = Runner()
    ids = torch.arange(10, 16)
    batch = engine.extend_batch(runner=runner, lengths=[4, 2], input_ids=ids)
    # First the pools' slots, then the engine's own completion, on the same batch.
    assert [b is batch for b in runner.called] == [True, True]
    assert batch.forward_mode.is_extend_without_speculative()
    assert batch.input_ids is ids
    assert (batch.batch_size, batch.seq_lens_sum, batch.extend_num_tokens) == (2, 6, 6)
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.req_pool_indices.tolist() == [0, 1]
    for lengths in (batch.seq_lens, batch.seq_lens_cpu, batch.extend_seq_lens, batch.orig_seq_lens):
        assert lengths.tolist() == [4, 2]
    assert batch.extend_seq_lens_cpu == [4, 2]
    assert batch.extend_start_loc.tolist() == [0, 4]
    assert batch.extend_prefix_lens.tolist() == batch.extend_prefix_lens_cpu == [0, 0]
    assert batch.out_cache_loc.tolist() == [0] * 6
    assert batch.global_num_token_non_padded_cpu == 6
    assert not batch.contains_mm_inputs()
    if counted:
        assert batch.num_token_non_padded.dtype is torch.int32
        assert (batch.num_token_non_padded.item(), batch.num_token_non_padded.shape) == (6, ())
        assert batch.global_num_token_non_padded is batch.num_token_non_padded
    else:
        assert batch.num_token_non_padded is None


def test_prepare_metadata(engine: Engine) -> None:
    done: list[Any] = []
    features = SimpleNamespace(enable_encoder_swa_bounded_replay=True)
    engine.get_exec = lambda: SimpleNamespace(features=features)
    engine.set_dp_buffer_len = lambda *args: done.append(("dp", *args))
    engine.set_is_extend_in_batch = lambda value: done.append(("extend", value))
    runner = Runner()
    window = SimpleNamespace(initialize_dummy_history=lambda: done.append("history"))
    runner.token_to_kv_pool = SimpleNamespace(request_window=window)
    backend = SimpleNamespace(init_forward_metadata=lambda batch: done.append(("metadata", batch)))
    batch = SimpleNamespace(global_dp_buffer_len=8, input_ids=torch.zeros(6))
    engine.prepare_metadata(backend, runner, batch)
    assert done == [("metadata", batch), "history", ("dp", 8, 6, False, None), ("extend", False)]
    done.clear()
    features.enable_encoder_swa_bounded_replay = False
    engine.prepare_metadata(backend, runner, batch)
    assert "history" not in done


def test_model_scope_selects_the_models_shared_experts(engine: Engine) -> None:
    seen: list[Any] = []

    @contextmanager
    def override(**fields: Any) -> Iterator[None]:
        seen.append(fields)
        yield
        seen.append("back")

    engine.get_model_args = lambda: SimpleNamespace(override=override)
    with engine.model_scope(Runner()):
        assert seen == []
    runner = Runner()
    runner.model = SimpleNamespace(shared_experts_config="its own")
    with engine.model_scope(runner):
        assert seen == [{"shared_experts": "its own"}]
    assert seen[1:] == ["back"]


def test_inputs_of_a_failed_capture_are_forgotten(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever communicator a group has: the list, none, or one that keeps its inputs elsewhere."""
    from sglang.srt.distributed import parallel_state

    pending = [(1, 2)]
    groups = [
        SimpleNamespace(ca_comm=SimpleNamespace(_graph_inputs=pending)),
        SimpleNamespace(ca_comm=None),
        SimpleNamespace(ca_comm=SimpleNamespace()),
        None,  # a group that is gone
    ]
    monkeypatch.setattr(parallel_state, "_groups", {str(i): lambda g=g: g for i, g in enumerate(groups)})
    Engine(engine.version).forget_graph_inputs()
    assert pending == []


def test_the_engines_communicator_keeps_its_inputs_where_we_look() -> None:
    import inspect

    from sglang.srt.distributed.device_communicators import custom_all_reduce_v2

    source = inspect.getsource(custom_all_reduce_v2)
    assert "self._graph_inputs.append(" in source
    assert "self._graph_inputs.clear()" in source


@pytest.mark.parametrize("inside", [True, False])
def test_unmarked_puts_the_mark_back(engine: Engine, inside: bool) -> None:
    """The engine's own scope clears it when it is left; ours around that one puts back what was there."""
    with engine.enable_breakable() if inside else nullcontext():
        with engine.unmarked():
            assert not engine.in_breakable()
            with engine.enable_breakable():
                assert engine.in_breakable()
            assert not engine.in_breakable()
        assert engine.in_breakable() is inside
        with pytest.raises(ZeroDivisionError), engine.unmarked():
            raise ZeroDivisionError
        assert engine.in_breakable() is inside
    assert not engine.in_breakable()
