"""Servers of one file: at most one is up, and tests that ask for the same one share it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.replay.server import Servers


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers() as servers:
        yield servers
