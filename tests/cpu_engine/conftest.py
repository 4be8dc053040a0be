"""One model per process and kind; every test starts with empty pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def built_runners() -> dict[tuple[bool, str], Any]:
    return {}


@pytest.fixture
def make_runner(built_runners: dict[tuple[bool, str], Any]) -> Iterator[Callable[..., Any]]:
    """``make_runner(bounded_replay, dtype_name)``: built on first use, then reused with empty pools."""
    import torch

    from sglang_dsv4_graphs.cpu_engine import build_runner

    used = []

    def make(bounded_replay: bool = True, dtype: str = "float32") -> Any:
        key = (bounded_replay, dtype)
        if key not in built_runners:
            built_runners[key] = build_runner(bounded_replay, dtype=getattr(torch, dtype))
        runner = built_runners[key]
        runner.reset_pools()
        used.append(runner)
        return runner

    yield make
    for runner in used:
        runner.reset_pools()


@pytest.fixture
def runner(make_runner: Callable[..., Any]) -> Any:
    """Bounded replay, float32: groupings of rows are comparable to a few rounding steps."""
    return make_runner()
