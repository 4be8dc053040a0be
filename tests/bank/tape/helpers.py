"""What the tape's tests share: operators of their own, and the comparison of a replay with eager."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from sglang_dsv4_graphs.bank.tape import TapeBackend, TapeRecording

Tensor = torch.Tensor

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


in_every_mode = pytest.mark.parametrize(
    "mode", [nullcontext, torch.inference_mode, torch.enable_grad], ids=["no_grad", "inference", "grad"]
)
