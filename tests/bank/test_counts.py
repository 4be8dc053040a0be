"""Row counts: two device counts that one fill writes, with the dtype and shape of the engine's own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.counts import RowCounts  # noqa: E402


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(("local", "total"), [(0, 0), (0, 5), (3, 5), (5, 5), (2**31 - 1, 2**31 - 1)])
def test_both_counts_are_written(shape: tuple[int, ...], local: int, total: int) -> None:
    counts = RowCounts(torch.zeros(shape, dtype=torch.int32))
    for values in ((local, total), (1, 2), (local, total)):
        counts.write(*values)
        assert (counts.local.item(), counts.total.item()) == values
    for count in (counts.local, counts.total):
        assert (count.dtype, tuple(count.shape)) == (torch.int32, shape)


def test_addresses_never_change() -> None:
    counts = RowCounts(torch.tensor(1, dtype=torch.int32))
    held = (counts.local, counts.total)
    addresses = [t.data_ptr() for t in held]
    counts.write(3, 4)
    assert [t.data_ptr() for t in (counts.local, counts.total)] == addresses
    assert [t.item() for t in held] == [3, 4]
    assert addresses[1] - addresses[0] == 4
    (word,) = counts.tensors
    assert word.data_ptr() == addresses[0]


def test_one_launch_writes_both() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Launches(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.count += 1
            return func(*args, **(kwargs or {}))

    counts = RowCounts(torch.tensor(0, dtype=torch.int32))
    with Launches() as launches:
        counts.write(3, 4)
    assert launches.count == 1


@pytest.mark.parametrize(("local", "total"), [(-1, 4), (5, 4), (1, 2**31), (0, -1)])
def test_impossible_counts_are_refused(local: int, total: int) -> None:
    with pytest.raises(ValueError, match=f"local {local}, total {total}"):
        RowCounts(torch.tensor(0, dtype=torch.int32)).write(local, total)


@pytest.mark.parametrize("like", [torch.zeros(2, dtype=torch.int32), torch.tensor(0), torch.zeros(())])
def test_other_counts_are_refused(like: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="a row count is one int32"):
        RowCounts(like)


def test_bind() -> None:
    counts = RowCounts(torch.tensor(0, dtype=torch.int32))
    batch = SimpleNamespace(num_token_non_padded="own", global_num_token_non_padded="own")
    counts.bind(batch)
    assert batch.num_token_non_padded is counts.local
    assert batch.global_num_token_non_padded is counts.total


def test_a_batch_without_a_global_count_gets_none() -> None:
    counts = RowCounts(torch.tensor(0, dtype=torch.int32))
    batch = SimpleNamespace(num_token_non_padded="own", global_num_token_non_padded=None)
    counts.bind(batch)
    assert batch.num_token_non_padded is counts.local
    assert batch.global_num_token_non_padded is None
