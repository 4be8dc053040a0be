"""A stand-in for a server's ModelRunner: the model, its pools, its attention backend, and steps.

Schedules nothing and samples nothing: a step is what a test asks for. Everything below ``forward`` is the
engine's: the forward context, the batch, ``DeepseekV4Model.forward``.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dsv4_graphs.cpu_engine.attention import CpuAttentionBackend
from sglang_dsv4_graphs.cpu_engine.batches import Request, RequestRows, build_batch
from sglang_dsv4_graphs.cpu_engine.config import ModelShape
from sglang_dsv4_graphs.cpu_engine.pool import CpuKVPool
from sglang_dsv4_graphs.cpu_engine.process import World


class CausalLM(nn.Module):
    """What a server holds as its model, without head and logits: the decoder is its ``model``."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        super().__init__()
        self.model = model
        self.config = config

    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: Any) -> tuple[Tensor, Tensor]:
        return self.model(input_ids, positions, forward_batch, None)


@dataclass(frozen=True)
class StepResult:
    """A step's hidden states: every row's, in the extend's layout.

    Under bounded replay only ``tail_rows`` are computed; the engine leaves the rest uninitialised.
    """

    hidden: Tensor
    pre_head: Tensor
    tail_rows: Tensor
    last_rows: Tensor
    batch: Any

    @property
    def tail(self) -> Tensor:
        """Hidden states [rows, hidden] of the rows that are computed."""
        return self.hidden[self.tail_rows]

    @property
    def last(self) -> Tensor:
        """Hidden states [requests, hidden] of each request's last row: what its next token is drawn from."""
        return self.hidden[self.last_rows]


class _IndexTranslator:
    """The engine's KV index translator for a pool whose indices need no translation."""

    def bind_runner_slots(self, forward_batch: Any) -> None: ...


def context_lends_counts() -> bool:
    """Whether the forward context lends layers the batch's row counts (0.5.23)."""
    from sglang.srt.model_executor.forward_context import forward_context

    return "forward_batch" in inspect.signature(forward_context).parameters


class CpuRunner:
    """Runs extend steps of the engine's model; has the attributes of a ModelRunner that the plugin reads."""

    device = "cpu"
    gpu_id = 0
    is_draft_worker = False
    is_generation = True
    page_size = 1
    lora_manager = None
    canary_manager = None
    forward_stream = None
    hisparse_coordinator = None

    def __init__(
        self,
        *,
        model: nn.Module,
        config: Any,
        shape: ModelShape,
        server_args: Any,
        bounded_replay: bool,
        world: World,
        slots: int = 4096,
        requests: int = 16,
        device_counts: bool = False,
    ) -> None:
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.model = CausalLM(model, config)
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self.shape, self.server_args, self.device_counts = shape, server_args, device_counts
        self.tp_rank, self.tp_size = world.rank, world.size
        self.spec_algorithm = SpeculativeAlgorithm.NONE
        self.kv_index_translator = _IndexTranslator()
        self.max_total_num_tokens, self.max_running_requests = slots, requests
        self.model_config = SimpleNamespace(
            context_len=shape.context,
            hf_config=config,
            hf_text_config=config,
            head_dim=shape.head_dim,
            v_head_dim=shape.head_dim,
            hidden_size=shape.hidden,
            vocab_size=config.vocab_size,
            num_hidden_layers=shape.layers,
            dtype=self.dtype,
        )
        self.req_to_token_pool = ReqToTokenPool(requests, shape.context, "cpu", False)
        self.token_to_kv_pool = CpuKVPool(
            shape, slots=slots, requests=requests, index_head_dim=config.index_head_dim, dtype=self.dtype
        )
        self.attn_backend = CpuAttentionBackend(
            pool=self.token_to_kv_pool,
            req_to_token_pool=self.req_to_token_pool,
            config=config,
            bounded_replay=bounded_replay,
        )
        self._requests: list[Request] = []
        self.reset_pools()

    @property
    def bounded_replay(self) -> bool:
        return self.attn_backend.enable_decoder_swa_bounded_replay

    def startup(self) -> None:
        """Reach the end of the engine's startup: its graphs are captured, the plugin's hook fires."""
        from sglang.srt.model_executor.model_runner_components import cuda_graph_setup

        cuda_graph_setup.finalize_cuda_graph_capture(self)

    def prepare_dummy_forward_batch(self, forward_batch: Any) -> Any:
        """Complete a batch made by a runner, as the engine's ModelRunner does."""
        forward_batch.attn_tp_sequence_sharded = False
        return forward_batch

    def batch(self, requests: Sequence[Request], take: Sequence[int] | None = None) -> Any:
        """Allocate KV for a step of ``requests`` and build its ForwardBatch, without running it.

        ``take`` gives each request's number of tokens (all pending ones by default).

        Raises:
            ValueError: if a request has no tokens to run, or does not fit.
        """
        counts = [r.pending for r in requests] if take is None else list(take)
        parts = [self._allocate(r, n) for r, n in zip(requests, counts, strict=True)]
        return self.prepare_dummy_forward_batch(build_batch(parts, device_counts=self.device_counts))

    def forward(self, batch: Any) -> StepResult:
        """Run the whole model on ``batch``; the same batch may run again from a restored state."""
        self.attn_backend.init_forward_metadata(batch)
        with self.forward_context(batch):
            hidden, pre_head = self.model.forward(batch.input_ids, batch.positions, batch)
        last_rows = torch.cumsum(batch.extend_seq_lens.long(), 0) - 1
        tail = self.attn_backend.tail_forward_metadata
        tail_rows = torch.arange(hidden.shape[0]) if tail is None else tail.late_layer_tail.token_indices
        return StepResult(hidden, pre_head, tail_rows, last_rows, batch)

    def extend(self, requests: Sequence[Request], take: Sequence[int] | None = None) -> StepResult:
        """Run one extend step; each request continues behind what earlier steps ran of it."""
        return self.forward(self.batch(requests, take))

    def forward_context(self, batch: Any) -> contextlib.AbstractContextManager[None]:
        """The engine's forward context for ``batch``."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        context = ForwardContext(attn_backend=self.attn_backend)
        if context_lends_counts():
            return forward_context(context, forward_batch=batch)
        return forward_context(context)

    def release(self, request: Request) -> None:
        """Give back what ``request`` holds; it then starts from nothing."""
        if request.slot is not None:
            held = self.req_to_token_pool.req_to_token[request.slot, : request.done].tolist()
            self._free_kv.extend(held)
            self._free_requests.append(request.slot)
            self._requests.remove(request)
        request.slot, request.done = None, 0

    def reset_pools(self) -> None:
        """Forget every request and all KV; the buffers keep their addresses."""
        for request in self._requests:
            request.slot, request.done = None, 0
        self._requests = []
        self.token_to_kv_pool.reset()
        self.req_to_token_pool.req_to_token.zero_()
        # In an order that nobody could guess from the row number.
        shuffle = random.Random(11)
        self._free_kv = shuffle.sample(range(1, self.max_total_num_tokens + 1), self.max_total_num_tokens)
        self._free_requests = shuffle.sample(range(1, self.max_running_requests + 1), self.max_running_requests)
        self.attn_backend.forward_metadata = self.attn_backend.tail_forward_metadata = None

    def state(self) -> dict[str, Any]:
        """Everything that steps change, cloned: pools, tables, allocator, requests."""
        return {
            "pool": self.token_to_kv_pool.state(),
            "req_to_token": self.req_to_token_pool.req_to_token.clone(),
            "free": (list(self._free_kv), list(self._free_requests)),
            "requests": [(r, list(r.tokens), r.done, r.slot) for r in self._requests],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Go back to ``state``."""
        for request in self._requests:
            request.slot, request.done = None, 0
        self.token_to_kv_pool.load_state(state["pool"])
        self.req_to_token_pool.req_to_token.copy_(state["req_to_token"])
        self._free_kv, self._free_requests = (list(free) for free in state["free"])
        self._requests = []
        for request, tokens, done, slot in state["requests"]:
            request.tokens, request.done, request.slot = list(tokens), done, slot
            self._requests.append(request)

    def _allocate(self, request: Request, count: int) -> RequestRows:
        prefix, end = request.done, request.done + count
        if not 0 < count <= request.pending:
            raise ValueError(f"cannot run {count} tokens of a request with {request.pending} pending")
        if end > self.shape.context or count > len(self._free_kv):
            raise ValueError(f"{count} tokens do not fit: context {end}, {len(self._free_kv)} KV slots free")
        if request.slot is None:
            if not self._free_requests:
                raise ValueError(f"all {self.max_running_requests} requests are in use")
            request.slot = self._free_requests.pop()
            self._requests.append(request)
        kv_slots = [self._free_kv.pop() for _ in range(count)]
        table = self.req_to_token_pool.req_to_token
        table[request.slot, prefix:end] = torch.tensor(kv_slots, dtype=table.dtype)
        request.done = end
        return RequestRows(request.slot, prefix, request.tokens[prefix:end], kv_slots)
