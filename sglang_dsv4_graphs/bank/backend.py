"""The contract of a graph backend: what turns a function on fixed tensors into something replayed.

A bank must not care how its graphs are made: on a GPU they are the engine's breakable CUDA graphs, in tests
and in the demo a tape that re-runs tensor operations on the CPU. Both keep the rules of a CUDA graph, so that
code which is right on one is right on the other:

- *Addresses are fixed.* A replay reads and writes the memory that the recording read and wrote. New values
  reach it by being copied into the tensors that the body read.
- *Python runs once.* Branches, shapes and Python numbers of the recorded run are part of the recording.
- *Nothing is read on the host* between two breaks: no ``item()``, ``tolist()``, ``numpy()``, no shape that
  depends on data, no new random numbers. That is a ``CaptureError``.
- *Breaks are ordinary code.* A function that the engine wrapped as a break ends the segment, runs eagerly
  with the arguments of the recorded run, and starts the next segment; it may read live state and do all of
  the above. What it returns is copied into what it returned when recorded, so its shapes must not change.
  Breaks do not nest.
- *The recording owns what its segments allocate, and nothing else.* Whoever records keeps alive every other
  tensor that the body reads or hands to a break; other recordings may reuse the memory between two replays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Literal

import torch

Body = Callable[[], list[torch.Tensor | None]]


class CaptureError(RuntimeError):
    """A body could not be recorded; nothing of the recording is left behind."""


class ReplayFault(RuntimeError):
    """A replay failed in a known place; the original error is the cause.

    ``part`` and ``index`` say which segment or break (counted from 0; break i comes after segment i),
    ``name`` where it comes from.
    """

    def __init__(self, part: Literal["segment", "break"], index: int, name: str, why: object = "") -> None:
        super().__init__(f"replay failed in {part} {index} ({name}){f': {why}' if str(why) else ''}")
        self.part = part
        self.index = index
        self.name = name


class Recording(ABC):
    """A recorded body: segments with breaks between them.

    ``segments`` is always ``breaks + 1``; segments may be empty. ``outputs`` are the tensors that the body
    returned, the same objects for the recording's life: each replay overwrites them, so clone what must last.
    Not thread-safe, and does not check that foreign memory is still valid (``guard`` does).
    """

    segments: int
    breaks: int
    outputs: list[torch.Tensor | None]

    @abstractmethod
    def replay(self) -> None:
        """Run every segment and break in order on what the recorded tensors hold now."""

    @abstractmethod
    def replay_debug(self) -> None:
        """``replay``, each part finished before the next.

        Raises:
            ReplayFault: from the original error, naming the segment or break.
        """


class GraphBackend(ABC):
    """Makes recordings. ``name`` is what logs call it."""

    name: ClassVar[str]

    @abstractmethod
    def record(self, body: Body, *, warmups: int = 2) -> Recording:
        """Run ``body`` eagerly ``warmups`` times, then record one more run.

        The warm-ups let lazily made workspaces and caches come to be before the recording would own them.
        They and the recorded run have the body's side effects (KV writes), with no gradients.

        Raises:
            CaptureError: ``body`` breaks the rules of this module or a recording is already under way. Errors
                of ``body`` itself are raised unchanged. All state is as before either way.
        """

    def scratch(self) -> GraphBackend:
        """A backend for recordings that are thrown away: their memory comes back when they go."""
        return self

    def apart(self) -> GraphBackend:
        """A backend whose recordings share no memory with this one's.

        For what replays inside a break of another recording: memory that the other's capture freed may belong to
        tensors that are alive across that break.
        """
        return self

    def settle(self) -> None:
        """To be called when recordings have gone: make whole what they shared with those that stay."""
        return
