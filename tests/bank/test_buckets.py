"""The ladders: every edge of the buckets that the settings, the chunk and the server's limits ask for."""

from __future__ import annotations

import pytest

from sglang_dsv4_graphs.bank.buckets import (
    bucket_for,
    decoder_replay_buckets,
    dummy_lengths,
    full_layer_buckets,
    rehearsal_rows,
)

MANY = 10**9


def ladder(cap: int) -> tuple[int, ...]:
    return (64, 128, *range(256, cap + 1, 256))


@pytest.mark.parametrize(
    ("setting", "chunk", "buckets"),
    [
        (-1, 1024, (64, 128, 256, 512, 768, 1024)),
        (-1, 8192, ladder(8192)),
        (-1, 16384, ladder(8192)),  # the largest that -1 asks for
        (-1, None, ladder(8192)),  # chunked prefill off
        (-1, 0, ladder(8192)),
        (-1, -1, ladder(8192)),
        (-1, 2000, (*ladder(1792), 2000)),  # a chunk that is no multiple is the commonest step
        (0, 8192, ()),
        (1024, 8192, ladder(1024)),
        (1024, 512, ladder(1024)),  # the setting stands, whatever the chunk is
        (16384, 8192, ladder(16384)),
        (300, 8192, (64, 128, 256, 300)),
        (1, 8192, (1,)),
        (63, 8192, (63,)),
        (64, 8192, (64,)),
        (100, 8192, (64, 100)),
        (128, 8192, (64, 128)),
        (255, 8192, (64, 128, 255)),
        (256, 8192, (64, 128, 256)),
        (257, 8192, (64, 128, 256, 257)),
    ],
)
def test_full_layer(setting: int, chunk: int | None, buckets: tuple[int, ...]) -> None:
    assert full_layer_buckets(setting, chunk, MANY) == buckets


@pytest.mark.parametrize(("limit", "buckets"), [(0, ()), (50, (50,)), (600, (64, 128, 256, 512, 600))])
def test_full_layer_is_limited_by_what_dummy_requests_can_hold(limit: int, buckets: tuple[int, ...]) -> None:
    assert full_layer_buckets(-1, 8192, limit) == buckets
    assert full_layer_buckets(8192, 8192, limit) == buckets


def test_a_full_ladder_is_34_graphs() -> None:
    assert len(full_layer_buckets(-1, 8192, MANY)) == 34


@pytest.mark.parametrize(
    ("rows", "limit", "buckets"),
    [
        (2048, MANY, tuple(range(128, 2049, 128))),
        (0, MANY, ()),
        (127, MANY, ()),
        (128, MANY, (128,)),
        (300, MANY, (128, 256)),
        (2048, 300, (128, 256)),
        (2048, 100, ()),
    ],
)
def test_decoder_replay(rows: int, limit: int, buckets: tuple[int, ...]) -> None:
    assert decoder_replay_buckets(rows, limit) == buckets


@pytest.mark.parametrize(
    ("rows", "bucket"),
    [(-1, None), (0, None), (1, 64), (63, 64), (64, 64), (65, 128), (128, 128), (129, 256), (256, 256), (257, None)],
)
def test_the_bucket_of_a_step(rows: int, bucket: int | None) -> None:
    assert bucket_for(rows, (64, 128, 256)) == bucket
    assert bucket_for(rows, ()) is None


@pytest.mark.parametrize(
    ("rows", "longest", "lengths"),
    [(1, 128, [1]), (128, 128, [128]), (129, 128, [128, 1]), (384, 128, [128, 128, 128]), (5, 100, [5])],
)
def test_dummy_requests(rows: int, longest: int, lengths: list[int]) -> None:
    assert dummy_lengths(rows, longest) == lengths


@pytest.mark.parametrize(
    ("buckets", "most", "rows"),
    [
        ((64, 128, 2560), 9999, (3, 128, 1024, 2560)),
        ((64, 512), 9999, (3, 128, 512)),
        ((64,), 9999, (3, 64, 128)),
        ((), 9999, (3, 128)),
        ((64, 2560), 600, (3, 128, 600)),
        ((64, 128), 100, (3, 100)),
        ((64,), 2, (2,)),
    ],
)
def test_rehearsal_has_every_kind_of_step(buckets, most, rows):
    assert rehearsal_rows(buckets, most) == rows
