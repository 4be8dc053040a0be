"""The plugin in the engine on a CPU, as a server has it: installed, captured from the engine's startup, serving.

A server costs a model and a sweep, so a file shares one where it can. Only one may be up at a time in a process: the
hooks of two installations would run inside each other.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from sglang_dsv4_graphs.extend import hookimpl

FULL_LAYER, DECODER_REPLAY = "full-layer", "decoder-replay"
# Captures and their first forward cost most of a server: few small graphs, and a chunk no larger than their largest.
# Every comparison clones the pools, so they are no larger than the tests need.
SLOTS = 2048
CHUNK = 256
# Caps as a user sets them; no bucket is above the chunk.
SMALL = {"SGLANG_DSV4_FULL_LAYER_GRAPH_MAX_TOKENS": "256", "SGLANG_DSV4_DECODER_REPLAY_GRAPH_MAX_ROWS": "256"}
FULL_LAYER_CAP, DECODER_REPLAY_CAP = SMALL
# Packages whose modules may have a function of the engine by name.
IMPORT_THE_ENGINE = ("sglang", "sglang_dsv4_graphs", "tests")


class LogLines(logging.Handler):
    """The plugin's log lines."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def having(self, *words: str) -> list[str]:
        """Lines that have every one of ``words``."""
        return [line for line in self.lines if all(word in line for word in words)]


class BackendSupply:
    """The extension that makes the CPU capturable."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    @hookimpl
    def dsv4_graphs_backend(self, device: str) -> Any:
        return self.backend if device == "cpu" else None


class Server:
    """A runner with the plugin on it."""

    def __init__(self, runner: Any, installation: Any, log: LogLines) -> None:
        self.runner = runner
        self.installation = installation
        self.log = log
        self.model = runner.model.model
        self.served = installation.runtime.served(self.model)
        self.judge: Any = None

    @property
    def manager(self) -> Any:
        return self.installation.manager

    def bank(self, name: str) -> Any:
        """The captured bank of that name, or None."""
        return self.manager.get_plugin(name).bank(self.served)

    def kept(self) -> dict[str, Any]:
        """The tensors that steps keep for later steps, by name; of the window's pools without the padding slot 0,
        which takes the K of padding rows and is read by nobody."""
        buffers = self.runner.token_to_kv_pool._buffers()
        named = {name: t[1:] if name.startswith("swa.") else t for name, t in buffers.items()}
        if self.model.engram_hasher is not None:
            named["engram_history"] = self.model.engram_hasher.history
        return named

    def guarded(self, bank: Any) -> list[Any]:
        """The tensors of others whose move ``bank`` would notice: buffers, and weights of its own layers."""
        held = [b.tensor() for b in (*bank.guard._buffers, *bank.guard._weights)]
        return [t for t in held if t is not None]

    def kept_now(self) -> dict[str, Any]:
        """Clones of ``kept``."""
        return {name: t.clone() for name, t in self.kept().items()}

    def state(self) -> tuple[Any, Any]:
        """Everything that steps change."""
        hasher = self.model.engram_hasher
        return self.runner.state(), None if hasher is None else hasher.history.clone()

    def load_state(self, state: tuple[Any, Any]) -> None:
        """Go back to ``state``."""
        self.runner.load_state(state[0])
        if state[1] is not None:
            self.model.engram_hasher.history.copy_(state[1])

    @contextmanager
    def plugin_off(self) -> Iterator[None]:
        """Steps in here are the engine's own."""
        self.served.ready, before = False, self.served.ready
        try:
            yield
        finally:
            self.served.ready = before

    def eager_tail(self, batch: Any) -> Any:
        """The tail rows of ``batch`` without the plugin, from the present state, which is kept."""
        state = self.state()
        with self.plugin_off():
            tail = self.runner.forward(batch).tail.clone()
        self.load_state(state)
        return tail

    def new_counts(self, run: Callable[[], Any]) -> tuple[Any, dict[Any, int], dict[Any, int]]:
        """What ``run`` returns, and the replays and fallbacks that it adds."""
        served = self.served
        replays, fallbacks = served.replays.copy(), served.fallbacks.copy()
        result = run()
        return result, dict(served.replays - replays), dict(served.fallbacks - fallbacks)


def tape_backend(installation: Any, **options: Any) -> Any:
    from sglang_dsv4_graphs.bank.tape import TapeBackend

    return TapeBackend(installation.runtime.engine.current_capture_var, **options)


def store_breaks(installation: Any, **options: Any) -> Any:
    """A tape on a server whose K stores cannot be captured, as with a request window."""
    installation.runtime.engine.stores_in_graph = lambda backend: False
    return tape_backend(installation, **options)


@contextmanager
def patches_where_the_engine_is() -> Iterator[None]:
    """Let the engine's registry look for importers of a function that it patches in few modules.

    It looks through every module of the process for each of some twenty functions, and most are torch's and others'
    that import nothing of the engine. tests/hooks installs with the registry as it is, and checks that.
    """
    from sglang.srt.plugins import hook_registry

    modules = {name: m for name, m in sys.modules.items() if name.partition(".")[0] in IMPORT_THE_ENGINE}
    with patch.object(hook_registry, "sys", SimpleNamespace(modules=modules)):
        yield


@cache
def freeze_imports() -> None:
    """Leave what the engine's modules made to no later garbage collection.

    They live as long as the process, and looking through them takes most of a collection: a sweep has two.
    """
    import sglang.srt.models.deepseek_v4  # noqa: F401

    gc.collect()
    gc.freeze()


@contextmanager
def serving(
    environ: Mapping[str, str] = SMALL,
    *,
    extensions: Sequence[Any] = (),
    make_backend: Callable[[Any], Any] = tape_backend,
    prepare: Callable[[Any], object] | None = None,
    startup: bool = True,
    graphs: bool = True,
    dtype: str = "float32",
    **build: Any,
) -> Iterator[Server]:
    """A server within the block, with ``environ`` as the plugin's settings.

    ``make_backend`` gets the installation; ``prepare`` gets the runner before the engine's startup, which is the
    test's own affair unless ``startup``, and must not stand down unless ``graphs`` is False. float32, so that steps
    with other padding are comparable. ``build`` goes to ``build_runner``.
    """
    import torch

    from sglang_dsv4_graphs.cpu_engine import build_runner
    from sglang_dsv4_graphs.hooks.install import install
    from sglang_dsv4_graphs.log import logger
    from sglang_dsv4_graphs.settings import Settings

    freeze_imports()
    log = LogLines()
    level = logger.level
    logger.addHandler(log)
    logger.setLevel(logging.DEBUG)
    with patches_where_the_engine_is():
        installation = install(Settings.read(environ), third_parties=False)
    assert installation is not None, log.lines
    try:
        installation.manager.register(BackendSupply(make_backend(installation)))
        for extension in extensions:
            installation.manager.register(extension)
        # Collecting as ever: the engine's thaw after a startup would thaw the imports as well.
        ours = {"chunked_prefill_size": CHUNK, "dtype": getattr(torch, dtype), "slots": SLOTS}
        runner = build_runner(**{**ours, "enable_cudagraph_gc": True, **build})
        if prepare is not None:
            prepare(runner)
        server = Server(runner, installation, log)
        if startup:
            runner.startup()
            # Without graphs every step is the engine's own, and every comparison would hold.
            assert server.served.ready or not graphs, server.served.stand_down
        runner.reset_pools()
        yield server
    finally:
        installation.undo()
        logger.removeHandler(log)
        logger.setLevel(level)


class Servers:
    """Brings servers up, one at a time."""

    def __init__(self) -> None:
        self._up: tuple[str | None, Server] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *error: object) -> None:
        self.down()

    def down(self) -> None:
        """Take the present server down."""
        self._up = None
        self._stack.close()

    def shared(self, name: str, *args: Any, **kwargs: Any) -> Server:
        """The server of that name if it is still up, else a new one by ``serving``'s arguments."""
        if self._up is None or self._up[0] != name:
            server = self.own(*args, **kwargs)
            self._up = (name, server)
        assert self._up is not None
        return self._up[1]

    def own(self, *args: Any, **kwargs: Any) -> Server:
        """A new server by ``serving``'s arguments, up until somebody asks for another."""
        self.down()
        server = self._stack.enter_context(serving(*args, **kwargs))
        self._up = (None, server)
        return server
