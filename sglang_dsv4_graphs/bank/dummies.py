"""Dummy extend steps: what banks are captured from before any request has come.

A dummy step is an ordinary extend of made-up requests: real positions, spread token ids, no prefix, and the
engine's padding slot 0 for every KV write. It goes through the engine's own forward, so that embedding, metadata,
tail and hand-off are the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_dsv4_graphs.bank.buckets import dummy_lengths
from sglang_dsv4_graphs.engine import Engine
from sglang_dsv4_graphs.log import logger

# Two primes: neighbouring rows get different tokens, so that dummy rows spread over the experts.
_TOKEN_STRIDE, _TOKEN_RANGE = 7919, 30011


class Dummies:
    """Builds and runs dummy steps of one model runner."""

    def __init__(self, engine: Engine, runner: Any, model: Any, eager_runner: Any = None) -> None:
        self._engine = engine
        self._runner = runner
        # What loads a step's inputs; None where the engine did not tell before its captures.
        self._eager_runner = eager_runner
        self._model = model
        self._context = int(runner.model_config.context_len)
        self._slots = int(runner.req_to_token_pool.size)
        self._tokens = min(_TOKEN_RANGE, int(model.config.vocab_size) - 1)

    @property
    def most_rows(self) -> int:
        """The most tokens that dummy requests can hold together."""
        return self._slots * self._context

    @property
    def most_requests(self) -> int:
        return self._slots

    def batch(self, rows: int, request_length: int | None = None) -> Any:
        """An extend batch of ``rows`` tokens in the fewest requests of at most ``request_length`` tokens.

        Raises:
            ValueError: if the server has too few request slots for it.
        """
        lengths = dummy_lengths(rows, min(request_length or self._context, self._context))
        if len(lengths) > self._slots:
            raise ValueError(f"{rows} dummy rows need {len(lengths)} requests, the server has {self._slots} slots")
        return self._engine.extend_batch(
            runner=self._runner,
            lengths=lengths,
            input_ids=self._input_ids(rows),
        )

    def _input_ids(self, rows: int) -> torch.Tensor:
        ids = torch.arange(rows, dtype=torch.int64, device=self._runner.device)
        return ids * _TOKEN_STRIDE % self._tokens + 1

    @contextmanager
    def prepared(self, batch: Any) -> Iterator[None]:
        """The contexts of a forward, with attention metadata built for ``batch``."""
        backend = self._runner.attn_backend
        with (
            torch.no_grad(),
            self._engine.model_scope(self._runner),
            self._engine.fresh_step_context(backend, batch),
        ):
            self._engine.prepare_metadata(backend, self._runner, batch)
            yield

    def run(self, batch: Any) -> None:
        """One forward of the model's layers (no logits) over ``batch``."""
        with self.prepared(batch):
            self._model.forward(batch.input_ids, batch.positions, batch, None)

    def run_whole(self, batch: Any) -> None:
        """One forward of everything that a request runs: its inputs loaded, logits, the likeliest token."""
        batch = self._loaded(batch)
        with self.prepared(batch):
            output = self._runner.model.forward(batch.input_ids, batch.positions, batch)
            logits = getattr(output, "next_token_logits", None)
            if logits is not None:
                torch.argmax(logits, -1)

    def _loaded(self, batch: Any) -> Any:
        """``batch`` with its inputs loaded as a request's are; as it is where they cannot be.

        The buffers hold what the server's requests may bring, and a dummy step may be larger: the largest bucket of a
        server whose KV pool holds less. Loading only warms kernels up, so it must not cost the banks.
        """
        if self._eager_runner is None:
            return batch
        try:
            return self._engine.load_inputs(self._eager_runner, batch)
        except Exception:
            logger.debug("a rehearsed step runs on inputs that were not loaded", exc_info=True)
            return batch
