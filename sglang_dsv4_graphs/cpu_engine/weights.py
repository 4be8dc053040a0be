"""Seeded weights through which a signal passes.

With tiny or equal weights a wrong slot or row changes nothing that a comparison would see. These keep
activations near unit scale, make attention pick few rows, and make experts, streams and layers differ.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn

# Factors on the unit-variance initialization, by the parameter's last names.
_GAINS = {
    # Attention weights a handful of rows, not the average of the window.
    "wq_b.weight": 2.0,
    "wo_b.weight": 2.0,
    "w2_weight": 2.0,
}


def init_weights(model: nn.Module, seed: int, rank: int = 0) -> None:
    """Fill every parameter of ``model`` from ``seed`` and its name.

    Ranks hold equal replicated parameters and different shards.
    """
    sharded = _sharded_parameters(model)
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(
            zlib.crc32(f"{seed}:{rank if name in sharded else 0}:{name}".encode())
        )
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        parameter.data.copy_(_value(name, noise))


def _value(name: str, noise: Tensor) -> Tensor:
    leaf = name.rsplit(".", 1)[-1]
    if "norm" in name:
        return 1 + 0.1 * noise
    if leaf.startswith("hc_") and leaf.endswith("_scale"):
        return 0.5 + 0.1 * noise
    if leaf == "e_score_correction_bias":
        return 0.1 * noise
    if noise.ndim == 1 or "embed_tokens" in name:
        return noise
    gain = next((g for suffix, g in _GAINS.items() if name.endswith(suffix)), 1.0)
    return noise * gain / noise.shape[-1] ** 0.5


def _sharded_parameters(model: nn.Module) -> set[str]:
    from sglang.srt.layers.linear import ColumnParallelLinear, RowParallelLinear
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    kinds: tuple[Any, ...] = (ColumnParallelLinear, RowParallelLinear, FusedMoE, VocabParallelEmbedding)
    return {
        f"{module_name}.{name}"
        for module_name, module in model.named_modules()
        if isinstance(module, kinds)
        for name, _ in module.named_parameters()
    }
