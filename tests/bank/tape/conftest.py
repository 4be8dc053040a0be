"""Backends to test, and the two break wrappers that a tape meets: the engine's and one of our own."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest

ENGINE_BREAKS = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"


@pytest.fixture
def engine_breaks() -> Any:
    """The engine's module with its break wrapper and context variable."""
    return pytest.importorskip(ENGINE_BREAKS)


@pytest.fixture
def capture_var() -> ContextVar[Any]:
    return ContextVar("capture", default=None)


@pytest.fixture
def backend(capture_var: ContextVar[Any]) -> Any:
    from sglang_dsv4_graphs.bank.tape import TapeBackend

    return TapeBackend(capture_var, poison=True)


def breaking(capture_var: ContextVar[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A break wrapper as the engine's is, for contexts of our own."""

    def decorate(inner: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            capture = capture_var.get()
            if capture is None:
                return inner(*args, **kwargs)
            capture._end_current_segment()
            output = inner(*args, **kwargs)

            def replay() -> None:
                again = inner(*args, **kwargs)
                if hasattr(output, "copy_"):
                    output.copy_(again)

            capture.cuda_graph._break_fns.append(replay)
            capture._begin_new_segment()
            return output

        return wrapper

    return decorate


@pytest.fixture
def as_break(capture_var: ContextVar[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return breaking(capture_var)


@pytest.fixture(params=["own", pytest.param("engine", marks=pytest.mark.engine)])
def breaks(request: pytest.FixtureRequest) -> SimpleNamespace:
    """A context variable with the wrapper that looks into it: one of our own, and the engine's."""
    if request.param == "engine":
        module = request.getfixturevalue("engine_breaks")
        return SimpleNamespace(
            var=module._current_capture_var, wrap=module.eager_on_graph, graph_break=module.break_graph
        )
    var: ContextVar[Any] = ContextVar("capture", default=None)
    wrap = breaking(var)
    return SimpleNamespace(var=var, wrap=wrap, graph_break=wrap(lambda: None))
