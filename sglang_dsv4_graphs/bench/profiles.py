"""Host profiles of the thread that serves, as text files: of many small replayed steps, and of one request."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sglang_dsv4_graphs.bench.cases import tokens

if TYPE_CHECKING:
    from sglang_dsv4_graphs.bench.serve import Session

FIRST_TOKENS = 128
STEPS = 40


def profile_steps(session: Session, path: str) -> None:
    """Host profile of small replayed steps on the thread that serves, as text."""
    session.order("profile-start")
    for i in range(STEPS):
        session.server.ask([tokens(FIRST_TOKENS, ("profile", i))])
    session.order("profile-stop")
    session.server.ask([tokens(FIRST_TOKENS, "the step in which it ends")])
    session.order("result", into=path)


def profile_one(session: Session, seed: str, path: str) -> None:
    """Host profile of one request from its way in to its way out, as text.

    A profile begins and ends inside forwards, so a request of three tokens comes before it and another one after it.
    The profiles of the first request and of a later one differ in what only the first has to do.
    """
    session.order("profile-start")
    session.server.ask([tokens(3, ("before", seed))])
    session.result[f"profiled_{seed}_ms"] = session.server.ask([tokens(FIRST_TOKENS, ("profiled", seed))]).ms
    session.order("profile-stop")
    session.server.ask([tokens(3, ("after", seed))])
    session.order("result", into=path)


def beside(path: str, what: str) -> str:
    """``profile-1.txt`` and ``first`` as ``profile-1-first.txt``."""
    found = Path(path)
    return str(found.with_name(f"{found.stem}-{what}{found.suffix}"))
