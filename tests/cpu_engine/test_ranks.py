"""Several processes make one tensor-parallel engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

_RANK = """
import sys, torch
from sglang_dsv4_graphs.cpu_engine import build_runner, Request
from sglang_dsv4_graphs.cpu_engine.process import World
rank, port = int(sys.argv[1]), int(sys.argv[2])
runner = build_runner(world=World(rank, 2, port), dtype=torch.float32)
prompts = [Request.of(150, 1), Request.of(20, 2)]
runner.extend(prompts, [70, 20])
step = runner.extend([prompts[0], prompts[1].grow(30)])
meta = runner.attn_backend.tail_forward_metadata
print("heads", runner.model.model.layers[0].self_attn.n_local_heads, tuple(meta.q_pad_buffer.shape[1:]))
print("hidden", step.tail.isfinite().all().item(), step.tail.double().sum().item(), step.tail.std().item())
print("swa", runner.token_to_kv_pool.swa[3].double().sum().item())
"""


@pytest.mark.engine
def test_two_ranks_compute_one_step() -> None:
    from sglang_dsv4_graphs.cpu_engine.process import free_port

    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [p.returncode for p in ranks] == [0, 0], outputs
    lines = [out.splitlines()[-3:] for out, _ in outputs]
    # Each rank has half of the heads, padded to the width of the kernels, and both the whole result.
    assert lines[0] == lines[1]
    assert lines[0][0] == "heads 2 (64, 128)"
    assert lines[0][1].startswith("hidden True ")


@pytest.mark.parametrize(("rank", "size", "port"), [(2, 2, 1), (-1, 1, 0), (0, 2, 0)])
def test_impossible_worlds(rank: int, size: int, port: int) -> None:
    from sglang_dsv4_graphs.cpu_engine.process import World

    with pytest.raises(ValueError, match=r"rank|port"):
        World(rank, size, port)
