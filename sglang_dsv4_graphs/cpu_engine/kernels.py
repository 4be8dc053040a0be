"""Plain torch for the CUDA and Triton kernels that the model launches between its attention breaks.

A recorder must be able to capture every function here, and padding rows must never change other rows. So none
reads the host, none has a shape that depends on data, and each row is computed from itself alone, in float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotate(x: Tensor, freqs_cis: Tensor, positions: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate pairs of ``x`` [rows, ..., rope_dim] by the table's angles at ``positions``; float32."""
    table = torch.view_as_real(freqs_cis)[positions.long()]
    cos, sin = table[..., 0], table[..., 1]
    if inverse:
        sin = -sin
    pairs = x.float().unflatten(-1, (-1, 2))
    shape = (x.shape[0], *([1] * (x.ndim - 2)), cos.shape[-1])
    cos, sin = cos.view(shape), sin.view(shape)
    first = pairs[..., 0] * cos - pairs[..., 1] * sin
    second = pairs[..., 0] * sin + pairs[..., 1] * cos
    return torch.stack([first, second], dim=-1).flatten(-2)


def rms_normalize(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """``x`` over its last dimension's root mean square; float32."""
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight.float()


def norm_rope(kv: Tensor, weight: Tensor, eps: float, freqs_cis: Tensor, positions: Tensor) -> Tensor:
    """Normalize rows and rotate their last ``rope_dim`` features; float32."""
    rope_dim = 2 * freqs_cis.shape[-1]
    kv = rms_normalize(kv, eps, weight)
    tail = rotate(kv[..., -rope_dim:], freqs_cis, positions)
    return torch.cat([kv[..., :-rope_dim], tail], dim=-1)


def fused_rope_inplace(
    q: Tensor, k: Tensor | None, freqs_cis: Tensor, positions: Tensor, inverse: bool = False
) -> None:
    """Rotate the rope features of ``q`` and ``k`` where they lie."""
    for x in (q, k):
        if x is not None:
            x.copy_(rotate(x, freqs_cis, positions, inverse=inverse))


def fused_q_norm_rope(
    q_input: Tensor, q_output: Tensor, eps: float | None, freqs_cis: Tensor, positions: Tensor
) -> None:
    """Normalize each head (unless ``eps`` is None), rotate its tail, write to ``q_output``."""
    rope_dim = 2 * freqs_cis.shape[-1]
    q = q_input.float() if eps is None else rms_normalize(q_input, eps)
    q_output[..., :-rope_dim].copy_(q[..., :-rope_dim])
    q_output[..., -rope_dim:].copy_(rotate(q[..., -rope_dim:], freqs_cis, positions))


def fused_norm_rope_inplace(kv: Tensor, weight: Tensor, eps: float, freq_cis: Tensor, positions: Tensor) -> None:
    """``norm_rope`` where the rows lie."""
    kv.copy_(norm_rope(kv, weight, eps, freq_cis, positions))


def hc_split_sinkhorn(
    mixes: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_mult: int = 4,
    sinkhorn_iters: int = 20,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split predicted mixes [rows, 1, (2 + n) * n] into pre, post and a doubly stochastic comb."""
    n = hc_mult
    pre_mix, post_mix, comb_mix = mixes.float().split([n, n, n * n], dim=-1)
    pre_base, post_base, comb_base = hc_base.split([n, n, n * n])
    pre = torch.sigmoid(pre_mix * hc_scale[0] + pre_base) + eps
    post = 2 * torch.sigmoid(post_mix * hc_scale[1] + post_base)
    comb = (comb_mix * hc_scale[2] + comb_base).unflatten(-1, (n, n)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre, post, comb


def mhc_combine(x_flat: Tensor, pre: Tensor, hc: int, out_dtype: torch.dtype) -> Tensor:
    """Collapse the streams: ``y = sum_k pre[:, k] * x[:, k]``."""
    streams = x_flat.unflatten(1, (hc, -1)).float()
    return (pre.float().unsqueeze(-1) * streams).sum(1).to(out_dtype)


def mhc_post(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    """Rebuild the streams: ``R'[i] = post[i] * x + sum_j comb[j, i] * R[j]``."""
    post = post_layer_mix.view(*residual.shape[:-1], 1).float()
    carried = (comb_res_mix.float().unsqueeze(-1) * residual.float().unsqueeze(2)).sum(1)
    return (post * x.float().unsqueeze(1) + carried).to(residual.dtype)


def dense_moe(layer: Any, x: Tensor, topk_output: Any, moe_runner_config: Any) -> Tensor:
    """Every expert on every row, weighted by the row's routing; a masked row (id -1) gets nothing.

    The engine's CPU form counts each expert's rows on the host, which a recording would freeze.
    """
    if moe_runner_config.activation != "silu" or moe_runner_config.apply_router_weight_on_input:
        raise NotImplementedError(f"only plain silu experts are implemented, not {moe_runner_config}")
    weights, ids = topk_output[0], topk_output[1]
    experts = torch.arange(layer.w13_weight.shape[0], device=x.device)
    gates = ((ids.unsqueeze(-1) == experts) * weights.float().unsqueeze(-1)).sum(1)
    rows = x.unsqueeze(0).expand(layer.w13_weight.shape[0], -1, -1)
    gate, up = torch.bmm(rows, layer.w13_weight.transpose(1, 2)).chunk(2, dim=-1)
    hidden = torch.nn.functional.silu(gate) * up
    out = torch.bmm(hidden, layer.w2_weight.transpose(1, 2)).float()
    return (out * gates.t().unsqueeze(-1)).sum(0).to(x.dtype)
