"""AROUND hook on the engine's pairing of rows in ratio-2 compressors: what layers have in common is found once.

Only inside a replay, which gives its breaks a ``StepShared``; every other step runs the engine's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_dsv4_graphs.breaks.pairs import PairRows, pair_rows, partners
from sglang_dsv4_graphs.engine.api import Engine

Call = Callable[..., Any]


class CompressorBreaks:
    """Compressors inside a replay."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def around_pair_partners(
        self,
        original: Call,
        backend: Any,
        *,
        layer_id: int,
        kv: torch.Tensor,
        score: torch.Tensor,
        req: torch.Tensor,
        pos: torch.Tensor,
        pad: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """AROUND ``DeepseekV4AttnBackend._low_ratio_pair_partners``: kv and score [rows, dim] of each row's partner."""
        shared = self._engine.step_shared
        if shared is None:
            return original(backend, layer_id=layer_id, kv=kv, score=score, req=req, pos=pos, pad=pad)
        state = backend.token_to_kv_pool.get_attention_compress_states(layer_id)
        metadata = backend.forward_metadata.core_metadata

        def make() -> tuple[PairRows, Any]:
            # With what the key names by address, which must not be another tensor's while the key lives.
            return pair_rows(state, req, pos, pad), (req, pos, metadata)

        key = ("pairs", state.ring_size, pos.shape[0], req.data_ptr(), pos.data_ptr(), id(metadata))
        found = partners(shared.get(key, make)[0], state, self._engine.KVAndScore.from_kv_score(kv=kv, score=score))
        return found.kv, found.score
