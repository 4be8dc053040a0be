"""Sockets of agents, in folders that go when the tests are over."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_dsv4_graphs.bench.orders import new_socket_path


def make_path() -> Iterator[str]:
    path = new_socket_path()
    yield path
    shutil.rmtree(Path(path).parent)


# One for a test, one for a file's server.
socket_path = pytest.fixture(make_path, name="socket_path")
server_path = pytest.fixture(make_path, name="server_path", scope="module")
