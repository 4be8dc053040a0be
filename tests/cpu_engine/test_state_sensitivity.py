"""Whatever of a step goes stale shows in the numbers.

These are the faults that graphs cause: somebody else's slots, positions or requests, an older step's
metadata, memory that was overwritten. Were one of them invisible here, tests of the bank could not see it
either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.engine

VISIBLE = 1e-2


def difference(a: Any, b: Any) -> float:
    return float(((a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)).max())


@pytest.fixture
def second_chunk(runner: Any) -> tuple[Any, Any, Any, Any]:
    """(runner, second chunk's batch, state before it, its right result); the first chunk's length is odd."""
    from sglang_dsv4_graphs.cpu_engine import Request

    prompt, other = Request.of(400, 1), Request.of(300, 2)
    runner.extend([prompt, other], [171, 55])
    batch = runner.batch([prompt, other], [150, 60])
    state = runner.state()
    right = runner.forward(batch)
    runner.load_state(state)
    return runner, batch, state, right


def swap_first_two(values: Any) -> Any:
    return values[[1, 0, *range(2, len(values))]]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("out_cache_loc", lambda loc: loc.flip(0)),
        ("positions", lambda positions: positions + 1),
        ("req_pool_indices", swap_first_two),
        ("input_ids", lambda ids: ids.roll(1)),
    ],
)
def test_stale_field_of_the_batch(second_chunk: Any, name: str, change: Callable[[Any], Any]) -> None:
    runner, batch, _, right = second_chunk
    setattr(batch, name, change(getattr(batch, name)))
    assert difference(runner.forward(batch).tail, right.tail) > VISIBLE


@pytest.mark.parametrize("kind", ["swa", "compressed", "index_keys", "pending"])
def test_overwritten_memory(second_chunk: Any, kind: str) -> None:
    runner, batch, state, right = second_chunk
    buffers = [name for name in state["pool"] if name.startswith(kind + ".")]
    assert buffers
    for name in buffers:
        layer = int(name.split(".")[1])
        start = runner.model.model.late_layer_start
        if kind == "swa" and layer >= start:
            continue  # this chunk's tail reaches no older row there
        damaged = {k: (v.roll(1, 0) if k == name else v) for k, v in state["pool"].items()}
        runner.load_state({**state, "pool": damaged})
        assert difference(runner.forward(batch).tail, right.tail) > VISIBLE, name


def test_metadata_of_an_older_step(second_chunk: Any) -> None:
    runner, batch, state, right = second_chunk
    from sglang_dsv4_graphs.cpu_engine import Request

    other = runner.batch([Request.of(150, 7), Request.of(60, 8)])
    runner.attn_backend.init_forward_metadata(other)
    stale = runner.attn_backend.forward_metadata, runner.attn_backend.tail_forward_metadata
    runner.load_state(state)
    runner.attn_backend.init_forward_metadata(batch)
    runner.attn_backend.forward_metadata = stale[0]
    with runner.forward_context(batch):
        hidden, _ = runner.model.forward(batch.input_ids, batch.positions, batch)
    assert difference(hidden[right.tail_rows], right.tail) > VISIBLE


def test_rows_that_the_step_does_not_have(second_chunk: Any) -> None:
    """Padding that attends as if it were real."""
    import torch

    runner, batch, _, _ = second_chunk
    backend = runner.attn_backend
    backend.init_forward_metadata(batch)
    layer, rows = runner.model.model.layers[0].self_attn.attn_mqa, batch.input_ids.shape[0]
    q, k = torch.zeros(rows + 1, layer.tp_q_head_num, layer.head_dim), torch.zeros(1)
    sink = torch.zeros(layer.tp_q_head_num)
    with pytest.raises(ValueError, match=f"{rows + 1} rows attend, the step has {rows}"):
        backend.forward(q=q, k=k, v=k, layer=layer, forward_batch=batch, compress_ratio=0, attn_sink=sink)
    assert backend.forward(
        q=q[:rows], k=k, v=k, layer=layer, forward_batch=batch, compress_ratio=0, attn_sink=sink
    ).shape == (rows, layer.tp_q_head_num, layer.head_dim)


def test_table_rows_of_another_request(second_chunk: Any) -> None:
    runner, batch, _, right = second_chunk
    table = runner.req_to_token_pool.req_to_token
    first, second = batch.req_pool_indices.tolist()
    table[[first, second]] = table[[second, first]]
    assert difference(runner.forward(batch).tail, right.tail) > VISIBLE


def test_selection_matters(second_chunk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_dsv4_graphs.cpu_engine import sources

    runner, batch, _, right = second_chunk
    top = sources._top
    monkeypatch.setattr(sources, "_top", lambda scores, count: top(-scores.nan_to_num(neginf=0), count))
    assert difference(runner.forward(batch).tail, right.tail) > VISIBLE


def test_store_refuses_rows_without_slots(runner: Any) -> None:
    import torch

    pool = runner.token_to_kv_pool
    weight, freqs = torch.ones(128), runner.model.model.layers[0].self_attn.freqs_cis
    positions = torch.arange(4)
    with pytest.raises(ValueError, match="4 KV rows, 3 slots"):
        pool.set_swa_key_buffer_radix_fused_norm_rope(
            layer_id=0,
            swa_loc=torch.arange(3),
            kv=torch.ones(4, 128),
            kv_weight=weight,
            eps=1e-6,
            freqs_cis=freqs,
            positions=positions,
        )


def test_absent_rows_may_hold_anything(second_chunk: Any) -> None:
    runner, batch, state, right = second_chunk
    for name, buffer in state["pool"].items():
        if not name.startswith("pending"):
            buffer[0] = float("nan")  # the dummy slot, where padding writes
    runner.load_state(state)
    assert (runner.forward(batch).tail == right.tail).all()
