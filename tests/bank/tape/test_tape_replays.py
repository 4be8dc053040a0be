"""What the tape replays. Every test changes all inputs first, so that kept values would fail it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

from sglang_dsv4_graphs.bank.backend import CaptureError  # noqa: E402
from sglang_dsv4_graphs.bank.tape import TapeBackend  # noqa: E402
from tests.bank.tape.helpers import assert_same, check, fresh, in_every_mode, x23  # noqa: E402

Tensor = torch.Tensor


def _views(x: Tensor, y: Tensor) -> list[Tensor]:
    column = x.t()[1:].unsqueeze(-1)
    z = (x @ y.t()).view(-1)[1:]
    z.mul_(2)
    return [column * 3, z, x.expand(2, 2, 3) + 1, x.reshape(3, 2).contiguous(), z.narrow(0, 0, 2)]


def _in_place(x: Tensor, y: Tensor) -> list[Tensor]:
    a = torch.zeros(2, 3)
    a += x
    a[:, 1] = y[:, 0]
    a[0] = 4.0
    a[a > 1] = 0.5
    b = torch.empty(3, 2).t()
    b.copy_(a)
    y.add_(1)
    return [a, b, a.clone().unsqueeze_(0).squeeze_(0).t_()]


def _out(x: Tensor, y: Tensor) -> list[Tensor]:
    sized, grown = torch.empty(2, 2), torch.empty(0)
    torch.mm(x, y.t(), out=sized)
    torch.add(x, y, out=grown)
    values, places = torch.empty(2, 1), torch.empty(2, 1, dtype=torch.long)
    torch.topk(x, 1, out=(values, places))
    return [sized, grown, values, places]


def _several_results(x: Tensor, y: Tensor) -> list[Tensor | None]:
    values, order = x.sort(dim=1)
    parts = torch.split(x @ y.t(), 1)
    low, high = torch.aminmax(y, dim=1)
    return [values, order, *parts, None, low, high, *torch._foreach_add([x, y], 1.0)]


def _foreach(x: Tensor, y: Tensor) -> list[Tensor]:
    mine = [x.clone(), y.clone()]
    torch._foreach_mul_(mine, [y, x])
    torch._foreach_copy_([x, y], mine)
    return mine


def _factories(x: Tensor, y: Tensor) -> list[Tensor]:
    steps = torch.arange(3, dtype=torch.float32)
    steps.mul_(x[0])
    ones = torch.ones_like(x)
    ones += y
    return [steps, ones, torch.full((2,), 7.0) + x[:, 0], x.new_zeros(2, 3).add_(x), torch.eye(3) @ x.t()]


def _numbers(x: Tensor, y: Tensor) -> list[Tensor]:
    return [torch.where(x > y, x, 0.0), x * torch.tensor(2.0), x.masked_fill(y > 0, math.pi)]


def _custom(x: Tensor, y: Tensor) -> list[Tensor | None]:
    seen = torch.zeros(())
    doubled, nothing, both = torch.ops.tape_test.scale_rows(x + y, seen)
    return [doubled, nothing, *both, seen, torch.ops.tape_test.repeated(x)]


def _attention(x: Tensor, y: Tensor) -> list[Tensor]:
    q = x.bfloat16().view(1, 1, 2, 3)
    k = F.layer_norm(y, (3,)).bfloat16().view(1, 1, 2, 3)
    return [F.scaled_dot_product_attention(q, k, k, is_causal=True), F.rms_norm(x, (3,)), F.softmax(y, -1)]


BODIES = [_views, _in_place, _out, _several_results, _foreach, _factories, _numbers, _custom, _attention]


@in_every_mode
@pytest.mark.parametrize("body", BODIES, ids=lambda b: b.__name__.strip("_"))
def test_replay_equals_eager_on_other_inputs(backend: TapeBackend, body: Any, mode: Any) -> None:
    def in_mode(x: Tensor, y: Tensor) -> Any:
        with mode():
            return body(x, y)

    assert torch.is_grad_enabled()
    check(backend, in_mode, x23(), x23().flip(0))


def test_a_plain_list_of_results_keeps_its_addresses(backend: TapeBackend) -> None:
    x = x23()
    recording = backend.record(lambda: [x * 2, None])
    result = recording.outputs[0]
    address = result.data_ptr()
    fresh(x)
    recording.replay()
    assert recording.outputs[0] is result
    assert result.data_ptr() == address
    assert recording.outputs[1] is None
    assert torch.equal(result, x * 2)


def test_gradients_are_neither_needed_nor_recorded(backend: TapeBackend) -> None:
    layer, x = torch.nn.Linear(3, 4), x23()
    recording = check(backend, lambda t: layer(t), x)
    assert not recording.outputs[0].requires_grad
    assert torch.is_grad_enabled()


def test_a_parameter_that_moves_is_read_at_its_old_address(backend: TapeBackend) -> None:
    weight, x = torch.nn.Parameter(torch.ones(3)), x23()
    recording = backend.record(lambda: [x * weight])
    weight.data = torch.full((3,), 5.0)
    fresh(x)
    recording.replay()
    assert torch.equal(recording.outputs[0], x)


class _Experts(torch.nn.Module):
    """A routed MoE that runs every expert on every row, so that no shape depends on the routing."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(width, experts, bias=False)
        self.up = torch.nn.Parameter(torch.randn(experts, width, 2 * width) / 4)
        self.down = torch.nn.Parameter(torch.randn(experts, 2 * width, width) / 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).float().softmax(-1)
        weights, chosen = scores.topk(2, dim=-1)
        dense = torch.zeros_like(scores).scatter(1, chosen, weights / weights.sum(-1, keepdim=True))
        each = torch.bmm(F.silu(torch.bmm(x.expand(len(self.up), *x.shape), self.up)), self.down)
        best = each.gather(0, chosen[:, :1].t().unsqueeze(-1).expand(1, -1, x.shape[1]))[0]
        return (each * dense.t().unsqueeze(-1).to(x.dtype)).sum(0) + best


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        self.experts = _Experts(8, 4)
        self.register_buffer("cache", torch.zeros(32, 8))

    def forward(self, x: Tensor, slots: Tensor) -> list[Tensor]:
        x = x + self.mlp(self.norm(x))
        self.cache.index_copy_(0, slots, x)
        x = x + self.experts(x)
        return [x, self.cache.index_select(0, slots.flip(0))]


@in_every_mode
def test_a_routed_model_in_bfloat16_equals_eager(backend: TapeBackend, mode: Any) -> None:
    torch.manual_seed(0)
    model = _Model().bfloat16()
    x, slots = torch.randn(6, 8, dtype=torch.bfloat16), torch.tensor([3, 1, 9, 4, 30, 7])

    def run() -> list[Tensor]:
        with mode():
            return model(x, slots)

    recording = backend.record(run)
    keep = [*model.parameters(), *model.buffers(), x, slots]
    assert recording.external_reads(keep) == []
    routed = set()
    for step in range(4):
        x.copy_(torch.randn(6, 8, generator=torch.Generator().manual_seed(step)) * 2)
        slots.copy_((slots * 7 + step) % 32)
        model.cache.zero_()
        recording.replay()
        got, cache = [t.clone() for t in recording.outputs], model.cache.clone()
        model.cache.zero_()
        with torch.no_grad():
            want = run()
            routed.add(str(model.experts.gate(want[0]).topk(2)[1].tolist()))
        assert_same([*got, cache], [*want, model.cache])
    assert len(routed) == 4  # the inputs did change who is routed where


@pytest.fixture
def world_of_one(tmp_path: Any) -> Iterator[Any]:
    """torch's default process group: the engine's, if another test made one."""
    dist = torch.distributed
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield dist
    if own:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor:FutureWarning")
def test_collectives_are_repeated_and_waited_for(backend: TapeBackend, world_of_one: Any) -> None:
    dist = world_of_one

    def body(x: Tensor) -> list[Tensor]:
        # Large, so that who does not wait reads what is not there yet.
        everyone = torch.empty_like(x)
        dist.all_gather_into_tensor(everyone, x * 2)
        dist.all_reduce(everyone)
        return [everyone + 1]

    check(backend, body, torch.randn(1 << 22))
    with pytest.raises(CaptureError, match="barrier"):
        backend.record(lambda: dist.barrier() or [], warmups=0)


def test_warmups_run_first_and_eagerly(backend: TapeBackend, capture_var: ContextVar[Any]) -> None:
    seen: list[tuple[bool, bool]] = []

    def body() -> list[Tensor]:
        seen.append((capture_var.get() is None, torch.is_grad_enabled()))
        return [x23() + 1]

    backend.record(body)
    backend.record(body, warmups=0)
    assert seen == [(True, False), (True, False), (False, False), (False, False)]
