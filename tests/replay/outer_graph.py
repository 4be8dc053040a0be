"""The engine's prefill graph on a CPU: one shape, captured on a tape in static rows, replayed with live metadata.

What the engine's runner and attention backend do around a captured body, in outline: static rows padded to the shape,
the step's metadata with a window-slot buffer that captured stores read, the tail as a block of as many rows as the
shape has. The body, its breaks and the switch onto the tail are the engine's own.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import Any

import torch

from sglang_dsv4_graphs.bank.layer_range import multi_stream_off
from sglang_dsv4_graphs.cpu_engine.attention import CpuAttentionBackend


class GraphBackend(CpuAttentionBackend):
    """The attention stand-in with what a prefill graph asks of it; put in a runner's backend by ``adopt``."""

    prefill_graph_late_layer_saved: Any = None

    @classmethod
    def adopt(cls, backend: CpuAttentionBackend) -> None:
        backend.__class__ = cls

    def enter_late_layer_tail(self, forward_batch: Any) -> Any:
        """A block's padding is carried nowhere, and candidates go to the block alone, as where they are published."""
        import msgspec

        meta, whole = self.tail_forward_metadata, self.forward_metadata
        assert meta is not None
        assert whole is not None
        tail, candidates = meta.late_layer_tail, whole.candidate_metadata
        if self.prefill_graph_late_layer_saved is not None:  # our own switch, inside the engine's
            whole.candidate_metadata = None
        if tail.real_rows_count is not None:
            meta.late_layer_tail = msgspec.structs.replace(
                tail, token_indices=tail.token_indices[: tail.real_rows_count]
            )
        try:
            return super().enter_late_layer_tail(forward_batch)
        finally:
            meta.late_layer_tail, whole.candidate_metadata = tail, candidates

    def prefill_graph_enter_late_layer_tail(self, forward_batch: Any) -> None:
        rows = forward_batch.global_num_token_non_padded_cpu
        block = self.tail_forward_metadata
        full = self.enter_late_layer_tail(forward_batch)
        self.prefill_graph_late_layer_saved = (full, rows)
        forward_batch.global_num_token_non_padded_cpu = block.late_layer_tail.real_rows_count

    def prefill_graph_exit_late_layer_tail(self, forward_batch: Any) -> None:
        full, rows = self.prefill_graph_late_layer_saved
        self.prefill_graph_late_layer_saved = None
        self.exit_late_layer_tail(full, forward_batch)
        forward_batch.global_num_token_non_padded_cpu = rows


class OuterGraph:
    """A captured shape of ``rows`` tokens."""

    def __init__(self, server: Any, rows: int) -> None:
        self.server, self.runner, self.rows = server, server.runner, rows
        self.backend = self.runner.attn_backend
        GraphBackend.adopt(self.backend)
        self.engine = server.installation.runtime.engine
        self._static = {
            name: torch.zeros(rows, dtype=torch.int64) for name in ("input_ids", "positions", "out_cache_loc")
        }
        self._window = torch.zeros(rows, dtype=torch.int32)
        # Gathers and scatters of the block, and its positions.
        self._block = {name: torch.zeros(rows, dtype=torch.int64) for name in ("indices", "positions", "scatter")}
        self.outputs: list[Any] = []
        self.recording: Any = None

    def capture(self, batch: Any, make_backend: Any) -> None:
        """Capture from ``batch``, a step of exactly the shape's rows."""
        with torch.no_grad(), multi_stream_off(), self._loaded(batch) as static:
            self.recording = make_backend(self.server.installation).record(lambda: self._body(static), warmups=2)

    def replay(self, batch: Any) -> Any:
        """The step ``batch`` through the graph: what the body returns, on the step's tail rows."""
        with self._loaded(batch):
            self.recording.replay()
        # With collected layers the engine scatters nothing: the tail's rows come first.
        tail = self._tail_rows if len(self.recording.outputs) == 2 else slice(self._tail_rows.shape[0])
        return tuple(t[tail].clone() for t in self.recording.outputs)

    def _body(self, static: Any) -> list[Any]:
        """Hidden states, what is before the head, and collected layers' states side by side."""
        out = self.runner.model.model.forward(static.input_ids, static.positions, static, None)
        if not self.server.model.dspark_layers_to_capture:
            return list(out)
        states, aux = out
        return [*states, torch.cat(aux, dim=-1) if isinstance(aux, list) else aux]

    @contextmanager
    def _loaded(self, batch: Any) -> Any:
        """The contexts of a capture or a replay, with ``batch`` in the static rows."""
        static, live = copy.copy(batch), batch.input_ids.shape[0]
        for name, buffer in self._static.items():
            buffer.zero_()
            buffer[:live] = getattr(batch, name)
            setattr(static, name, buffer)
        backend = self.backend
        self._build_metadata(batch, live)
        backend.prefill_graph_replay_batch = batch
        layers = self.engine.graph_layers(self.runner.model.model)
        with (
            self.runner.forward_context(static),
            self.engine.set_break_context(
                static,
                attention_layers=layers.attention_layers,
                quant_config=None,
                moe_layers=layers.moe_layers,
                moe_fusions=layers.moe_fusions,
                dsa_indexers=layers.dsa_indexers,
                mha_companion_layers=layers.mha_companion_layers,
            ),
            self.engine.enable_breakable(),
        ):
            yield static
            assert self.engine.in_breakable(), "a scope inside cleared the mark"

    def _build_metadata(self, batch: Any, live: int) -> None:
        backend = self.backend
        backend.init_forward_metadata(batch)
        core = backend.forward_metadata.core_attn_metadata
        self._window.zero_()
        self._window[:live] = core.swa_out_cache_loc
        core.swa_out_cache_loc = self._window
        for ratio, selected in core.selection.items():
            padded = selected.new_full((self.rows, selected.shape[1]), -1)
            padded[:live] = selected
            core.selection[ratio] = padded
        meta = backend.tail_forward_metadata
        tail = meta.late_layer_tail
        indices = tail.token_indices
        self._tail_rows, count = indices, indices.shape[0]
        for name, pad, values in (
            ("indices", 0, indices),
            ("positions", 0, tail.positions),
            ("scatter", self.rows, indices),
        ):
            self._block[name].fill_(pad)
            self._block[name][:count] = values
        meta.late_layer_tail = self.engine.replace_fields(
            tail,
            token_indices=self._block["indices"],
            positions=self._block["positions"],
            scatter_indices=self._block["scatter"],
            real_rows_count=count,
            contiguous_start=None,
        )
