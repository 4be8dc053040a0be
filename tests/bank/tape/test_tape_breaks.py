"""Breaks between segments, with the engine's own wrapper and with one of ours, and faults by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from sglang_dsv4_graphs.bank.backend import CaptureError, ReplayFault  # noqa: E402
from sglang_dsv4_graphs.bank.tape import TapeBackend  # noqa: E402
from tests.bank.tape.helpers import assert_same, check, fresh, x23  # noqa: E402

Tensor = torch.Tensor


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
    inner = breaks.wrap(lambda: x23() + 1)
    outer = breaks.wrap(lambda: inner())
    with pytest.raises(CaptureError, match="a break inside a break"):
        TapeBackend(breaks.var).record(lambda: [outer()])


def test_a_break_in_inference_mode_is_repeated_in_it(breaks: SimpleNamespace) -> None:
    attend = breaks.wrap(lambda x: x.exp())

    def body(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return attend(x + 1) * 2

    check(TapeBackend(breaks.var, poison=True), body, x23())


@pytest.mark.engine
def test_an_object_that_a_break_returns_is_handed_on(engine_breaks: Any) -> None:
    @engine_breaks.eager_on_graph
    def attend(x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(out=x + 1, pair=None)

    x = x23()
    recording = TapeBackend(engine_breaks._current_capture_var).record(lambda: [attend(x * 2).out * 3])
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
        ReplayFault, match=r"break 1 \(.*attend.*test_tape_breaks\.py:.* in body\).*no such slot"
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
    with pytest.raises(ReplayFault, match=r"segment 1 \(from .*test_tape_breaks\.py:\d+ in body\)") as fault:
        recording.replay_debug()
    assert (fault.value.part, fault.value.index) == ("segment", 1)
    cause = fault.value.__cause__
    assert "in fails_later" in cause.__notes__[0]
    assert isinstance(cause, IndexError) or "torch.float32[3] when recorded, torch.float32[6] now" in str(cause)


def test_a_break_is_named_by_its_caller_even_in_one_file(backend: TapeBackend, capture_var: Any) -> None:
    broken: list[int] = []

    def wrapper() -> None:
        capture = capture_var.get()
        if capture is not None:
            capture._end_current_segment()
            capture.cuda_graph._break_fns.append(lambda: broken[0])
            capture._begin_new_segment()

    def body() -> list[Tensor]:
        wrapper()
        return []

    with pytest.raises(ReplayFault, match=r"test_tape_breaks\.py:\d+ in body"):
        backend.record(body).replay_debug()


@pytest.mark.parametrize("steps", [["end", "begin"], ["begin"], ["end", "end"]])
def test_a_wrapper_that_leaves_no_break_is_refused(backend: TapeBackend, capture_var: Any, steps: list[str]) -> None:
    def body() -> list[Tensor]:
        capture = capture_var.get()
        for step in steps:
            capture._end_current_segment() if step == "end" else capture._begin_new_segment()
        return []

    with pytest.raises(CaptureError, match=r"without one break before it|a break inside a break"):
        backend.record(body, warmups=0)
