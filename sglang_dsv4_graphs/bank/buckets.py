"""Which row counts get a graph: the ladders of both banks.

A graph has a fixed number of rows and a step has any, so a step is padded to the next bucket. Fine buckets waste
little padding but cost a graph each (about 0.2 s and some MiB); the steps chosen here are argued in
docs/performance.md. Pure functions of numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

FULL_LAYER_STEP = 256
# Below one step: short cache hits are the commonest prefill step of a chat server.
FULL_LAYER_SMALL = (64, 128)
# The largest bucket that -1 asks for: steps above it keep the GPU busy longer than the host needs.
FULL_LAYER_AUTO_CAP = 8192
# Chunk size that the engine falls back to when chunked prefill is off.
UNCHUNKED_ROWS = 8192
DECODER_REPLAY_STEP = 128


def full_layer_buckets(max_tokens: int, chunk_size: int | None, dummy_limit: int) -> tuple[int, ...]:
    """Rows of the full-layer bank's graphs, ascending.

    Args:
        max_tokens: the setting; -1 is the chunk, at most 8192; 0 is none.
        chunk_size: the server's chunked prefill size in tokens; None or not positive is unchunked.
        dummy_limit: the most tokens that dummy requests can hold (request slots times context length).

    Returns:
        64, 128, then multiples of 256 up to the cap. A cap that is no multiple is a bucket too: a server whose
        chunk is 2000 tokens sees steps of 2000 more than any other.
    """
    chunk = chunk_size if chunk_size and chunk_size > 0 else UNCHUNKED_ROWS
    cap = min(chunk, FULL_LAYER_AUTO_CAP) if max_tokens < 0 else max_tokens
    cap = min(cap, dummy_limit)
    if cap <= 0:
        return ()
    ladder = [*FULL_LAYER_SMALL, *range(FULL_LAYER_STEP, cap + 1, FULL_LAYER_STEP)]
    return tuple(sorted({*(rows for rows in ladder if rows <= cap), cap}))


def decoder_replay_buckets(max_rows: int, dummy_limit: int) -> tuple[int, ...]:
    """Rows of the decoder-replay bank's graphs, ascending: multiples of 128 up to ``max_rows``."""
    return tuple(range(DECODER_REPLAY_STEP, min(max_rows, dummy_limit) + 1, DECODER_REPLAY_STEP))


def bucket_for(rows: int, buckets: Sequence[int]) -> int | None:
    """The smallest of ascending ``buckets`` that holds ``rows``, or None (no rows, or too many)."""
    if rows <= 0:
        return None
    at = bisect_left(buckets, rows)
    return buckets[at] if at < len(buckets) else None


def dummy_lengths(rows: int, longest: int) -> list[int]:
    """Lengths of the fewest dummy requests of at most ``longest`` tokens that hold ``rows`` together."""
    if rows <= 0 or longest <= 0:
        raise ValueError(f"dummy requests need rows and a length above zero, got {rows} and {longest}")
    full, rest = divmod(rows, longest)
    return [longest] * full + ([rest] if rest else [])


# Kinds of steps that start other kernels: a few rows (GEMMs of their own, and a number that is no multiple of 16, for
# which Triton compiles variants), a tail of one request, a context that index layers need not score in part, and (the
# largest bucket) one that they score everywhere.
REHEARSED = (3, 128, 1024)


def rehearsal_rows(buckets: Sequence[int], most_rows: int) -> tuple[int, ...]:
    """Rows of the steps that a server runs before its first request: one of each kind that it replays.

    Args:
        buckets: all captured buckets; without any, only the small kinds remain.
        most_rows: the most tokens that dummy requests can hold.
    """
    largest = max(buckets, default=0)
    kinds = {*REHEARSED[:2], *(rows for rows in (*REHEARSED, largest) if 0 < rows <= largest)}
    return tuple(sorted({min(rows, most_rows) for rows in kinds}))
