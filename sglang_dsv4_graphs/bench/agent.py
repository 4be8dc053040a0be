"""The benchmark's agent, an extension of the plugin: asleep unless a benchmark woke it.

Declared under the entry-point group ``sglang_dsv4_graphs``, so it is imported in every server that the plugin
installs in. Without ``DSV4_GRAPHS_BENCH_AGENT`` in the environment it does nothing and imports nothing more.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from sglang_dsv4_graphs.bench.orders import SOCKET_ENV
from sglang_dsv4_graphs.extend import hookimpl

if TYPE_CHECKING:
    from sglang_dsv4_graphs.bank.sweep import Startup
    from sglang_dsv4_graphs.bench.listen import Listener

_listeners: list[Listener] = []


@hookimpl(trylast=True)
def dsv4_graphs_startup(startup: Startup) -> None:
    """Listen for orders, once every bank has captured."""
    path = os.environ.get(SOCKET_ENV)
    if not path:
        return
    from sglang_dsv4_graphs.bench.listen import Listener

    _listeners.append(Listener(path, startup))


@hookimpl
def dsv4_graphs_shutdown() -> None:
    while _listeners:
        _listeners.pop().close()
