"""Static rows: one set of buffers for all buckets, sized by the largest; the residual's output is its input."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.statics import StaticRows  # noqa: E402

MOST = 8


def rows(count: int, start: float = 0.0) -> list[torch.Tensor]:
    """Residual [rows, 2, 3], pre-mix [rows, 2], ids [rows]: distinct values, none zero."""
    residual = torch.arange(count * 6, dtype=torch.float32).view(count, 2, 3) + 1 + start
    return [residual, residual[:, :, 0] * 2, torch.arange(count) + 1 + int(start)]


@pytest.fixture
def statics() -> StaticRows:
    made = StaticRows(MOST)
    made.allocate(rows(MOST))
    return made


def test_buffers_are_like_the_live_rows(statics: StaticRows) -> None:
    for buffer, live in zip(statics.inputs(MOST), rows(MOST), strict=True):
        assert (buffer.shape, buffer.dtype) == (live.shape, live.dtype)
        assert not buffer.any()


def test_allocated_from_few_rows_they_still_hold_the_most() -> None:
    statics = StaticRows(MOST)
    statics.allocate(rows(2))
    assert [b.shape[0] for b in statics.inputs(MOST)] == [MOST] * 3


def test_all_buckets_share_the_buffers(statics: StaticRows) -> None:
    before = [b.data_ptr() for b in statics.inputs(MOST)]
    statics.allocate(rows(MOST))
    assert [b.data_ptr() for b in statics.inputs(MOST)] == before
    assert [b.data_ptr() for b in statics.inputs(3)] == before
    assert [b.shape[0] for b in statics.inputs(3)] == [3] * 3


def test_copy_in_leaves_later_rows(statics: StaticRows) -> None:
    statics.copy_in(rows(MOST))
    statics.copy_in(rows(3, start=100))
    for buffer, new, old in zip(statics.inputs(MOST), rows(3, start=100), rows(MOST), strict=True):
        assert torch.equal(buffer[:3], new)
        assert torch.equal(buffer[3:], old[3:])


def test_copy_in_can_clear_the_padding(statics: StaticRows) -> None:
    statics.copy_in(rows(MOST))
    statics.copy_in(rows(3, start=100), clear_to=5)
    for buffer, new, old in zip(statics.inputs(MOST), rows(3, start=100), rows(MOST), strict=True):
        assert torch.equal(buffer[:3], new)
        assert not buffer[3:5].any()
        assert torch.equal(buffer[5:], old[5:])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda t: [t[0].double(), *t[1:]],
        lambda t: [t[0][:, :, :2], *t[1:]],
        lambda t: [t[0], t[1][:, :1], t[2]],
        lambda t: [t[0], t[1], t[2].int()],
    ],
    ids=["dtype", "hidden", "streams", "ids"],
)
def test_rows_of_another_shape_are_refused(statics: StaticRows, wrong: object) -> None:
    assert statics.takes(rows(3))
    assert not statics.takes(wrong(rows(3)))  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"a step's rows are .* the graphs were captured for rows of"):
        statics.copy_in(wrong(rows(3)))  # type: ignore[operator]


@pytest.mark.parametrize("count", [2, 4])
def test_rows_of_another_structure_are_refused(statics: StaticRows, count: int) -> None:
    assert not statics.takes((rows(3) * 2)[:count])
    with pytest.raises(ValueError, match="zip"):
        statics.copy_in((rows(3) * 2)[:count])


def test_the_residual_output_takes_the_inputs_place(statics: StaticRows) -> None:
    statics.copy_in(rows(MOST))
    outputs = [rows(4, start=50)[0], rows(4, start=60)[1], None]
    stored = statics.store_outputs(outputs, 4)
    assert stored[0] is not None
    assert stored[1] is not None
    assert stored[2] is None
    assert stored[0].data_ptr() == statics.inputs(MOST)[0].data_ptr()
    assert stored[1].data_ptr() != statics.inputs(MOST)[1].data_ptr()
    assert torch.equal(stored[0], outputs[0])
    assert torch.equal(stored[1], outputs[1])
    assert torch.equal(statics.inputs(MOST)[0][4:], rows(MOST)[0][4:])


def test_outputs_of_all_buckets_share_the_buffers(statics: StaticRows) -> None:
    large = statics.store_outputs([rows(MOST)[0], rows(MOST)[1]], MOST)
    small = statics.store_outputs([rows(2, start=9)[0], rows(2, start=9)[1]], 2)
    for one, other in zip(large, small, strict=True):
        assert one is not None
        assert other is not None
        assert one.data_ptr() == other.data_ptr()
        assert torch.equal(one[:2], other)


def test_outputs_of_another_structure_are_refused(statics: StaticRows) -> None:
    statics.store_outputs([rows(2)[0], rows(2)[1]], 2)
    with pytest.raises(ValueError, match="zip"):
        statics.store_outputs([rows(2)[0]], 2)


def test_what_it_owns(statics: StaticRows) -> None:
    inputs = MOST * (6 * 4 + 2 * 4 + 8)
    assert statics.nbytes == inputs
    statics.store_outputs([rows(2)[0], rows(2)[1], None], 2)
    assert statics.nbytes == inputs + MOST * 2 * 4  # the residual's buffer is counted once
    assert len(statics.tensors) == 4
