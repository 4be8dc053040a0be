"""Orders to the benchmark's agents in a server's processes: JSON lines over local sockets, one per rank."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

from sglang_dsv4_graphs.bench.errors import BenchError

# The variable that wakes the agent of a serving process; its value is the path of the sockets without rank.
SOCKET_ENV = "DSV4_GRAPHS_BENCH_AGENT"
ANSWER_S = 30.0


def new_socket_path() -> str:
    """A path for sockets: short (the system allows some hundred bytes), in a folder that only this user may enter."""
    short = "/tmp" if os.path.isdir("/tmp") else None
    return str(Path(tempfile.mkdtemp(prefix="dsv4b_", dir=short)) / "agent")


def rank_path(path: str, rank: int) -> str:
    return f"{path}.{rank}"


class Agents:
    """The agents of every rank of one server, asked together; answers are rank 0's."""

    def __init__(self, path: str, ranks: int = 1) -> None:
        self._path = path
        self._ranks = ranks

    def order(self, op: str, *, answer_s: float = ANSWER_S, **values: Any) -> dict[str, Any]:
        """Give one order to every rank and wait for all answers.

        Raises:
            BenchError: no agent listens, one did not answer within ``answer_s`` seconds, or one refused.
        """
        line = json.dumps({"op": op, **values}).encode() + b"\n"
        lines = [self._connect(rank, op, answer_s) for rank in range(self._ranks)]
        try:
            for connection in lines:
                connection.sendall(line)
            answers = [_answer(connection, op, answer_s) for connection in lines]
        finally:
            for connection in lines:
                connection.close()
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise BenchError(f"the agent of rank {rank} could not do {op!r}: {answer['error']}")
        return answers[0]

    def _connect(self, rank: int, op: str, answer_s: float) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(answer_s)
        path = rank_path(self._path, rank)
        try:
            connection.connect(path)
        except OSError as e:
            connection.close()
            raise BenchError(
                f"no agent listens on {path} for {op!r} ({e.strerror}): the plugin did not capture in this server, or "
                "its distribution lacks the entry point bench_agent (reinstall it); the server's log says which"
            ) from e
        return connection


def _answer(connection: socket.socket, op: str, answer_s: float) -> dict[str, Any]:
    """One line, as a value."""
    deadline = time.monotonic() + answer_s
    received = b""
    while not received.endswith(b"\n"):
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
            part = connection.recv(1 << 16)
        except TimeoutError as e:
            raise BenchError(f"the agent did not answer {op!r} within {answer_s:g} s") from e
        if not part:
            raise BenchError(f"the server ended while its agent had the order {op!r}")
        received += part
    value = json.loads(received)
    if not isinstance(value, dict):
        raise BenchError(f"the agent answered {op!r} with {value!r}")
    return value
