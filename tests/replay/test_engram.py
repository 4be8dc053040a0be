"""Engram: hashes of a request's last tokens, which every step extends, feed some layers from a table.

The hash reads positions that a replay does not pad to its bucket (docs/notes/engram.md): such a model stays eager, and
every step is the engine's.
"""

from __future__ import annotations

import pytest

from tests.replay.judge import Judge
from tests.replay.models import fill_engram, with_engram
from tests.replay.server import SMALL, Servers
from tests.replay.story import Story

pytestmark = pytest.mark.engine

# 0.5.22's late layers begin at 5 in this model, 0.5.23's at 4, and 4 cannot carry one.
BEFORE_THE_TAIL, ACROSS = (1, 3), (1, 5)


@pytest.mark.parametrize("layers", [BEFORE_THE_TAIL, ACROSS])
def test_a_model_with_engram_stays_eager(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, layers: tuple[int, ...]
) -> None:
    with_engram(monkeypatch, layers)
    server = servers.own(SMALL, prepare=fill_engram, graphs=False)
    assert server.log.having("eager reason=", "Engram")
    story = Story(server, Judge.of(server))
    for step in ({"a": 60}, {"a": 1}, {"a": 2, "b": 1}):
        story.run(story.batch(step))
    assert not server.served.replays
