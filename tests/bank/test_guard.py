"""The address guard: what moved is named, by bank, bucket, buffer and both addresses; the rest costs little."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.guard import AddressGuard, GuardedBuffer, MovedBufferError, Weight  # noqa: E402


class Holder:
    """Somebody else's buffer; counts how often it was asked for."""

    def __init__(self, rows: int = 4) -> None:
        self.tensor: torch.Tensor | None = torch.zeros(rows)
        self.asked = 0

    def __call__(self) -> torch.Tensor | None:
        self.asked += 1
        return self.tensor


def check(guard: AddressGuard, captured: object, everything: bool = False) -> None:
    guard.check(captured, bank="full-layer", bucket=256, everything=everything)  # type: ignore[arg-type]


def test_what_stayed_passes() -> None:
    held = Holder()
    guard = AddressGuard([GuardedBuffer("workspace", held)], [weight("w", torch.zeros(3))])
    captured = guard.addresses()
    assert held.tensor is not None
    held.tensor.fill_(3)  # rewritten in place: what buffers are for
    for everything in (False, True):
        check(guard, captured, everything)


def test_a_moved_buffer_is_named_with_both_addresses() -> None:
    held = Holder()
    guard = AddressGuard([GuardedBuffer("still", Holder()), GuardedBuffer("workspace", held)])
    captured = guard.addresses()
    assert held.tensor is not None
    old, held.tensor = held.tensor, torch.zeros(8)
    with pytest.raises(MovedBufferError) as caught:
        check(guard, captured)
    error = caught.value
    assert (error.bank, error.bucket, error.buffer) == ("full-layer", 256, "workspace")
    assert str(error) == (
        f"bank=full-layer bucket=256 buffer=workspace moved: captured at {old.data_ptr():#x}, "
        f"now at {held.tensor.data_ptr():#x}; a replay would read freed memory"
    )


def test_a_buffer_that_comes_or_goes_has_moved() -> None:
    held = Holder()
    guard = AddressGuard([GuardedBuffer("workspace", held)])
    there = guard.addresses()
    tensor, held.tensor = held.tensor, None
    with pytest.raises(MovedBufferError, match=r"captured at 0x[0-9a-f]+, now at nowhere"):
        check(guard, there)
    absent = guard.addresses()
    check(guard, absent)
    held.tensor = tensor
    with pytest.raises(MovedBufferError, match=r"captured at nowhere, now at 0x[0-9a-f]+"):
        check(guard, absent)


def test_each_bucket_is_compared_with_its_own_capture() -> None:
    held = Holder()
    guard = AddressGuard([GuardedBuffer("workspace", held)])
    before = guard.addresses()
    kept, held.tensor = held.tensor, torch.zeros(8)
    after = guard.addresses()
    check(guard, after)
    with pytest.raises(MovedBufferError):
        check(guard, before)
    assert kept is not held.tensor


def test_what_is_not_cheap_is_only_checked_with_everything() -> None:
    cheap, dear = Holder(), Holder()
    guard = AddressGuard([GuardedBuffer("dear", dear, cheap=False), GuardedBuffer("cheap", cheap)])
    captured = guard.addresses()
    assert (cheap.asked, dear.asked) == (1, 1)
    kept, dear.tensor = dear.tensor, torch.zeros(8)
    check(guard, captured)
    assert (cheap.asked, dear.asked) == (2, 1)
    with pytest.raises(MovedBufferError, match="buffer=dear"):
        check(guard, captured, everything=True)
    assert kept is not None


def test_after_a_weight_update_each_bucket_compares_everything_once() -> None:
    dear = Holder()
    guard = AddressGuard([GuardedBuffer("dear", dear, cheap=False)])
    captured = guard.addresses()
    asked = dear.asked

    def check_bucket(bucket: int) -> None:
        guard.check(captured, bank="full-layer", bucket=bucket)

    for bucket in (64, 128):
        check_bucket(bucket)
    assert dear.asked == asked
    guard.weights_changed()
    for bucket in (64, 64, 128, 128):
        check_bucket(bucket)
    assert dear.asked == asked + 2
    kept, dear.tensor = dear.tensor, torch.zeros(8)
    check_bucket(64)  # not due
    guard.weights_changed()
    for bucket in (64, 64, 128):  # and due until it has passed
        with pytest.raises(MovedBufferError, match=rf"bucket={bucket} buffer=dear moved"):
            check_bucket(bucket)
    assert kept is not None


@pytest.mark.parametrize("cheap", [True, False])
def test_a_probe_that_raises_counts_as_moved(cheap: bool) -> None:
    held, broken = Holder(), False

    def probe() -> torch.Tensor | None:
        if broken:
            raise KeyError("no such workspace")
        return held()

    guard = AddressGuard([GuardedBuffer("workspace", probe, cheap=cheap)])
    captured = guard.addresses()
    broken = True
    guard.weights_changed()
    with pytest.raises(MovedBufferError) as caught:
        check(guard, captured)
    assert held.tensor is not None
    assert str(caught.value) == (
        f"bank=full-layer bucket=256 buffer=workspace moved: captured at {held.tensor.data_ptr():#x}, "
        "now at nobody knows where (KeyError: 'no such workspace'); a replay would read freed memory"
    )
    assert isinstance(caught.value.__cause__, KeyError)


def weight(name: str, tensor: torch.Tensor) -> Weight:
    """A weight in a slot of its own, as a module's parameters have one each."""
    return Weight(name, {"w": tensor}, "w")


def move(weight: torch.Tensor) -> torch.Tensor:
    """Give ``weight`` other memory, as a weight update does; returns what keeps the old alive."""
    old = weight.detach().clone().set_(weight.detach())
    weight.data = torch.zeros(2)
    return old


@pytest.mark.parametrize("moved", range(8))
def test_no_check_passes_a_moved_weight(moved: int) -> None:
    weights = [weight(f"layers.{i}.w", torch.nn.Parameter(torch.zeros(2), requires_grad=False)) for i in range(8)]
    guard = AddressGuard([], weights)
    captured = guard.addresses()
    check(guard, captured)
    parameter = weights[moved].tensor()
    assert parameter is not None
    parameter.fill_(2)  # rewritten in place, as most updates do
    check(guard, captured)
    kept = move(parameter)
    for _ in range(2):
        with pytest.raises(MovedBufferError) as caught:
            check(guard, captured)
        assert caught.value.buffer == f"layers.{moved}.w"
        assert f"captured at {kept.data_ptr():#x}, now at {parameter.data_ptr():#x}" in str(caught.value)


def test_weights_lie_where_they_lay_when_the_guard_was_made() -> None:
    """A weight that moved between the captures of two buckets is another one for the first."""
    held = weight("layers.0.w", torch.zeros(2))
    guard = AddressGuard([], [held])
    tensor = held.tensor()
    assert tensor is not None
    kept = move(tensor)
    with pytest.raises(MovedBufferError):
        check(guard, guard.addresses())
    assert kept is not None


def test_another_tensor_in_a_weights_slot_is_found() -> None:
    slots: dict[str, torch.Tensor | None] = {"w": torch.zeros(2)}
    guard = AddressGuard([], [Weight("layers.0.w", slots, "w")])
    kept, slots["w"] = slots["w"], torch.zeros(2)
    with pytest.raises(MovedBufferError, match=r"buffer=layers\.0\.w moved"):
        check(guard, guard.addresses())
    assert kept is not None
    slots["w"] = None
    with pytest.raises(MovedBufferError, match="now at nowhere"):
        check(guard, guard.addresses())
    del slots["w"]
    with pytest.raises(MovedBufferError, match="now at nowhere"):
        check(guard, guard.addresses())
    slots["w"] = "no tensor"  # type: ignore[assignment]
    with pytest.raises(MovedBufferError, match=r"buffer=layers\.0\.w moved: .*AttributeError"):
        check(guard, guard.addresses())
    slots["w"] = kept
    check(guard, guard.addresses())


def test_names() -> None:
    source: Callable[[], torch.Tensor | None] = lambda: None  # noqa: E731
    guard = AddressGuard(
        iter([GuardedBuffer("a", source), GuardedBuffer("b", source, cheap=False)]), [weight("w", torch.ones(1))]
    )
    assert guard.names == ("a", "b")
    assert guard.addresses().buffers == (None, None)


def test_nothing_to_guard() -> None:
    guard = AddressGuard([])
    check(guard, guard.addresses(), everything=True)
