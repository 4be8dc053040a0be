"""What tests of the bank share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The plugin's log lines so far."""
    caplog.set_level(logging.DEBUG, logger="sglang_dsv4_graphs")
    return lambda: [r.getMessage() for r in caplog.records if r.getMessage().startswith("dsv4-graphs:")]


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random rows in every run."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(3)
