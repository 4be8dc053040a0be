"""Captures of a bank: the larger first, what a failure keeps, and that all ranks keep the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank import capture_run  # noqa: E402
from sglang_dsv4_graphs.bank.backend import CaptureError  # noqa: E402
from sglang_dsv4_graphs.bank.ranks import RankError  # noqa: E402
from tests.bank.small_model import LATE, World  # noqa: E402
from tests.bank.small_sweep import BUCKETS, OUT_OF_MEMORY, OtherRank, Sweep  # noqa: E402


def test_the_largest_bucket_comes_first(lines: Callable[[], list[str]]) -> None:
    s = Sweep(World())
    bank = s.captured()
    assert s.dummies.runs == [("layers", 16), ("layers", 16), ("layers", 8), ("layers", 4)]  # the first one grows
    assert bank.buckets == BUCKETS
    *debug, info = lines()
    assert [line.split(" gib")[0] for line in debug] == [
        f"dsv4-graphs: captured bank=full-layer rows={rows} segments={LATE + 1}" for rows in (16, 8, 4)
    ]
    assert info.startswith(
        f"dsv4-graphs: captured bank=full-layer graphs=3 rows=4..16 segments={3 * (LATE + 1)} gib=0.000 seconds="
    )


@pytest.mark.parametrize(("fails_at", "kept"), [(16, ()), (8, (16,)), (4, (8, 16))])
def test_a_failed_capture_keeps_what_succeeded(
    lines: Callable[[], list[str]], fails_at: int, kept: tuple[int, ...]
) -> None:
    s = Sweep(World())
    bank = s.captured(fails={fails_at: OUT_OF_MEMORY})
    assert bank.buckets == kept
    # After growing, before captures are charged with memory, after the failure, and before the bank's is told.
    assert s.device.releases == 4
    (warning,) = [line for line in lines() if "capture-failed" in line]
    assert warning == (
        f"dsv4-graphs: capture-failed bank=full-layer rows={fails_at} kept={len(kept)} "
        'reason="rank 0: OutOfMemoryError: CUDA out of memory."'
    )
    assert lines()[-1].startswith(f"dsv4-graphs: captured bank=full-layer graphs={len(kept)} ")
    # The server still serves.
    batch = s.world.batch([5])
    before = s.world.caches()
    served = s.world.run(batch)
    s.world.set_caches(before)
    assert torch.equal(served[0], s.world.run(batch, plain=True)[0])


@pytest.mark.parametrize("error", [CaptureError("a host read"), RuntimeError(""), ValueError("8 rows need 9 requests")])
def test_whatever_a_capture_raises_is_contained(lines: Callable[[], list[str]], error: Exception) -> None:
    s = Sweep(World())
    assert s.captured(fails={8: error}).buckets == (16,)
    text = str(error) or "no message"
    assert f'reason="rank 0: {type(error).__name__}: {text}"' in "".join(lines())


def test_a_dummy_step_that_cannot_be_built_is_a_failure() -> None:
    s = Sweep(World())
    real = s.dummies.batch

    def batch(rows: int, request_length: int | None = None) -> Any:
        if rows == 8 and s.startup.banks:
            raise ValueError("8 dummy rows need 9 requests")
        return real(rows)

    s.dummies.batch = batch  # type: ignore[method-assign]
    assert s.captured().buckets == (16,)


def test_a_failed_capture_refuses_a_strict_server() -> None:
    s = Sweep(World(), strict=True)
    with pytest.raises(CaptureError, match="bank=full-layer rows=8: rank 0: OutOfMemoryError: CUDA out of memory"):
        s.captured(fails={8: OUT_OF_MEMORY})


@pytest.mark.parametrize("strict", [False, True])
def test_a_bucket_that_failed_on_another_rank_is_dropped_here(lines: Callable[[], list[str]], strict: bool) -> None:
    done: list[str] = []

    def says(kind: str, text: str) -> tuple[str, str] | None:
        done.extend([kind] if kind == "done" else [])
        return ("failed", "OutOfMemoryError: no room") if kind == "done" and len(done) == 2 else None

    ranks = OtherRank(says)
    s = Sweep(World(), ranks=ranks, strict=strict)
    if strict:
        with pytest.raises(CaptureError, match="rows=8: rank 1: OutOfMemoryError: no room"):
            ranks.inside(s.captured)
    else:
        assert ranks.inside(s.captured).buckets == (16,)
        assert done == ["done"] * 3  # the third is the startup's own: nobody tries the smallest
        assert 'rows=8 kept=1 reason="rank 1: OutOfMemoryError: no room"' in "".join(lines())


def test_a_rank_that_does_not_come_ends_the_sweep() -> None:
    def says(kind: str, text: str) -> None:
        if kind == "done":
            ranks._broken = "rank 0 waited 300 s: nothing came from rank 1"
            raise RankError(ranks._broken)

    ranks = OtherRank(says)
    with pytest.raises(RankError, match="nothing came from rank 1"):
        ranks.inside(Sweep(World(), ranks=ranks).captured)


def test_other_ranks_draw_no_progress_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(capture_run, "tqdm", lambda rows, desc, disable: shown.append((desc, disable)) or rows)
    for rank in (0, 1):
        s = Sweep(World())
        s.world.served.log.rank = rank
        s.captured()
    # None: a bar where a terminal is attached.
    assert shown == [("Capturing full-layer", None), ("Capturing full-layer", True)]


def test_ranks_stop_alike_where_one_has_no_room(lines: Callable[[], list[str]]) -> None:
    """The other rank has 100 MiB left when the second bucket's turn comes."""
    asked: list[str] = []

    def says(kind: str, text: str) -> tuple[str, str] | None:
        asked.extend([text] if len(text.split()) == 2 else [])
        return (kind, f"{100 << 20} 0") if len(asked) == 2 and asked[-1] == text else None

    ranks = OtherRank(says)
    s = Sweep(World(), ranks=ranks, cuda=True)
    assert ranks.inside(s.captured).buckets == (16,)
    (line,) = [line for line in lines() if "capture-failed" in line]
    assert "rows=8 kept=1 " in line
    assert "rank 1 has 0.10 GiB free, a capture of 8 rows takes 0.25" in line
