"""What the tape refuses, as a capturing stream would, and that it leaves nothing behind when it does."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

from sglang_dsv4_graphs.bank.backend import CaptureError  # noqa: E402
from sglang_dsv4_graphs.bank.tape import TapeBackend  # noqa: E402
from sglang_dsv4_graphs.bank.tape_ops import Call, refused_operation  # noqa: E402
from tests.bank.tape.helpers import check, in_every_mode, x23  # noqa: E402

Tensor = torch.Tensor

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
