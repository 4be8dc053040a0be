"""What one server process is to do, as a file that its parent writes and it reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# What a process may do with its server; the others are timed and have their names in ``serve``.
CHECKS = "checks"


@dataclass(frozen=True)
class Job:
    """One server process.

    ``modes`` says what it does with its server; ``groups`` which cases it asks, ``requests`` how often each, ``busy``
    at which prompt lengths the GPU's own time is taken. ``warm`` is the length of an unmeasured first prompt (0: none).
    ``agent`` is the socket of the plugin's agent. ``decode``: tokens compared after each of ``compare``'s cases,
    ``repeats`` answers of each kind.
    """

    variant: str
    round: int
    modes: list[str]
    engine_args: dict[str, Any]
    result: str
    groups: list[str] = field(default_factory=list)
    requests: int = 7
    warm: int = 0
    busy: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    decode: int = 0
    repeats: int = 2
    compare: list[str] = field(default_factory=list)
    agent: str | None = None
    profile: str | None = None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Job:
        return cls(**json.loads(path.read_text()))
