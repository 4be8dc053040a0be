"""All ranks decide alike: what is captured and what replays follows from what every rank reports.

Under tensor parallelism a rank that replays while another runs eagerly can hang or corrupt. So the startup runs in
*sections* (``together``), which every rank leaves the same way. Inside them the ranks meet at the same points
(``rendezvous``), and each meeting is one exchange: every rank sends every other one message and takes one from it. A
rank that fails answers the meeting its peers wait in with its failure, and all of them learn of it in that exchange:
nobody waits for a rank that will not come, and nobody sends a second message for a section that is over.

Messages go through a group of our own. An expired wait closes connections, and the engine still needs those of its
own CPU group to serve eagerly.

Does not rescue a GPU collective: a rank that fails between two meetings leaves its peers' kernels waiting for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from sglang_dsv4_graphs.bank.swap import swap

# Longer by far than the slowest startup step that was measured (first-use kernel compilation: 60 s). A rank that ended
# takes its connections with it, so only one that is stuck makes others wait so long.
WAIT = timedelta(seconds=600)
# In a step: twice that compilation, and over well before the engine's watchdog (300 s) ends the server unexplained.
STEP_WAIT = timedelta(seconds=120)
# A rank that comes later than this share of the wait holds that others have given it up, instead of racing with them.
LATE = 0.9
_SEPARATOR = "\x1f"


class RankError(RuntimeError):
    """Ranks did not come to the same decision point within the wait; they cannot decide alike any more."""


class PeerFailed(RuntimeError):
    """A section is over because another rank failed; names the rank and what it met."""


@dataclass(frozen=True)
class Failure:
    """Why a section is over on every rank: the lowest rank that failed, and what it met."""

    rank: int
    why: str
    # What this rank itself raised, if it did.
    error: Exception | None = None

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.why}"


class _Message(NamedTuple):
    """``kind``: meet, done or failed; ``depth``: of the section that it concerns; ``place``: that section's name."""

    kind: str
    depth: int
    place: str
    text: str

    def packed(self) -> str:
        return _SEPARATOR.join(map(str, self))

    @classmethod
    def unpacked(cls, text: str) -> _Message:
        kind, depth, place, rest = text.split(_SEPARATOR, 3)
        return cls(kind, int(depth), place, rest)


def brief(error: BaseException) -> str:
    """An error in one line: its type, and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


class Ranks:
    """The ranks of one tensor-parallel group; ``group`` is a CPU (gloo) process group of ours, None for one rank."""

    def __init__(
        self, rank: int, size: int, group: Any = None, wait: timedelta = WAIT, step_wait: timedelta = STEP_WAIT
    ) -> None:
        self.rank, self.size = rank, size
        self._group = group
        self._wait, self._step_wait = wait, step_wait
        self._sections: list[str] = []
        # (depth of the section that is over, why); cleared when that section is left.
        self._over: tuple[int, Failure] | None = None
        self._broken: str | None = None
        self._met = time.monotonic()

    @classmethod
    def of(cls, rank: int, members: Sequence[int]) -> Ranks:
        """Rank ``rank`` of the processes ``members`` (their numbers in the world); all of them must call this.

        Only they: the group is named after them, so a process that stays away does not shift the names of groups that
        the engine makes later.

        Raises:
            RuntimeError: if a member does not come within the wait.
        """
        if len(members) == 1:
            return cls(0, 1)
        # use_local_synchronization: only members call, and torch's group counter stays as it is.
        group = dist.new_group(list(members), backend="gloo", timeout=WAIT, use_local_synchronization=True)
        return cls(rank, len(members), group)

    # In a step

    def who(self, problem: bool) -> int | None:
        """The highest rank that has a problem, or None; every rank must ask at the same point of the same step.

        Raises:
            RankError: if a rank does not come within the step's wait. This step cannot be decided alike then.
        """
        if self.size == 1:
            return self.rank if problem else None
        flag = torch.tensor([self.rank + 1 if problem else 0], dtype=torch.int32, device="cpu")
        try:
            work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
            work.wait(self._step_wait)
        except RuntimeError as e:
            waited = f"rank {self.rank} waited up to {self._step_wait.total_seconds():g} s in a prefill step"
            raise RankError(
                f"{waited} for the other ranks to say whether a guarded buffer moved: {brief(e)}; "
                "a rank that is stuck or gone is named by its own log"
            ) from e
        highest = int(flag.item())
        return highest - 1 if highest else None

    # At startup

    def together(self, what: str, part: Callable[[], object]) -> Failure | None:
        """Run ``part`` on every rank; None if all of them came to its end, else why it is over on all of them.

        Sections nest; ``what`` must be the same text on every rank.

        Raises:
            RankError: ranks have lost each other; nothing can be agreed any more.
            PeerFailed: another rank left the section around this one.
        """
        self._sections.append(what)
        depth = len(self._sections)
        own: Exception | None = None
        try:
            if depth == 1:
                self._met = time.monotonic()  # what lies between two startup parts is the engine's own time
                self.rendezvous()
            part()
            if self._over is None:
                self._exchange("done")
        except Exception as e:  # whatever the part raises, the others must not wait for it
            own = e
            self._tell(e)
        finally:
            self._sections.pop()
        if self._over is None:
            return None
        over, failure = self._over
        if over < depth:
            raise PeerFailed(str(failure)) from own
        self._over = None
        return Failure(failure.rank, failure.why, None if isinstance(own, PeerFailed) else own)

    def rendezvous(self, note: str = "") -> list[str]:
        """Meet all ranks inside a section; returns everybody's note, in rank order.

        Raises:
            PeerFailed: another rank has failed in this section or one around it.
            RankError: a rank did not come within the wait.
        """
        if self.size == 1:
            return [note]
        if not self._sections:
            raise RuntimeError("ranks meet inside a section: call together() first")
        notes = [] if self._over else self._exchange("meet", note)
        if self._over:
            raise PeerFailed(str(self._over[1]))
        return notes

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others of an error in here at once, before anything is left that they may wait in."""
        try:
            yield
        except Exception as e:
            if self.size > 1:
                self._tell(e)
            raise

    def _tell(self, error: Exception) -> None:
        if self._broken is not None:
            raise RankError(self._broken) from error
        if self._over is None:
            self._exchange("failed", brief(error))

    def _exchange(self, kind: str, text: str = "") -> list[str]:
        """One exchange; sets ``_over`` alike on all ranks, since all of them see the same messages."""
        own = _Message(kind, len(self._sections), self._sections[-1], text)
        messages = [_Message.unpacked(m) for m in self.swap(own.packed())]
        failed = [(m.depth, r) for r, m in enumerate(messages) if m.kind == "failed"]
        if failed:
            depth, rank = min(failed)
            self._over = depth, Failure(rank, messages[rank].text)
        elif len({m[:3] for m in messages}) > 1:
            # No error of anybody, yet they are at different points: nothing after this would be alike.
            places = ", ".join(f"rank {r} at {m.kind} of {m.place!r}" for r, m in enumerate(messages))
            self._over = 1, Failure(0, f"ranks took different ways: {places}")
        return [m.text for m in messages]

    def swap(self, message: str) -> list[str]:
        """Every rank's message, in rank order.

        Raises:
            RankError: a rank did not come within the wait, or this one comes so late that others gave it up.
        """
        if self.size == 1:
            return [message]
        if self._broken is None:
            wait, late = self._wait.total_seconds(), time.monotonic() - self._met
            if late > LATE * wait:
                self._broken = f"rank {self.rank} comes after {late:.1f} s: others wait {wait:g} s and may have left"
        if self._broken is not None:
            raise RankError(self._broken)
        received, missing = swap(message, self.rank, self.size, self._group, self._wait)
        if missing:
            waited = f"rank {self.rank} waited {self._wait.total_seconds():g} s"
            self._broken = f"{waited}: nothing came from {', '.join(f'rank {r}' for r in missing)}"
            raise RankError(self._broken)
        self._met = time.monotonic()
        return received
