"""Orders to agents: what a client says when nobody listens, answers or knows the order; and an agent that sleeps."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sglang_dsv4_graphs.bench.errors import BenchError
from sglang_dsv4_graphs.bench.orders import SOCKET_ENV, Agents, rank_path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_asleep_it_does_nothing_and_imports_nothing() -> None:
    code = (
        "import sys; from sglang_dsv4_graphs.bench import agent; agent.dsv4_graphs_startup(startup=None);"
        "heavy = ('torch', 'sglang', 'sglang_dsv4_graphs.bench.listen');"
        "print([m for m in heavy if m in sys.modules], agent._listeners)"
    )
    environment = {name: value for name, value in os.environ.items() if name != SOCKET_ENV}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.stdout.strip() == "[] []", done.stderr


def test_no_agent_is_an_error_that_says_why(socket_path: str) -> None:
    with pytest.raises(BenchError, match=r"no agent listens on .*\.0 for 'on'.*the plugin did not capture"):
        Agents(socket_path).order("on")


def answering(path: str, rank: int, answer: str | None) -> list[dict[str, object]]:
    """An agent that answers one order with a line, or hangs up on None; what it was ordered."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(rank_path(path, rank))
    server.listen(1)
    orders: list[dict[str, object]] = []

    def serve() -> None:
        connection, _ = server.accept()
        with connection, server:
            orders.append(json.loads(connection.makefile("rb").readline()))
            if answer is not None:
                connection.sendall(answer.encode() + b"\n")

    threading.Thread(target=serve, daemon=True).start()
    return orders


def test_every_rank_gets_the_order_and_rank_0_answers(socket_path: str) -> None:
    orders = [answering(socket_path, rank, json.dumps({"value": rank})) for rank in (0, 1)]
    assert Agents(socket_path, ranks=2).order("checks", into="x") == {"value": 0}
    assert orders == [[{"op": "checks", "into": "x"}]] * 2


def test_a_rank_that_refuses_is_named(socket_path: str) -> None:
    answering(socket_path, 0, "{}")
    answering(socket_path, 1, json.dumps({"error": "ValueError: no"}))
    with pytest.raises(BenchError, match="the agent of rank 1 could not do 'off': ValueError: no"):
        Agents(socket_path, ranks=2).order("off")


def test_a_server_that_ends_or_is_silent_is_told_apart(socket_path: str) -> None:
    answering(socket_path, 0, None)
    with pytest.raises(BenchError, match="the server ended while its agent had the order 'on'"):
        Agents(socket_path).order("on")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(rank_path(socket_path, 7))
        silent.listen(1)
        os.rename(rank_path(socket_path, 7), rank_path(socket_path, 0))
        with pytest.raises(BenchError, match=r"did not answer 'on' within 0\.2 s"):
            Agents(socket_path).order("on", answer_s=0.2)
