"""A recording's segments and breaks from outside: what each break calls, and timers around all of them.

A recording of the engine's breakable graph and one of the tape keep their parts in lists; both are timed by putting
other objects into those lists, so a replay runs the code that it always runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sglang_dsv4_graphs.bench.patches import Call, Patches

# The functions that breaks call, in words; a function that is not here is called by its own name.
KINDS = {
    "_run_store_and_attention": "K store and attention",
    "_run_attention": "attention",
    "_run_sources": "low-ratio sources",
    "_store_live_rows": "K store",
    "deepseek_v4_attention_with_output": "attention",
    "deepseek_v4_low_ratio_sources": "low-ratio sources",
    "tail_kv_store": "K store",
}
_ENGINE_PREFIX = "bcg_"
MERGED = "_run_store_and_attention"


class TimedPart:
    """Stands in a recording's list for a segment or a break; everything but the timed calls is the part's own."""

    def __init__(self, part: Any, calls: dict[str, Call]) -> None:
        self.__dict__.update(calls)
        self.__dict__["_timed_part"] = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_timed_part"], name)


def time_parts(
    recording: Any, patches: Patches, segment: Callable[[Call], Call], broken: Callable[[Call, Call], Call]
) -> None:
    """Put timers around every part of ``recording``.

    Args:
        recording: of CUDA graphs or of the tape.
        patches: takes the timers away again.
        segment: makes a segment's replay a timed one.
        broken: makes a break's call a timed one, from the call to time and the call that tells what it is.

    Raises:
        TypeError: a recording whose parts are not known.
    """
    if hasattr(recording, "_graph"):
        graph = recording._graph
        patches.replace_all(graph._segments, lambda s: TimedPart(s, {"replay": segment(s.replay)}))
        patches.replace_all(graph._break_fns, lambda call: broken(call, call))
    elif hasattr(recording, "_parts"):

        def timed(part: Any) -> TimedPart:
            run = broken(part.run, part.call) if part.part == "break" else segment(part.run)
            return TimedPart(part, {"run": run})

        patches.replace_all(recording._parts, timed)
    else:
        raise TypeError(f"a recording of unknown parts: {type(recording).__name__}")


def break_calls(recording: Any) -> list[Call]:
    """The calls that ``recording``'s breaks make, in order."""
    if hasattr(recording, "_graph"):
        return list(recording._graph._break_fns)
    return [part.call for part in recording._parts if part.part == "break"]


def break_kind(call: Call) -> str:
    """What a break does, in words: from the function that its replay closure holds."""
    name = _name(_called(call)).removeprefix(_ENGINE_PREFIX)
    return KINDS.get(name, name)


def merged_store_owner(recording: Any) -> Any:
    """The object whose method stores K at the start of a merged break, or None if no break is merged."""
    for call in break_calls(recording):
        function = _called(call)
        if getattr(function, "__name__", None) == MERGED:
            return getattr(function, "__self__", None)
    return None


def _called(call: Call) -> Any:
    """The function behind a break: the engine's wrapper closes over it."""
    return next((v for v in _closed_over(call) if callable(v) and hasattr(v, "__name__")), call)


def _closed_over(call: Call) -> Iterator[Any]:
    for cell in getattr(call, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", None) or type(function).__name__)
