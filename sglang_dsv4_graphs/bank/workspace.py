"""The GEMM workspace of a capture stream, kept at one address for as long as graphs may use it.

torch gives cuBLAS one workspace per stream, which a captured GEMM uses by address, and frees it whenever a graph
that was captured on the stream is destroyed (torch 2.14, ``CUDAGraph::reset``). On a stream that several captures
share, every other graph then writes to memory that belongs to somebody else, or to nobody once the allocator's cache
is emptied. So the workspace lives in a pool of its own: freed there it stays mapped, nobody else gets it, and the next
GEMM on the stream takes the same memory again.
"""

from __future__ import annotations

from typing import Any

import torch

# Pools that hold a stream's workspace, by the stream's handle; for the life of the process.
_POOLS: dict[int, Any] = {}
# torch deals its streams out in turn, and from the start again after this many.
_STREAMS = 32
# The matrices are smaller than the smallest workspace that CUBLAS_WORKSPACE_CONFIG is documented with, 128 KiB.
_SIDE, _LEAST_BYTES = 64, 64 << 10


def hold_workspace(stream: torch.cuda.Stream) -> bool:
    """Have GEMMs on ``stream`` use a workspace that outlives every graph; not inside a capture.

    To be called before anybody captures on the stream, before each capture of ours, and after a graph of ours has
    gone: where the workspace was freed it is taken again, at the same address.

    Returns:
        Whether it is so. False: the stream had a workspace before the first call, and graphs may use that one.
    """
    pool = _POOLS.get(stream.cuda_stream)
    if pool is None:
        pool = _POOLS[stream.cuda_stream] = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool), torch.cuda.stream(stream):
        ones = torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16, device="cuda")
        # Without and with a bias: two libraries, which may have a workspace each.
        torch.mm(ones, ones)
        torch.nn.functional.linear(ones, ones, ones[0])
        del ones
    stream.synchronize()
    return _active_bytes(pool) >= _LEAST_BYTES


def stream_of_our_own() -> torch.cuda.Stream:
    """A stream whose workspace is held: nobody has run GEMMs on it before us, or captured any.

    A new stream of torch's may be one that others have, the engine's capture stream even. Where none can be held, GEMMs
    have no workspace (``CUBLAS_WORKSPACE_CONFIG=:0:0``), so any will do.
    """
    for _ in range(_STREAMS):
        stream = torch.cuda.Stream()
        if hold_workspace(stream):
            break
    return stream


def _active_bytes(pool: Any) -> int:
    return sum(int(segment["allocated_size"]) for segment in torch.cuda.memory_snapshot(pool.id))
