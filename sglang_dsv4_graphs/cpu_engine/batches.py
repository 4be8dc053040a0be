"""Requests and the engine's real ForwardBatch for a step of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

VOCABULARY = 512


def random_tokens(length: int, seed: int) -> list[int]:
    """``length`` token ids, equal for equal arguments; a longer draw starts with the shorter one."""
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.randint(2, VOCABULARY, (1,), generator=generator)) for _ in range(length)]


@dataclass(eq=False)
class Request:
    """A prompt, how much of it is in the KV pool, and the request's row in the engine's table."""

    tokens: list[int]
    done: int = 0
    slot: int | None = None

    @classmethod
    def of(cls, length: int, seed: int = 0) -> Request:
        """A prompt of ``length`` random tokens."""
        return cls(random_tokens(length, seed))

    @property
    def pending(self) -> int:
        """Tokens that no step has run yet."""
        return len(self.tokens) - self.done

    def grow(self, length: int, seed: int = 0) -> Request:
        """Append ``length`` random tokens and return the request: its next step is a prefix hit."""
        self.tokens.extend(random_tokens(length, seed + 1_000_003 * len(self.tokens)))
        return self


@dataclass(frozen=True)
class RequestRows:
    """One request's part of a step: rows for ``tokens`` after ``prefix`` tokens, and their KV slots."""

    slot: int
    prefix: int
    tokens: Sequence[int]
    kv_slots: Sequence[int]


def build_batch(parts: Sequence[RequestRows], *, device_counts: bool = False) -> Any:
    """The engine's ForwardBatch of an extend step.

    Args:
        parts: the step's requests, in row order.
        device_counts: also set the count tensors, as a server with expert parallelism does.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

    lens = [len(p.tokens) for p in parts]
    prefixes = [p.prefix for p in parts]
    seq_lens = torch.tensor([a + b for a, b in zip(prefixes, lens, strict=True)], dtype=torch.int64)
    extend_lens = torch.tensor(lens, dtype=torch.int32)
    rows = sum(lens)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(parts),
        input_ids=torch.tensor([t for p in parts for t in p.tokens], dtype=torch.int64),
        req_pool_indices=torch.tensor([p.slot for p in parts], dtype=torch.int64),
        seq_lens=seq_lens.clone(),
        seq_lens_cpu=seq_lens,
        seq_lens_sum=int(seq_lens.sum()),
        out_cache_loc=torch.tensor([s for p in parts for s in p.kv_slots], dtype=torch.int64),
        positions=torch.cat([torch.arange(p.prefix, p.prefix + len(p.tokens)) for p in parts]),
        extend_num_tokens=rows,
        extend_seq_lens=extend_lens,
        extend_seq_lens_cpu=lens,
        extend_prefix_lens=torch.tensor(prefixes, dtype=torch.int32),
        extend_prefix_lens_cpu=prefixes,
        extend_start_loc=torch.cumsum(extend_lens, 0, dtype=torch.int32) - extend_lens,
        extend_logprob_start_lens_cpu=lens,
        return_logprob=False,
        is_extend_in_batch=True,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        global_num_token_non_padded_cpu=rows,
    )
    if device_counts:
        batch.global_num_token_non_padded = torch.tensor(rows, dtype=torch.int32)
        batch.set_local_num_token_non_padded(sharded=False)
    return batch
