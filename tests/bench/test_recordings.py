"""Timers on recordings: of the engine's breakable graphs (their shape here) as of the tape, and all taken back."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dsv4_graphs.bench.patches import Patches
from sglang_dsv4_graphs.bench.recordings import break_kind, merged_store_owner, time_parts


class Breaks:
    """Breaks by the names that ours have."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def _run_store_and_attention(self, *args: Any) -> None:
        self._store_live_rows()
        self._log.append("attend")

    def _run_sources(self, inner: Callable[..., Any], *args: Any) -> None:
        inner(*args)

    def _store_live_rows(self) -> None:
        self._log.append("store")


def sources(log: list[str]) -> None:
    log.append("sources")


def replay_function(captured_inner: Any, *captured_args: Any) -> Callable[[], Any]:
    """What the engine's wrapper appends for a break."""
    captured_kwargs: dict[str, Any] = {}

    def replay_fn() -> Any:
        return captured_inner(*captured_args, **captured_kwargs)

    return replay_fn


class Segment:
    def __init__(self, log: list[str], number: int) -> None:
        self.log, self.number = log, number

    def replay(self) -> None:
        self.log.append(f"segment {self.number}")


def graph_recording(log: list[str]) -> Any:
    breaks = Breaks(log)
    calls = [
        replay_function(breaks._run_sources, sources, log),
        replay_function(breaks._run_store_and_attention, "x"),
    ]
    return SimpleNamespace(_graph=SimpleNamespace(_segments=[Segment(log, i) for i in range(3)], _break_fns=calls))


def replay(recording: Any) -> None:
    """As the engine's graph replays: its lists, in turn."""
    graph = recording._graph
    for i, segment in enumerate(graph._segments):
        segment.replay()
        if i < len(graph._break_fns):
            graph._break_fns[i]()


def test_every_part_is_timed_in_order_and_given_back() -> None:
    log: list[str] = []
    recording = graph_recording(log)
    graph = recording._graph
    before = (list(graph._segments), list(graph._break_fns))
    replay(recording)
    plain, seen = list(log), []

    def noted(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run() -> Any:
            seen.append(what)
            return call()

        return run

    patches = Patches()
    lists = (graph._segments, graph._break_fns)
    time_parts(recording, patches, lambda c: noted("segment", c), lambda c, told: noted(break_kind(told), c))
    log.clear()
    replay(recording)
    assert log == plain == ["segment 0", "sources", "segment 1", "store", "attend", "segment 2"]
    assert seen == ["segment", "low-ratio sources", "segment", "K store and attention", "segment"]
    assert graph._segments[1].number == 1
    patches.undo()
    # The lists themselves stay: whoever holds one sees its parts again.
    assert (graph._segments, graph._break_fns) == before
    assert lists[0] is graph._segments
    assert lists[1] is graph._break_fns


def test_merged_breaks_tell_whose_store_they_run() -> None:
    log: list[str] = []
    owner = merged_store_owner(graph_recording(log))
    assert isinstance(owner, Breaks)
    single = SimpleNamespace(
        _graph=SimpleNamespace(_segments=[], _break_fns=[replay_function(Breaks(log)._run_sources, print)])
    )
    assert merged_store_owner(single) is None


def test_a_break_of_unknown_function_keeps_its_name() -> None:
    def bcg_new_thing() -> None: ...

    assert break_kind(replay_function(bcg_new_thing)) == "new_thing"
    assert break_kind(lambda: None) == "<lambda>"


def test_an_unknown_recording_is_refused() -> None:
    with pytest.raises(TypeError, match="a recording of unknown parts: SimpleNamespace"):
        time_parts(SimpleNamespace(), Patches(), lambda c: c, lambda c, told: c)


def test_patches_put_back_what_was_there_latest_first() -> None:
    class Owner:
        def work(self) -> int:
            return 1

    owner = Owner()
    patches = Patches()
    patches.wrap(owner, "work", lambda call: lambda: call() + 10)
    patches.wrap(owner, "work", lambda call: lambda: call() * 2)
    assert owner.work() == 22
    patches.undo()
    assert vars(owner) == {}
    assert owner.work() == 1
    with pytest.raises(AttributeError):
        patches.wrap(owner, "play", lambda call: call)
