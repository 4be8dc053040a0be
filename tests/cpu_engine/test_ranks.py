"""Several processes make one tensor-parallel engine."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fresh import in_fresh_processes


def in_a_rank(rank: int, port: int) -> list[Any]:
    """In a fresh process: one step of a world of two; what the ranks must agree on."""
    import torch

    from sglang_dsv4_graphs.cpu_engine import Request, build_runner
    from sglang_dsv4_graphs.cpu_engine.process import World

    runner = build_runner(world=World(rank, 2, port), dtype=torch.float32)
    prompts = [Request.of(150, 1), Request.of(20, 2)]
    runner.extend(prompts, [70, 20])
    step = runner.extend([prompts[0], prompts[1].grow(30)])
    meta = runner.attn_backend.tail_forward_metadata
    heads = runner.model.model.layers[0].self_attn.n_local_heads
    return [
        [heads, *meta.q_pad_buffer.shape[1:]],
        step.tail.isfinite().all().item(),
        step.tail.double().sum().item(),
        step.tail.std().item(),
        runner.token_to_kv_pool.swa[3].double().sum().item(),
    ]


@pytest.mark.engine
def test_two_ranks_compute_one_step() -> None:
    from sglang_dsv4_graphs.cpu_engine.process import free_port

    port = free_port()
    one, other = (ended.value for ended in in_fresh_processes(in_a_rank, [(0, port), (1, port)]))
    # Each rank has half of the heads, padded to the width of the kernels, and both the whole result.
    assert one == other
    assert one[:2] == [[2, 64, 128], True]


@pytest.mark.parametrize(("rank", "size", "port"), [(2, 2, 1), (-1, 1, 0), (0, 2, 0)])
def test_impossible_worlds(rank: int, size: int, port: int) -> None:
    from sglang_dsv4_graphs.cpu_engine.process import World

    with pytest.raises(ValueError, match=r"rank|port"):
        World(rank, size, port)
