"""The address guard: what moved is named, by bank, bucket, buffer and both addresses; the rest costs little."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank import guard as guard_module  # noqa: E402
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


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> list[Weight]:
    monkeypatch.setattr(guard_module, "WEIGHTS_PER_CHECK", 3)
    return [weight(f"layers.{i}.w", torch.zeros(2)) for i in range(8)]


def weight(name: str, tensor: torch.Tensor) -> Weight:
    """A weight in a slot of its own, as a module's parameters have one each."""
    return Weight(name, {"w": tensor}, "w")


def tensor_of(held: Weight) -> torch.Tensor:
    tensor = held.slots["w"]
    assert tensor is not None
    return tensor


def check_often(guard: AddressGuard, captured: object, times: int) -> None:
    for _ in range(times):
        check(guard, captured)


def move(weight: torch.Tensor) -> torch.Tensor:
    """Give ``weight`` other memory, as a weight update does; returns what keeps the old alive."""
    old = weight.detach().clone().set_(weight.detach())
    weight.data = torch.zeros(2)
    return old


@pytest.mark.parametrize("moved", range(8))
def test_weights_are_covered_in_rotation(weights: list[Weight], moved: int) -> None:
    guard = AddressGuard([], weights)
    captured = guard.addresses()
    check_often(guard, captured, 3)  # once around, and the turn is back at one that has been checked
    kept = move(tensor_of(weights[moved]))
    with pytest.raises(MovedBufferError) as caught:
        check_often(guard, captured, 3)  # 8 weights, 3 a check
    assert caught.value.buffer == f"layers.{moved}.w"
    assert f"captured at {kept.data_ptr():#x}, now at {tensor_of(weights[moved]).data_ptr():#x}" in str(caught.value)


def test_a_check_looks_at_no_more_than_its_share(weights: list[Weight]) -> None:
    guard = AddressGuard([], weights)
    captured = guard.addresses()
    kept = move(tensor_of(weights[5]))
    check(guard, captured)  # 0 1 2
    with pytest.raises(MovedBufferError):
        check(guard, captured)  # 3 4 5
    assert kept is not None


def test_everything_looks_at_every_weight(weights: list[Weight]) -> None:
    for moved in range(8):
        guard = AddressGuard([], weights)
        captured = guard.addresses()
        check(guard, captured, everything=True)
        kept = move(tensor_of(weights[moved]))
        with pytest.raises(MovedBufferError, match=rf"buffer=layers\.{moved}\.w "):
            check(guard, captured, everything=True)
        assert kept is not None


def test_few_weights_are_checked_once_each(weights: list[Weight]) -> None:
    guard = AddressGuard([], weights[:2])
    check(guard, guard.addresses())
    kept = move(tensor_of(weights[1]))
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
