"""What a benchmark cannot do, said in one line."""

from __future__ import annotations


class BenchError(RuntimeError):
    """The benchmark cannot run or a part of it failed; the message says why and what to do."""
