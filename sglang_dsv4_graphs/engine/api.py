"""The engine's functions by our names, and what differs per version in how they are called.

Nothing here checks the engine: ``hooks.contracts`` compared every name and signature before this is used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from sglang_dsv4_graphs.engine.contract import resolve
from sglang_dsv4_graphs.engine.dummy_steps import DummySteps
from sglang_dsv4_graphs.engine.facts import RUNTIME_CONTEXT

if TYPE_CHECKING:
    import torch

    from sglang_dsv4_graphs.breaks.shared import StepShared


def speaks_for_server() -> bool:
    """Whether this process is the one that writes a line of which a server is to have one.

    An engine process that serves a model is told its ranks before it imports the model; one that has been told its role
    and no ranks (the tokenizer's) serves none. Asks nothing of an engine that is unknown: where no answer comes, yes.
    """
    context = sys.modules.get(RUNTIME_CONTEXT)
    try:
        parallel = context.get_parallel()  # type: ignore[union-attr]
        return not (parallel.tp_rank or parallel.pp_rank or parallel.dp_rank)
    except Exception:  # no engine, another engine, or ranks that were not published
        return getattr(context, "publish_role", lambda: None)() is None


class Engine(DummySteps):
    """The engine's functions by our names, and what of it is under way on our side."""

    def __init__(self, engine_version: str) -> None:
        super().__init__(engine_version)
        self.capturing_range = False
        # What the breaks of the replay under way share; None outside a replay.
        self.step_shared: StepShared | None = None
        # Window slots that the range capture under way stores K into; None where the store breaks.
        self.static_slots: torch.Tensor | None = None
        # Layer id -> the K store that its attention break is to begin with, in the range capture under way. Empty
        # between layers, unless a capture fails there: what it leaves ends with its scope.
        self.pending_stores: dict[int, tuple[Any, ...]] = {}

    def step_context(self, batch: Any) -> AbstractContextManager[Any]:
        """The forward context of the current step with ``batch`` in it (0.5.23 reads its counts from there)."""
        if not self.has_forward_context():
            return nullcontext()
        if self.release == "0.5.22":
            return self.forward_context(self.get_forward_context())
        return self.forward_context(self.get_forward_context(), forward_batch=batch)

    def new_packer(self, captures: int) -> Any:
        """What the loop collects captured layers' hidden states into: a packer (0.5.23) or a list."""
        return self.AuxHiddenStatePacker(captures) if self.has("AuxHiddenStatePacker") else []

    def packed(self, packer: Any) -> torch.Tensor:
        """A packer's hidden states side by side, [rows, captures * hidden]."""
        if isinstance(packer, list):
            import torch

            return torch.cat(packer, dim=-1)
        return packer.finalize()

    def collect_aux(self, packer: Any, aux: torch.Tensor, captures: int, tail: Any) -> None:
        """Hand a range's packed hidden states to the step's packer, on the tail's rows if there is one."""
        rows = aux if tail is None else tail.rows(aux)
        for part in rows.chunk(captures, dim=-1):
            packer.append(part)

    def hand_over(self, state: Any, batch: Any) -> Any:
        """Make ``state`` what the next layer takes: written to the batch's residual stream from 0.5.23 on."""
        return self.residual_write(state, batch) if self.has("residual_write") else state

    @contextmanager
    def range_capture_scope(self) -> Iterator[None]:
        """Marks a range capture; on 0.5.23 also the engine's scope in which KV store and sources break."""
        saved = self.capturing_range, self.pending_stores
        self.capturing_range, self.pending_stores = True, {}
        try:
            with self.tail_scope() if self.has("tail_scope") else nullcontext():
                yield
        finally:
            self.capturing_range, self.pending_stores = saved

    @contextmanager
    def sharing(self, shared: StepShared | None) -> Iterator[None]:
        """Breaks in here share ``shared``; with None they run as the engine has them."""
        saved, self.step_shared = self.step_shared, shared
        try:
            yield
        finally:
            self.step_shared = saved

    @contextmanager
    def storing_into(self, slots: torch.Tensor | None) -> Iterator[None]:
        """A range capture in here stores K inside its segments, into ``slots`` [rows]; with None the store breaks."""
        saved, self.static_slots = self.static_slots, slots
        try:
            yield
        finally:
            self.static_slots = saved

    def window_slots(self, batch: Any) -> torch.Tensor:
        """[rows] window slots that the step under way stores its K into."""
        slots: torch.Tensor = self.get_attn_backend().get_swa_out_cache_loc(batch)
        return slots

    def has_request_window(self) -> bool:
        """Whether window rows lie by request, in a ring in which a step's rows take the place of its history.

        So under encoder SWA bounded replay.
        """
        return getattr(self.get_attn_backend().token_to_kv_pool, "request_window", None) is not None

    def stores_in_graph(self, backend: Any) -> bool:
        """Whether a captured K store may take its slots from a static buffer.

        Not with a request window, whose layout each store activates, nor where K is quantised from bf16, which stores
        through the backend.
        """
        if getattr(backend.token_to_kv_pool, "request_window", None) is not None:
            return False
        return not self.envs.SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE.get()

    @contextmanager
    def outside_range_capture(self) -> Iterator[None]:
        """Inside a break: calls are plain again."""
        saved, self.capturing_range = self.capturing_range, False
        try:
            yield
        finally:
            self.capturing_range = saved

    @contextmanager
    def unmarked(self) -> Iterator[None]:
        """Calls in here are an eager step's, also inside a prefill-graph step; its mark is there again afterwards."""
        path, _, name = self._targets["breakable_mark"].rpartition(".")
        module = resolve(path)
        saved = getattr(module, name)
        setattr(module, name, False)
        try:
            yield
        finally:
            setattr(module, name, saved)

    @staticmethod
    def replace_fields(struct: Any, **fields: Any) -> Any:
        """A copy of one of the engine's frozen structs with other ``fields``."""
        import msgspec

        return msgspec.structs.replace(struct, **fields)

    def captures_prefill(self) -> bool:
        """Whether this server captures a prefill graph of its own."""
        return self._prefill_backend() != "disabled"

    def captures_full_prefill(self) -> bool:
        """Whether that graph is without breaks: ``full``, or whatever else than ``breakable`` an engine may offer.

        The third kind that both versions still have code for, ``tc_piecewise``, is refused by their arguments.
        """
        return self._prefill_backend() not in ("disabled", "breakable")

    def _prefill_backend(self) -> str:
        config = self.get_exec().graph.cuda_graph_config
        return "disabled" if config is None else str(config.prefill.backend)

    def offloads_weights(self) -> bool:
        """Whether weights of some layers live elsewhere than on the GPU, for good or between their uses."""
        offload, moe = self.get_exec().offload, self.get_exec().moe
        paged = getattr(moe, "enable_paged_experts", False)  # 0.5.23
        return offload.cpu_offload_gb > 0 or offload.offload_group_size > 0 or paged or moe.kt_weight_path is not None

    def forget_graph_inputs(self) -> None:
        """Drop the all-reduce inputs that a capture which failed left behind.

        The engine's communicators collect them while a graph captures and register them, by their order, with the
        other ranks when a capture ends well; the engine gives up after a failure and never drops them.
        """
        for group in list(self.parallel_groups.values()):
            pending = getattr(getattr(group(), "ca_comm", None), "_graph_inputs", None)
            if isinstance(pending, list):
                pending.clear()

    def local_rows(self, rows: int, bucket: int, sharded: bool) -> int:
        """How many of ``rows`` real rows are in this rank's shard of ``bucket``."""
        return int(self.local_row_count(rows, bucket, sharded=sharded))
