"""The tape: what it replays, what it refuses, whose memory it trusts.

Every test that replays changes all inputs first: a tape that kept the recorded values would fail it.
"""

from __future__ import annotations

import copy
import ctypes
import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

from sglang_dsv4_graphs.bank.backend import CaptureError, ReplayFault  # noqa: E402
from sglang_dsv4_graphs.bank.tape import TapeBackend, TapeRecording  # noqa: E402
from sglang_dsv4_graphs.bank.tape_ops import Call, refused_operation  # noqa: E402

Tensor = torch.Tensor
ENGINE_BREAKS = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"

_library = torch.library.Library("tape_test", "DEF")
_library.define("scale_rows(Tensor x, Tensor(a!) seen) -> (Tensor, Tensor?, Tensor[])")
_library.define("undeclared_shape(Tensor x) -> Tensor")
_library.define("repeated(Tensor x) -> Tensor")
_library.define("count(Tensor x) -> int")
_library.define("jitter(Tensor x) -> Tensor")


def _scale_rows(x: Tensor, seen: Tensor) -> tuple[Tensor, None, list[Tensor]]:
    seen.add_(x.sum())
    return torch.from_numpy(x.numpy() * 2), None, [x + 1, x - 1]


_library.impl("scale_rows", _scale_rows, "CPU")
_library.impl("undeclared_shape", lambda x: x[x > 0].clone(), "CPU")
_library.impl("repeated", lambda x: x.sum(0).expand(3, -1), "CPU")
_library.impl("count", lambda x: int(x.sum()), "CPU")
_library.impl("jitter", lambda x: x + torch.rand(()), "CPU")


@pytest.fixture
def capture_var() -> ContextVar[Any]:
    return ContextVar("capture", default=None)


@pytest.fixture
def backend(capture_var: ContextVar[Any]) -> TapeBackend:
    return TapeBackend(capture_var, poison=True)


def breaking(capture_var: ContextVar[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A break wrapper as the engine's is, for contexts of our own."""

    def decorate(inner: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            capture = capture_var.get()
            if capture is None:
                return inner(*args, **kwargs)
            capture._end_current_segment()
            output = inner(*args, **kwargs)

            def replay() -> None:
                again = inner(*args, **kwargs)
                if isinstance(output, Tensor):
                    output.copy_(again)

            capture.cuda_graph._break_fns.append(replay)
            capture._begin_new_segment()
            return output

        return wrapper

    return decorate


@pytest.fixture
def as_break(capture_var: ContextVar[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return breaking(capture_var)


def fresh(*tensors: Tensor) -> None:
    """Give every tensor new values, in place."""
    for t in tensors:
        if t.is_floating_point():
            t.copy_(torch.randn(t.shape) + 0.25)
        elif t.dtype is torch.bool:
            t.logical_not_()
        else:
            t.copy_(t.flip(0) if t.dim() else t + 1)


def check(backend: TapeBackend, body: Callable[..., Any], *inputs: Tensor) -> TapeRecording:
    """Record ``body`` on ``inputs``, replay it three times on others, and compare with eager, bit for bit."""

    def run() -> list[Tensor | None]:
        result = body(*inputs)
        return list(result) if isinstance(result, (list, tuple)) else [result]

    recording = backend.record(run, warmups=1)
    for _ in range(3):
        fresh(*inputs)
        before = [t.clone() for t in inputs]
        recording.replay()
        got = [None if t is None else t.clone() for t in recording.outputs]
        after = [t.clone() for t in inputs]
        for t, b in zip(inputs, before, strict=True):
            t.copy_(b)
        with torch.no_grad():
            want = run()
        assert_same([*got, *after], [*want, *inputs])
    return recording


def assert_same(got: list[Tensor | None], want: list[Tensor | None]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        if a is None or b is None:
            assert a is b
            continue
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
        assert not a.is_floating_point() or not a.isnan().any()


def x23() -> Tensor:
    return torch.arange(6.0).reshape(2, 3) - 2.5


# --- what is replayed ---------------------------------------------------------------------------------------


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


in_every_mode = pytest.mark.parametrize(
    "mode", [nullcontext, torch.inference_mode, torch.enable_grad], ids=["no_grad", "inference", "grad"]
)
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


def test_collectives_are_repeated_and_waited_for(backend: TapeBackend, tmp_path: Any) -> None:
    dist = torch.distributed
    if dist.is_initialized():
        pytest.skip("somebody else's process group")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:

        def body(x: Tensor) -> list[Tensor]:
            # Large, so that who does not wait reads what is not there yet.
            everyone = torch.empty_like(x)
            dist.all_gather_into_tensor(everyone, x * 2)
            dist.all_reduce(everyone)
            return [everyone + 1]

        check(backend, body, torch.randn(1 << 22))
        with pytest.raises(CaptureError, match="barrier"):
            backend.record(lambda: dist.barrier() or [], warmups=0)
    finally:
        dist.destroy_process_group()


# --- what is refused ----------------------------------------------------------------------------------------

X, ROWS, COUNTS = x23(), torch.tensor([1, 0]), torch.tensor(1)
REFUSED: dict[str, Callable[[], Any]] = {
    "aten._local_scalar_dense item": lambda: COUNTS.item(),
    "aten._local_scalar_dense bool": lambda: bool(COUNTS),
    "aten._local_scalar_dense int": lambda: int(COUNTS),
    "aten._local_scalar_dense float": lambda: math.sqrt(COUNTS),
    "aten._local_scalar_dense index": lambda: [7, 8][COUNTS],
    "aten._local_scalar_dense slice": lambda: X[:COUNTS],
    "aten._local_scalar_dense select": lambda: X[COUNTS],
    "aten._local_scalar_dense contains": lambda: 3.0 in X,
    "aten._local_scalar_dense range": lambda: torch.arange(COUNTS),
    "aten._local_scalar_dense storage": lambda: X.untyped_storage().tolist(),
    "aten.equal": lambda: torch.equal(X, X),
    "aten.allclose": lambda: torch.allclose(X, X),
    "Tensor.tolist": lambda: ROWS.tolist(),
    "Tensor.numpy": lambda: ROWS.numpy(),
    "Tensor.__array__": lambda: np.asarray(ROWS),
    "Tensor.__dlpack__": lambda: np.from_dlpack(ROWS),
    "Tensor.__repr__": lambda: str(ROWS),
    "Tensor.__format__": lambda: f"{COUNTS:d}",
    "Tensor.__deepcopy__": lambda: copy.deepcopy(X),
    "Tensor.cpu": lambda: X.cpu(),
    "Tensor.new_tensor": lambda: X.new_tensor(3),
    "torch.tensor uploads": lambda: torch.tensor(3.0, device=X.device),
    "torch.as_tensor uploads": lambda: torch.as_tensor(3.0, device=X.device),
    "aten.lift_fresh list": lambda: torch.tensor([1, 2]),
    "aten.lift_fresh array": lambda: torch.from_numpy(np.ones(2)),
    "aten.lift_fresh index list": lambda: X[[0, 1]],
    "aten.nonzero": lambda: X.nonzero(),
    "aten.nonzero where": lambda: torch.where(X > 0),
    "aten.masked_select": lambda: X.masked_select(X > 0),
    "aten.index.Tensor bool": lambda: X[X > 0],
    "aten.index.Tensor uint8": lambda: X[torch.ones(2, dtype=torch.uint8)],
    "aten.index_put_.default rows": lambda: X.clone().index_put_((X > 0,), torch.ones(1)),
    "aten.index_put_.default sum": lambda: X.clone().index_put_((X > 0,), COUNTS.float(), accumulate=True),
    "aten._unique2": lambda: torch.unique(ROWS),
    "aten.unique_consecutive": lambda: torch.unique_consecutive(ROWS),
    "aten.repeat_interleave.Tensor": lambda: X.repeat_interleave(ROWS, dim=0),
    "aten.bincount": lambda: torch.bincount(ROWS),
    "aten.rand.": lambda: torch.rand(3),
    "aten.normal_": lambda: X.clone().normal_(),
    "aten.bernoulli_ dropout": lambda: F.dropout(X, 0.5, training=True),
    "aten.randperm": lambda: torch.randperm(4),
    "aten._linalg_check_errors": lambda: torch.linalg.inv(torch.eye(3)),
    "aten.bernoulli_ attention": lambda: F.scaled_dot_product_attention(
        X[None, None], X[None, None], X[None, None], dropout_p=0.5
    ),
    "tape_test.count": lambda: torch.ops.tape_test.count(X),
    "drew random numbers": lambda: torch.ops.tape_test.jitter(X),
    "host constant": lambda: torch.tensor(0.0).add_(X.sum()),
    "plain storage": lambda: X.to_sparse(),
}


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8", "ignore:.*non-writable")
@in_every_mode
@pytest.mark.parametrize("operation", REFUSED)
def test_what_a_capturing_stream_refuses_is_refused(backend: TapeBackend, operation: str, mode: Any) -> None:
    call = REFUSED[operation]
    call()  # fine eagerly

    def body() -> list[Tensor]:
        with mode():
            call()
        return []

    with pytest.raises(CaptureError) as refused:
        backend.record(body, warmups=0)
    what, where = str(refused.value).splitlines()
    assert operation.split(" ")[0] in what
    # Draws inside a custom operator show at the segment's end only.
    if operation != "drew random numbers":
        lines, start = inspect.getsourcelines(call)
        assert f"{__file__}:" in where
        assert start <= int(where.split(".py:")[1].split(" ")[0]) < start + len(lines)


def test_allowed_neighbours_of_what_is_refused(backend: TapeBackend) -> None:
    rows = torch.tensor([1, 0])

    def body(x: Tensor, y: Tensor) -> list[Tensor]:
        z = x.clone()
        z[z > 0] = 0.0
        host = torch.tensor(3.0, device="cpu")
        return [
            z + host,
            x.repeat_interleave(2, dim=0),
            x.repeat_interleave(torch.ones_like(rows), dim=0, output_size=2),
            x[rows],
            F.dropout(y, 0.5, training=False),
            torch.nonzero_static(y, size=3),
            torch.as_tensor(x, device=x.device),
        ]

    check(backend, body, x23(), x23().flip(0))


def test_attention_that_drops_out_is_refused_before_its_kernel() -> None:
    operator, q = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, X[None, None]
    assert refused_operation(Call(operator, (q, q, q, 0.5), {})) is not None
    assert refused_operation(Call(operator, (q, q, q), {"dropout_p": 0.5})) is not None
    assert refused_operation(Call(operator, (q, q, q, 0.0), {})) is None


class _Wrapped(torch.Tensor):
    """A tensor whose memory only its own Python knows."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(a.inner if isinstance(a, cls) else a for a in args), **(kwargs or {}))


def test_tensors_that_are_not_plain_are_refused(backend: TapeBackend) -> None:
    wrapped = _Wrapped(X)
    with pytest.raises(CaptureError, match="on tensors of type _Wrapped"):
        backend.record(lambda: [wrapped + 1])


def test_a_refusal_that_the_body_swallows_still_fails_the_recording(backend: TapeBackend) -> None:
    def body() -> list[Tensor]:
        try:
            rows = int(COUNTS)
        except RuntimeError:
            rows = 1
        return [X[:rows] + 1]

    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        backend.record(body)


@pytest.mark.parametrize("result", [X, [1], None])
def test_outputs_other_than_a_list_of_tensors_are_refused(backend: TapeBackend, result: Any) -> None:
    with pytest.raises(CaptureError, match="must return a list of tensors"):
        backend.record(lambda: result)


def test_recordings_do_not_nest(backend: TapeBackend, capture_var: ContextVar[Any]) -> None:
    other = TapeBackend(ContextVar("other", default=None))
    for inner in (backend, other):
        with pytest.raises(CaptureError, match="recording inside a recording"):
            backend.record(lambda inner=inner: inner.record(list).outputs, warmups=0)
    done = other.record(lambda: [X + 1])
    with pytest.raises(CaptureError, match="replay inside a segment"):
        backend.record(lambda: done.replay() or [])
    token = capture_var.set("another backend's capture")
    with pytest.raises(CaptureError, match="another capture"):
        backend.record(list)
    capture_var.reset(token)
    assert backend.record(lambda: [X + 1]).segments == 1


@pytest.mark.parametrize("error", [ZeroDivisionError, CaptureError])
def test_an_error_in_the_body_restores_everything(
    backend: TapeBackend, capture_var: ContextVar[Any], as_break: Any, error: type[Exception]
) -> None:
    @as_break
    def attend() -> Tensor:
        if error is ZeroDivisionError:
            raise ZeroDivisionError("in the break")
        return X + 1

    def body() -> list[Tensor]:
        attend().tolist()
        return []

    with pytest.raises(error):
        backend.record(body, warmups=0)
    assert capture_var.get() is None
    assert torch.is_grad_enabled()
    assert X.tolist() == x23().tolist()  # no mode refuses any more
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    check(backend, lambda x: x * 2, x23())


# --- breaks -------------------------------------------------------------------------------------------------


def _break_wrappers() -> list[Any]:
    return ["own", pytest.param("engine", marks=pytest.mark.engine)]


@pytest.fixture(params=_break_wrappers())
def breaks(request: pytest.FixtureRequest) -> SimpleNamespace:
    """A context variable with the wrapper that looks into it: one of our own, and the engine's."""
    if request.param == "engine":
        module = pytest.importorskip(ENGINE_BREAKS)
        return SimpleNamespace(
            var=module._current_capture_var, wrap=module.eager_on_graph, graph_break=module.break_graph
        )
    var: ContextVar[Any] = ContextVar("capture", default=None)
    wrap = breaking(var)
    return SimpleNamespace(var=var, wrap=wrap, graph_break=wrap(lambda: None))


def test_breaks_run_eagerly_on_live_state_between_segments(breaks: SimpleNamespace) -> None:
    live = SimpleNamespace(rows=2, factor=3.0, calls=[])

    @breaks.wrap
    def attend(q: Tensor, out: Tensor, *, scale: Tensor) -> Tensor:
        # A host read of live state, with a shape that depends on it.
        live.calls.append((q[: live.rows].tolist(), torch.is_grad_enabled()))
        picked = q[q[:, 0] > 0]
        out.zero_()
        out[: live.rows] = q[: live.rows] * live.factor + len(picked)
        return out.sum(0) * scale

    x, scale, held = x23(), torch.ones(()), torch.zeros(3)

    def body() -> list[Tensor]:
        q = x * 2
        with torch.device("cpu"):  # a mode of the body's own, on top of the tape's
            out = torch.empty(2, 3)
            total = attend(q, out, scale=scale)
        held.copy_(total)
        second = attend(out + q, torch.empty(2, 3), scale=scale)
        return [out + total, second, held]

    recording = TapeBackend(breaks.var, poison=True).record(body)
    assert (recording.segments, recording.breaks) == (3, 2)
    for rows, factor in ((1, 5.0), (2, -1.0), (0, 2.0)):
        live.rows, live.factor = rows, factor
        fresh(x, scale)
        live.calls = []
        recording.replay()
        got, calls = [t.clone() for t in recording.outputs], live.calls
        live.calls = []
        with torch.no_grad():
            want = body()
        assert_same(got, want)
        assert calls == live.calls
        assert len(calls) == 2
    assert breaks.var.get() is None


def test_segments_may_be_empty(breaks: SimpleNamespace) -> None:
    x = x23()

    def body() -> list[Tensor]:
        breaks.graph_break()
        breaks.graph_break()
        y = x + 1
        breaks.graph_break()
        return [y]

    recording = TapeBackend(breaks.var).record(body)
    assert (recording.segments, recording.breaks) == (4, 3)
    fresh(x)
    recording.replay_debug()
    assert torch.equal(recording.outputs[0], x + 1)
    nothing = TapeBackend(breaks.var).record(list)
    assert (nothing.segments, nothing.breaks, nothing.outputs) == (1, 0, [])
    nothing.replay()


def test_breaks_do_not_nest(breaks: SimpleNamespace) -> None:
    inner = breaks.wrap(lambda: X + 1)
    outer = breaks.wrap(lambda: inner())
    with pytest.raises(CaptureError, match="a break inside a break"):
        TapeBackend(breaks.var).record(lambda: [outer()])


def test_a_break_in_inference_mode_is_repeated_in_it(breaks: SimpleNamespace) -> None:
    attend = breaks.wrap(lambda x: x.exp())

    def body(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return attend(x + 1) * 2

    check(TapeBackend(breaks.var, poison=True), body, x23())


def test_an_object_that_a_break_returns_is_handed_on() -> None:
    engine = pytest.importorskip(ENGINE_BREAKS)

    @engine.eager_on_graph
    def attend(x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(out=x + 1, pair=None)

    x = x23()
    recording = TapeBackend(engine._current_capture_var).record(lambda: [attend(x * 2).out * 3])
    assert recording.external_reads([x]) == []
    recording.poison([x])
    fresh(x)
    recording.replay()
    assert torch.equal(recording.outputs[0], (x * 2 + 1) * 3)


def test_a_fault_names_its_break(breaks: SimpleNamespace) -> None:
    live = SimpleNamespace(broken=False)

    @breaks.wrap
    def attend(x: Tensor) -> Tensor:
        if live.broken:
            raise ValueError("no such slot")
        return x + 1

    x = x23()

    def body() -> list[Tensor]:
        breaks.graph_break()
        return [attend(x * 2)]

    recording = TapeBackend(breaks.var).record(body)
    live.broken = True
    with pytest.raises(ValueError, match="no such slot"):
        recording.replay()
    with pytest.raises(
        ReplayFault, match=r"break 1 \(.*attend.*test_tape\.py:.* in body\).*no such slot"
    ) as fault:
        recording.replay_debug()
    assert (fault.value.part, fault.value.index) == ("break", 1)
    assert "attend" in fault.value.name
    assert isinstance(fault.value.__cause__, ValueError)


@pytest.mark.parametrize("operation", ["index", "shape"])
def test_a_fault_names_its_segment(breaks: SimpleNamespace, operation: str) -> None:
    x, rows = x23(), torch.tensor([1, 0])

    def fails_later() -> Tensor:
        return x[rows] if operation == "index" else torch.ops.tape_test.undeclared_shape(x)

    def body() -> list[Tensor]:
        y = x * 2
        breaks.graph_break()
        return [y + 1, fails_later()]

    recording = TapeBackend(breaks.var).record(body)
    fresh(x)
    x.abs_().add_(1)
    rows.fill_(99)
    with pytest.raises((IndexError, RuntimeError)):
        recording.replay()
    with pytest.raises(ReplayFault, match=r"segment 1 \(from .*test_tape\.py:\d+ in body\)") as fault:
        recording.replay_debug()
    assert (fault.value.part, fault.value.index) == ("segment", 1)
    cause = fault.value.__cause__
    assert "in fails_later" in cause.__notes__[0]
    assert isinstance(cause, IndexError) or "torch.float32[3] when recorded, torch.float32[6] now" in str(
        cause
    )


# --- whose memory -------------------------------------------------------------------------------------------


def stale_bodies(as_break: Any) -> dict[str, Callable[[Tensor], list[Tensor]]]:
    """Bodies that read what a CUDA graph would find freed: left by a warm-up, or hidden by a break."""
    cache: dict[str, Tensor] = {}
    state = SimpleNamespace()

    def workspace(x: Tensor) -> list[Tensor]:
        cache.setdefault("table", torch.ones(3))
        return [x * cache["table"]]

    @as_break
    def plan(x: Tensor) -> None:
        state.table = torch.full((3,), x.shape[0])

    def side_product(x: Tensor) -> list[Tensor]:
        plan(x)
        return [x * state.table]

    return {"workspace": workspace, "side_product": side_product}


@pytest.mark.parametrize("kind", ["workspace", "side_product"])
def test_a_stale_read_is_named_and_shows_after_poison(backend: TapeBackend, as_break: Any, kind: str) -> None:
    body, x = stale_bodies(as_break)[kind], x23()
    recording = backend.record(lambda: body(x))
    (read,) = recording.external_reads([x])
    assert tuple(read.shape) == (3,)
    assert read.operation == "aten.mul.Tensor"
    assert f"in {kind}" in str(read)
    assert str(read.dtype) in str(read)
    recording.poison([x])
    fresh(x)
    recording.replay()
    want = body(x)[0]
    assert not torch.equal(recording.outputs[0], want)
    if read.dtype.is_floating_point:
        assert recording.outputs[0].isnan().all()


def test_what_is_kept_is_neither_named_nor_poisoned(backend: TapeBackend) -> None:
    table, x = torch.ones(4, 3), x23()
    recording = backend.record(lambda: [x * table[0]])
    assert len(recording.external_reads()) == 2
    assert recording.external_reads([table[2:], x]) == []  # any view keeps the storage
    recording.poison([table[2:], x])
    assert torch.equal(table, torch.ones(4, 3))
    fresh(x)
    recording.replay()
    assert torch.equal(recording.outputs[0], x)


def test_a_foreign_argument_of_a_break_is_a_read(breaks: SimpleNamespace) -> None:
    """The engine holds a break's arguments weakly on a GPU."""
    cache = [torch.ones(3)]
    attend = breaks.wrap(lambda x, weights: x * weights[0])
    x = x23()
    recording = TapeBackend(breaks.var).record(lambda: [attend(x + 1, cache)])
    (read,) = recording.external_reads([x])
    assert "argument" in read.operation
    recording.poison([x])
    fresh(x)
    recording.replay()
    assert recording.outputs[0].isnan().all()


def test_what_a_break_returns_is_read_safely(breaks: SimpleNamespace) -> None:
    attend = breaks.wrap(lambda x: x.cumsum(0))
    x = x23()
    recording = TapeBackend(breaks.var, poison=True).record(lambda: [attend(x + 1) * 2])
    assert recording.external_reads([x]) == []
    recording.poison([x])
    fresh(x)
    recording.replay()
    assert torch.equal(recording.outputs[0], (x + 1).cumsum(0) * 2)


def test_a_foreign_buffer_counts_as_read_unless_all_of_it_was_written_first(backend: TapeBackend) -> None:
    whole, part, added, slots, shape = (torch.zeros(2, 3) for _ in range(5))
    x, rows = x23(), torch.tensor([1, 0])

    def body() -> list[Tensor]:
        whole.copy_(x)
        part[:1].copy_(x[:1])
        added.add_(x)
        slots.index_copy_(0, rows, x)
        shaped = torch.zeros_like(shape) + torch.empty_like(shape).fill_(2)
        return [whole + 1, part + 1, added + 1, slots + 1, shaped]

    reads = backend.record(body).external_reads([x, rows])
    assert [r.operation for r in reads] == [
        "aten.add_.Tensor",
        "aten.index_copy_.default",
        "aten.add.Tensor",
    ]
    assert {r.tensor.data_ptr() for r in reads} == {t.data_ptr() for t in (part, added, slots)}


def test_memory_that_no_operation_of_a_replay_writes_shows(capture_var: ContextVar[Any]) -> None:
    """An uninitialised buffer that something filled, in the recorded run, without an operation."""

    def body(x: Tensor) -> list[Tensor]:
        buffer = torch.empty(3)
        ctypes.memset(buffer.data_ptr(), 0, buffer.nbytes)
        return [buffer + x]

    x = torch.zeros(3)
    quiet = TapeBackend(capture_var).record(lambda: body(x))
    loud = TapeBackend(capture_var, poison=True).record(lambda: body(x))
    fresh(x)
    quiet.replay()
    assert torch.equal(quiet.outputs[0], x)
    loud.replay()
    assert loud.outputs[0].isnan().all()


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex64]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_poison_shows_in_every_type(backend: TapeBackend, dtype: Any) -> None:
    stale = torch.ones(4).to(dtype)
    recording = backend.record(lambda: [stale.clone()])
    for _ in range(2):  # a second poison must not undo the first
        recording.poison([])
        recording.replay()
        (seen,) = recording.outputs
        if dtype.is_floating_point or dtype.is_complex:
            assert seen.to(torch.complex64).isnan().all()
        elif dtype is torch.bool:
            assert not seen.any()
        else:
            assert (seen.long() >= (63 if dtype is torch.uint8 else 16000)).all()


def test_a_poisoned_index_fails_loudly(backend: TapeBackend) -> None:
    x, rows = x23(), torch.tensor([1, 0])
    recording = backend.record(lambda: [x[rows], F.embedding(rows, x)])
    recording.poison([x])
    with pytest.raises(IndexError):
        recording.replay()


def test_constants_and_inputs_survive_the_poison_of_every_replay(backend: TapeBackend) -> None:
    check(backend, lambda x: [x * torch.tensor(3.0), torch.where(x > 0, x, 2.0)], x23())


def test_warmups_run_first_and_eagerly(backend: TapeBackend, capture_var: ContextVar[Any]) -> None:
    seen: list[tuple[bool, bool]] = []

    def body() -> list[Tensor]:
        seen.append((capture_var.get() is None, torch.is_grad_enabled()))
        return [X + 1]

    backend.record(body)
    backend.record(body, warmups=0)
    assert seen == [(True, False), (True, False), (False, False), (False, False)]
