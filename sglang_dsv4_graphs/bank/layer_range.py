"""A contiguous range of the model's layers as one body: what a bank captures.

The body is the engine's own loop on a view of the model cut to the range, inside the contexts that the engine's
break functions read. Capture and replay need different ones: a capture marks itself breakable so that attention,
KV store and low-ratio sources break; a replay must not, since its breaks are plain eager calls and some of them
check the mark (the request window skips its history check under it).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from sglang_dsv4_graphs.bank.engram import GivenHashes
from sglang_dsv4_graphs.bank.views import ModelView, StateInjector
from sglang_dsv4_graphs.breaks.shared import StepShared
from sglang_dsv4_graphs.engine import Engine
from sglang_dsv4_graphs.engine.facts import MULTI_STREAM_ENV

Loop = Callable[..., Any]


@dataclass(frozen=True)
class RangeInputs:
    """Rows that enter a range: residual streams [rows, hc_mult, hidden], pre-mix [rows, hc_mult] or None (the
    model's first layers have none), positions [rows], input_ids [rows], Engram hash ids [rows, Engram layers,
    hash columns] or None (no layer of the range carries an Engram)."""

    residual: torch.Tensor
    pre: torch.Tensor | None
    positions: torch.Tensor
    input_ids: torch.Tensor
    hash_ids: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        every = (self.residual, self.pre, self.positions, self.input_ids, self.hash_ids)
        return [t for t in every if t is not None]

    def like(self, tensors: Sequence[torch.Tensor]) -> RangeInputs:
        """The same structure around other tensors."""
        residual, *rest = tensors
        pre = None if self.pre is None else rest.pop(0)
        positions, input_ids, *hashed = rest
        (hash_ids,) = hashed or (None,)
        if (hash_ids is None) != (self.hash_ids is None):
            raise ValueError(f"{len(tensors)} tensors for the rows of a range that take {len(self.tensors())}")
        return RangeInputs(residual, pre, positions, input_ids, hash_ids)

    @property
    def rows(self) -> int:
        return self.residual.shape[0]


@dataclass(frozen=True)
class RangeOutputs:
    """Rows that leave a range; views of static buffers, valid until the bank's next replay."""

    residual: torch.Tensor
    pre: torch.Tensor | None
    aux: torch.Tensor | None = None

    @classmethod
    def of(cls, outputs: list[torch.Tensor | None], rows: int) -> RangeOutputs:
        cut = [None if t is None else t[:rows] for t in outputs]
        if cut[0] is None:
            raise ValueError("a range without residual output")
        return cls(cut[0], cut[1], cut[2] if len(cut) > 2 else None)

    def cloned(self) -> RangeOutputs:
        """A copy that outlives the next replay."""
        return RangeOutputs(*(None if t is None else t.clone() for t in (self.residual, self.pre, self.aux)))  # type: ignore[arg-type]


@contextmanager
def multi_stream_off() -> Iterator[None]:
    """Keep ratio-0 layers off the multi-stream prepare while a range captures (see ``MULTI_STREAM_ENV``)."""
    saved = os.environ.get(MULTI_STREAM_ENV)
    os.environ[MULTI_STREAM_ENV] = "0"
    try:
        yield
    finally:
        if saved is None:
            os.environ.pop(MULTI_STREAM_ENV, None)
        else:
            os.environ[MULTI_STREAM_ENV] = saved


class LayerRange:
    """Layers ``[first, last)`` of ``model``, run by the engine's loop ``loop``."""

    def __init__(self, engine: Engine, model: Any, loop: Loop, first: int, last: int) -> None:
        self._engine = engine
        self._model = ref(model)  # the engine's to keep, as in ServedModel
        self._loop = loop
        self.first, self.last = first, last
        self._layers = list(model.layers)
        self._graph_layers: Any = None

    def body(self, inputs: RangeInputs, batch: Any, captured_layers: Sequence[int] = ()) -> list[torch.Tensor | None]:
        """Run the range; returns residual, pre-mix and, with ``captured_layers``, their packed hidden states.

        Must run inside ``capture_scope``.
        """
        layers = self._layers
        if inputs.pre is not None:
            state = self._engine.HcState(inputs.residual, inputs.pre)
            layers = list(layers)
            layers[self.first] = StateInjector(layers[self.first], state, self._engine.hand_over)
        view = ModelView(
            self._living_model(),
            layers=layers,
            start_layer=self.first,
            end_layer=self.last,
            late_layer_start=None,
            decoder_replay_tail=None,
            dspark_layers_to_capture=list(captured_layers),
            engram_hasher=None if inputs.hash_ids is None else GivenHashes(inputs.hash_ids),
        )
        packer = self._engine.new_packer(len(captured_layers)) if captured_layers else None
        residual, pre, _ = self._loop(
            view,
            inputs.positions,
            inputs.residual,
            batch,
            inputs.input_ids,
            inputs.input_ids,
            bool(captured_layers),
            packer,
        )
        aux = [] if packer is None else [self._engine.packed(packer)]
        return [residual, pre, *aux]

    def _living_model(self) -> Any:
        model = self._model()
        if model is None:
            raise ReferenceError("the engine has dropped the model of this range")
        return model

    @contextmanager
    def capture_scope(self, batch: Any) -> Iterator[None]:
        """Contexts of warm-up, capture and eager comparison runs; break functions break in here."""
        failed: Exception | None = None
        with (
            torch.no_grad(),
            multi_stream_off(),
            self.replay_scope(batch),
            # Leaving this scope clears the mark; the scope around it puts back what was there.
            self._engine.enable_breakable(),
            self._engine.range_capture_scope(),
        ):
            try:
                yield
            except Exception as e:
                # The engine's mark logs advice for its own prefill graph about whatever passes it: go round it.
                failed = e
        if failed is not None:
            raise failed

    def sharing(self, shared: StepShared | None) -> AbstractContextManager[Any]:
        """Breaks in here share ``shared`` and take the lean way; with None they run as the engine has them."""
        return self._engine.sharing(shared)

    def storing_into(self, slots: torch.Tensor | None) -> AbstractContextManager[Any]:
        """A capture in here stores K into ``slots`` inside its segments; with None the store breaks."""
        return self._engine.storing_into(slots)

    def window_slots(self, batch: Any) -> torch.Tensor:
        """[rows] window slots of the step under way."""
        return self._engine.window_slots(batch)

    @contextmanager
    def replay_scope(self, batch: Any) -> Iterator[None]:
        """Contexts of a replay: its breaks read ``batch``, the step's own with the real row count.

        Inside a prefill-graph step the mark is set, and breaks that check it would take the ways of a capture.
        """
        with self._engine.step_context(batch), self._break_context(batch), self._engine.unmarked():
            yield

    @contextmanager
    def _break_context(self, batch: Any) -> Iterator[None]:
        outer = self._engine.get_break_context()
        if outer is None:
            with self._engine.set_break_context(batch, **self._break_layers()):
                yield
            return
        # Inside somebody else's break: its context stays, only the batch that breaks read changes.
        saved = outer.forward_batch
        outer.forward_batch = batch
        try:
            yield
        finally:
            outer.forward_batch = saved

    def _break_layers(self) -> dict[str, Any]:
        if self._graph_layers is None:
            self._graph_layers = self._engine.graph_layers(self._living_model())
        found = self._graph_layers
        return {
            "attention_layers": found.attention_layers,
            "quant_config": None,
            "moe_layers": found.moe_layers,
            "moe_fusions": found.moe_fusions,
            "dsa_indexers": found.dsa_indexers,
            "mha_companion_layers": found.mha_companion_layers,
        }
