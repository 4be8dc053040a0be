"""Do graphs on a shared capture stream survive that another one of the stream is destroyed? Needs torch and a GPU.

    PYTHONPATH=$PWD python3 benchmarks/gpu/workspace.py

Two processes capture a split-K GEMM, destroy another graph of the same stream, empty the allocator's cache, fill the
memory that came free, and replay: once as torch is (``plain``: the GEMM writes to memory that is no longer its own, and
may fault), once with the workspace held as the plugin holds it (``held``: the result and the memory beside it must be
whole). PASS or FAIL is about ``held``; what becomes of ``plain`` is printed beside it.
"""

from __future__ import annotations

import gc
import subprocess
import sys

import torch

from sglang_dsv4_graphs.bank.workspace import hold_workspace

# Few outputs and a long sum: cuBLAS splits the sum and adds up through its workspace.
ROWS, INNER, COLUMNS = 64, 28672, 64
FILL_BYTES, FILLS = 32 << 20, 64


def child(held: bool) -> None:
    stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    if held:
        assert hold_workspace(stream), "nobody used this stream before"
    left = torch.randn(ROWS, INNER, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(INNER, COLUMNS, device="cuda", dtype=torch.bfloat16)
    with torch.cuda.stream(stream):
        left @ right
    kept, gone = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    for graph in (kept, gone):
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            product = left @ right
        if graph is kept:
            result = product
    kept.replay()
    torch.cuda.synchronize()
    wanted = result.clone()
    del graph, gone, product
    if held:
        assert hold_workspace(stream)
    gc.collect()
    torch.cuda.empty_cache()
    with torch.cuda.stream(stream):
        fills = [torch.full((FILL_BYTES,), 7, dtype=torch.uint8, device="cuda") for _ in range(FILLS)]
    torch.cuda.synchronize()
    left.neg_()
    kept.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, -wanted), "the replay's result is wrong"
    assert all(bool((fill == 7).all()) for fill in fills), "the replay wrote into somebody else's memory"


def main() -> int:
    passed = False
    for name in ("plain", "held"):
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, timeout=120)
        last = (done.stderr.strip().splitlines() or ["whole"])[-1]
        errors = [line for line in done.stderr.splitlines() if "Error" in line] or [last]
        passed = done.returncode == 0
        print(name, "whole" if passed else errors[0][:200], flush=True)
    print("PASS" if passed else "FAIL")
    return int(not passed)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(sys.argv[1] == "held")
        sys.exit(0)
    sys.exit(main())
