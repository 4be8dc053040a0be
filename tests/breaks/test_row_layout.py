"""Rows of requests, from the host's numbers."""

from __future__ import annotations

import pytest

from sglang_dsv4_graphs.breaks.row_layout import RequestRows, request_rows, selects_everything


def test_rows_and_columns_of_each_request():
    found = request_rows([3, 1, 4], [10, 7, 4], 2, 8)
    assert found == [RequestRows(0, 0, 3, 5, 0), RequestRows(1, 3, 4, 3, 5), RequestRows(2, 4, 8, 2, 8)]


def test_a_request_without_rows_takes_columns_only():
    found = request_rows([2, 0, 1], [4, 6, 3], 1, 3)
    assert found == [RequestRows(0, 0, 2, 4, 0), RequestRows(2, 2, 3, 3, 10)]


@pytest.mark.parametrize(
    ("rows_per_request", "seq_lens", "rows"),
    [(None, [4], 4), ([4], None, 4), ([4], [4], 5), ([2, 2], [4], 4)],
    ids=["no rows", "no lengths", "other number of rows", "other number of requests"],
)
def test_numbers_that_do_not_describe_the_rows(rows_per_request, seq_lens, rows):
    assert request_rows(rows_per_request, seq_lens, 1, rows) is None


@pytest.mark.parametrize(("longest", "all_of_it"), [(512, True), (513, True), (1025, True), (1026, False)])
def test_short_contexts_select_everything(longest, all_of_it):
    layout = request_rows([1, 1], [7, longest], 2, 2)
    assert selects_everything(layout, 512) is all_of_it
