"""The substituted kernels compute what the kernels compute, one row at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

SILU = SimpleNamespace(activation="silu", apply_router_weight_on_input=False)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def table(positions: int = 64, pairs: int = 4) -> Any:
    angles = torch.outer(torch.arange(positions).float(), 1.0 / 10 ** torch.arange(pairs).float())
    return torch.polar(torch.ones_like(angles), angles)


def experts(count: int = 4, hidden: int = 8, width: int = 6) -> Any:
    return SimpleNamespace(
        w13_weight=torch.randn(count, 2 * width, hidden), w2_weight=torch.randn(count, hidden, width)
    )


def routing(rows: int, count: int = 4, k: int = 2) -> tuple[Any, Any, None]:
    weights, ids = torch.rand(rows, count).topk(k, dim=1)
    return weights, ids, None


def test_rope_is_a_complex_product_and_its_inverse_undoes_it() -> None:
    from sglang_dsv4_graphs.cpu_engine.kernels import fused_rope_inplace

    q, freqs, positions = torch.randn(5, 3, 8), table(), torch.tensor([0, 9, 3, 63, 1])
    x = q.clone()
    fused_rope_inplace(x, None, freqs, positions)
    expected = torch.view_as_complex(q.unflatten(-1, (-1, 2))) * freqs[positions].unsqueeze(1)
    torch.testing.assert_close(x, torch.view_as_real(expected).flatten(-2))
    fused_rope_inplace(x, None, freqs, positions, inverse=True)
    torch.testing.assert_close(x, q)


@pytest.mark.parametrize("eps", [None, 1e-6])
def test_query_norm_and_rope(eps: float | None) -> None:
    from sglang_dsv4_graphs.cpu_engine.kernels import fused_q_norm_rope, rotate

    q, positions = 3 * torch.randn(5, 2, 12), torch.arange(5)
    out = torch.empty_like(q)
    fused_q_norm_rope(q, out, eps, table(), positions)
    normed = q if eps is None else torch.nn.functional.rms_norm(q, (12,), eps=eps)
    torch.testing.assert_close(out[..., :4], normed[..., :4])
    torch.testing.assert_close(out[..., 4:], rotate(normed[..., 4:], table(), positions))


def test_dense_experts_equal_a_loop_over_routed_rows() -> None:
    from sglang_dsv4_graphs.cpu_engine.kernels import dense_moe

    layer, x, topk = experts(), torch.randn(7, 8), routing(7)
    expected = torch.zeros(7, 8)
    for row in range(7):
        for weight, expert in zip(topk[0][row], topk[1][row], strict=True):
            gate, up = (layer.w13_weight[expert] @ x[row]).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            expected[row] += weight * (layer.w2_weight[expert] @ hidden)
    torch.testing.assert_close(dense_moe(layer, x, topk, SILU), expected)


def test_masked_rows_get_nothing_from_experts() -> None:
    from sglang_dsv4_graphs.cpu_engine.kernels import dense_moe

    layer, x, (weights, ids, _) = experts(), torch.randn(7, 8), routing(7)
    ids[5:] = -1
    assert (dense_moe(layer, x, (weights, ids, None), SILU)[5:] == 0).all()


def test_unknown_expert_activation_is_refused() -> None:
    from sglang_dsv4_graphs.cpu_engine.kernels import dense_moe

    other = SimpleNamespace(activation="gelu", apply_router_weight_on_input=False)
    with pytest.raises(NotImplementedError, match="gelu"):
        dense_moe(experts(), torch.randn(2, 8), routing(2), other)


def test_hyper_connections() -> None:
    from sglang_dsv4_graphs.cpu_engine.kernels import hc_split_sinkhorn, mhc_combine, mhc_post

    pre, post, comb = hc_split_sinkhorn(torch.randn(6, 1, 24), torch.ones(3), torch.randn(24))
    assert pre.shape == post.shape == (6, 1, 4)
    assert pre.min() > 0
    assert post.max() < 2
    # Rows and columns of the mixing matrix sum to one.
    for dim in (-1, -2):
        torch.testing.assert_close(comb.sum(dim), torch.ones(6, 1, 4), atol=1e-3, rtol=0)
    streams, y = torch.randn(6, 4, 10), torch.randn(6, 10)
    collapsed = mhc_combine(streams.flatten(1), pre.squeeze(1), 4, torch.float32)
    torch.testing.assert_close(collapsed, torch.einsum("tk,tkh->th", pre.squeeze(1), streams))
    rebuilt = mhc_post(y, streams, post.squeeze(1), comb.squeeze(1))
    expected = torch.einsum("ti,th->tih", post.squeeze(1), y)
    expected = expected + torch.einsum("tji,tjh->tih", comb.squeeze(1), streams)
    torch.testing.assert_close(rebuilt, expected)


def test_attention_with_a_sink_and_absent_keys() -> None:
    from sglang_dsv4_graphs.cpu_engine.attention import attend

    q, keys, sink = torch.randn(3, 2, 4), torch.randn(3, 5, 4), torch.randn(2)
    present = torch.ones(3, 5, dtype=torch.bool)
    present[1, 2:] = False
    present[2] = False
    out = attend(q, keys, present, sink, 0.5)
    for row, count in enumerate((5, 2, 0)):
        scores = q[row] @ keys[row, :count].t() * 0.5
        weights = torch.cat([scores, sink.unsqueeze(1)], dim=1).softmax(1)[:, :count]
        torch.testing.assert_close(out[row], weights @ keys[row, :count])


def test_padding_rows_change_no_other_row() -> None:
    from sglang_dsv4_graphs.cpu_engine import kernels

    layer, positions = experts(), torch.arange(8)
    topk = routing(8)
    mixes, scale, base = torch.randn(8, 1, 24), torch.ones(3), torch.randn(24)
    weight = torch.rand(8)
    functions = {
        "dense_moe": lambda x: kernels.dense_moe(layer, x, topk, SILU),
        "norm_rope": lambda x: kernels.norm_rope(x, weight, 1e-6, table(), positions),
        "combine": lambda x: kernels.mhc_combine(
            x.repeat(1, 4), kernels.hc_split_sinkhorn(mixes, scale, base)[0].squeeze(1), 4, x.dtype
        ),
    }
    x = torch.randn(8, 8)
    padded = x.clone()
    padded[6:] = float("nan")
    for name, function in functions.items():
        assert (function(x)[:6] == function(padded)[:6]).all(), name
