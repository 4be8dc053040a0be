"""The KV memory: sliding-window rows, compressed rows, index keys and half-finished pairs.

A graph goes wrong through memory: rows written to another step's slots, or read from them. So everything
the engine keeps between steps is kept here, addressed the way the engine addresses it: by token slot, by a
second mapping for the sliding window, and by request for what is pending. Slot 0 is the dummy that padding
writes to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dsv4_graphs.cpu_engine.config import ModelShape
from sglang_dsv4_graphs.cpu_engine.kernels import norm_rope


class CpuKVPool:
    """The engine's ``token_to_kv_pool`` as far as the model and its attention backend use it.

    Buffers keep their addresses: ``reset`` and ``load_state`` write into them, since a recording holds them.
    """

    # Facts that the engine's model asks for: no encoder request window, no FP8 query.
    request_window = None
    uniform_fp8 = False

    def __init__(
        self, shape: ModelShape, *, slots: int, requests: int, index_head_dim: int, dtype: torch.dtype
    ) -> None:
        self.slots = slots
        self.present_ratios = tuple(sorted({r for r in shape.compress_ratios if r}))
        self._shape = shape
        # Behind the real slots lies one that is never written: a row with fewer keys reads zeros there.
        self.absent = slots + 1
        rows = slots + 2
        # A fixed shuffle: whoever stores window rows by full slots, or reads them so, meets another token.
        shuffle = torch.randperm(slots, generator=torch.Generator().manual_seed(7)) + 1
        self.full_to_swa = torch.cat([torch.zeros(1, dtype=torch.int64), shuffle])
        self.swa = [torch.zeros(rows, shape.head_dim, dtype=dtype) for _ in range(shape.layers)]
        self.compressed = {s: torch.zeros(rows, shape.head_dim, dtype=dtype) for s in shape.kv_sources}
        self.index_keys = {s: torch.zeros(rows, index_head_dim) for s in shape.kv_sources}
        # Of each request, the first half of a ratio-2 pair whose second token has not come yet.
        self.pending = {
            s: torch.zeros(requests + 1, 2, shape.head_dim) for s in shape.kv_sources if shape.compress_ratios[s] == 2
        }

    def source_of(self, layer_id: int) -> int:
        """The source layer whose compressed rows ``layer_id`` reads."""
        source = self._shape.source_of(layer_id)
        if source is None:
            raise ValueError(f"layer {layer_id} reads no compressed KV")
        return source

    def rows(self, buffer: Tensor, slots: Tensor) -> Tensor:
        """``buffer``'s rows at ``slots``; zeros where a slot is -1, whatever padding left in the dummy."""
        slots = slots.masked_fill(slots < 0, self.absent)
        # Four times as quick as indexing, which goes element by element; this is a good part of a step.
        return buffer.index_select(0, slots.flatten()).unflatten(0, slots.shape)

    def translate_loc_from_full_to_swa(self, loc: Tensor) -> Tensor:
        """Token slots to sliding-window slots."""
        return self.full_to_swa[loc.long()]

    def get_swa_key_buffer_radix(self, layer_id: int) -> Tensor:
        """The window rows of ``layer_id``, where the store below writes them."""
        return self.swa[layer_id]

    def set_swa_key_buffer_radix_fused_norm_rope(
        self,
        layer_id: int,
        swa_loc: Tensor,
        kv: Tensor,
        kv_weight: Tensor,
        eps: float,
        freqs_cis: Tensor,
        positions: Tensor,
        q: Tensor | None = None,
    ) -> None:
        """Normalize, rotate and store one window row per row of ``kv``.

        Raises:
            ValueError: if rows, slots and positions differ in number: a kernel would read past one.
        """
        if not kv.shape[0] == swa_loc.shape[0] == positions.shape[0]:
            raise ValueError(
                f"layer {layer_id}: {kv.shape[0]} KV rows, {swa_loc.shape[0]} slots, {positions.shape[0]} positions"
            )
        if q is not None:
            raise NotImplementedError("the query is rotated by the store on ROCm only")
        rows = norm_rope(kv, kv_weight, eps, freqs_cis, positions)
        cache = self.swa[layer_id]
        cache.index_copy_(0, swa_loc.long(), rows.to(cache.dtype))

    def state(self) -> dict[str, Tensor]:
        """Clones of everything that a step changes."""
        return {name: buffer.clone() for name, buffer in self._buffers().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Put ``state`` back, into the same storage."""
        for name, buffer in self._buffers().items():
            buffer.copy_(state[name])

    def reset(self) -> None:
        """Forget everything."""
        for buffer in self._buffers().values():
            buffer.zero_()

    def _buffers(self) -> dict[str, Tensor]:
        named = {f"swa.{i}": t for i, t in enumerate(self.swa)}
        for kind in ("compressed", "index_keys", "pending"):
            named |= {f"{kind}.{layer}": t for layer, t in getattr(self, kind).items()}
        return named
