"""What a process must have before the engine's model can be built: published arguments and a process group.

The engine reads its configuration and its ranks from process-wide state that its launcher sets. Here the same
state is set for ``device="cpu"`` and gloo, in a world of one or, for tests of what all ranks must decide
alike, of several processes.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class World:
    """This process's place among the ranks; rank 0 listens on ``port`` (0, in a world of one: any)."""

    rank: int = 0
    size: int = 1
    port: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank} is not in a world of {self.size}")
        if self.size > 1 and self.port == 0:
            raise ValueError("a world of several processes needs a port that all of them know")


def free_port() -> int:
    """A TCP port that nobody listens on just now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def init_process(model_dir: Path, world: World, **server_args: Any) -> Any:
    """Publish the engine's arguments for ``model_dir`` and join the process group, once per process.

    A later call publishes again (the engine takes the last) and keeps the group.

    Returns:
        The engine's ``ServerArgs``.

    Raises:
        ValueError: if the process already belongs to a world of another size.
    """
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs
    from torch import distributed

    args = ServerArgs(model_path=str(model_dir), device="cpu", tp_size=world.size, **server_args)
    publish(args, role="test", ranks=SpawnRanks(world_rank=world.rank))
    if distributed.is_initialized():
        if distributed.get_world_size() != world.size:
            raise ValueError(f"this process is in a world of {distributed.get_world_size()}, not {world.size}")
        return args
    init_distributed_environment(
        world_size=world.size,
        rank=world.rank,
        local_rank=world.rank,
        distributed_init_method=f"tcp://127.0.0.1:{world.port or free_port()}",
        backend="gloo",
    )
    initialize_model_parallel(backend="gloo")
    return args
