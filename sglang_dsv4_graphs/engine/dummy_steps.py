"""Steps that the engine did not start: how it is told what it tells itself around its own forwards.

Captures and rehearsals run in such steps. They must be set up as the engine sets up its own dummy runs, or a layer
reads the state of whatever ran last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from sglang_dsv4_graphs.engine.targets import Targets

if TYPE_CHECKING:
    import torch


class DummySteps(Targets):
    """Batches, metadata and contexts of dummy steps."""

    @contextmanager
    def model_scope(self, runner: Any) -> Iterator[None]:
        """The engine's selection of the model in use, as around each of its forwards."""
        shared = getattr(runner.model, "shared_experts_config", None)  # 0.5.23
        with nullcontext() if shared is None else self.get_model_args().override(shared_experts=shared):
            yield

    def fresh_step_context(self, backend: Any, batch: Any) -> AbstractContextManager[Any]:
        """A forward context of our own, for a step that the engine did not start."""
        context = self.ForwardContext(attn_backend=backend)
        if self.release == "0.5.22":
            return self.forward_context(context)
        return self.forward_context(context, forward_batch=batch)

    def prepare_metadata(self, backend: Any, runner: Any, batch: Any) -> None:
        """Attention metadata and layout state for a dummy step, as the engine's own dummy runs set them."""
        backend.init_forward_metadata(batch)
        if getattr(self.get_exec().features, "enable_encoder_swa_bounded_replay", False):
            runner.token_to_kv_pool.request_window.initialize_dummy_history()
        self.set_dp_buffer_len(batch.global_dp_buffer_len, batch.input_ids.shape[0], False, None)
        self.set_is_extend_in_batch(False)

    def load_inputs(self, eager_runner: Any, batch: Any) -> Any:
        """``batch`` over the static input buffers of the engine's eager runner, as its eager steps read theirs."""
        return eager_runner.load_batch(batch)

    def extend_batch(self, *, runner: Any, lengths: list[int], input_ids: torch.Tensor) -> Any:
        """An extend of ``len(lengths)`` requests without prefix, every KV write to the padding slot 0.

        Args:
            runner: the engine's model runner.
            lengths: tokens per request; request i takes request slot i.
            input_ids: [sum(lengths)] int64 on the runner's device.
        """
        import torch

        device, rows = runner.device, sum(lengths)
        lens = torch.tensor(lengths, dtype=torch.int64, device=device)
        starts = torch.cumsum(lens, 0) - lens
        positions = torch.cat([torch.arange(n, dtype=torch.int64, device=device) for n in lengths])
        count = self._row_count(rows, device)
        batch = self.ForwardBatch(
            forward_mode=self.ForwardMode.EXTEND,
            batch_size=len(lengths),
            input_ids=input_ids,
            req_pool_indices=torch.arange(len(lengths), dtype=torch.int64, device=device),
            seq_lens=lens,
            out_cache_loc=torch.zeros(rows, dtype=torch.int64, device=device),
            seq_lens_sum=rows,
            orig_seq_lens=lens,
            seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64),
            positions=positions,
            extend_num_tokens=rows,
            extend_seq_lens=lens.to(torch.int32),
            extend_prefix_lens=torch.zeros(len(lengths), dtype=torch.int32, device=device),
            extend_start_loc=starts.to(torch.int32),
            extend_prefix_lens_cpu=[0] * len(lengths),
            extend_seq_lens_cpu=list(lengths),
            extend_logprob_start_lens_cpu=list(lengths),
            capture_hidden_mode=self.CaptureHiddenMode.NULL,
            global_forward_mode=self.ForwardMode.EXTEND,
            spec_algorithm=runner.spec_algorithm,
            num_token_non_padded=count,
            global_num_token_non_padded=count,
            global_num_token_non_padded_cpu=rows,
        )
        runner.kv_index_translator.bind_runner_slots(batch)
        return runner.prepare_dummy_forward_batch(batch)

    def _row_count(self, rows: int, device: Any) -> torch.Tensor | None:
        """The device count of real rows, where the engine keeps one."""
        import torch

        return torch.tensor(rows, dtype=torch.int32, device=device) if self.counts_padding() else None
