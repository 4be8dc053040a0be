"""What the patches call: from the engine's functions to the plugin's own hooks.

One instance per installation. It keeps the models that were built in this process and starts the sweep when the
engine has captured its own graphs. An exception that leaves here would end the engine's step or start, so only
strict mode lets one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import pluggy

from sglang_dsv4_graphs.bank.decide import server_reason
from sglang_dsv4_graphs.bank.served import ServedModel, Step
from sglang_dsv4_graphs.bank.sweep import Startup
from sglang_dsv4_graphs.bank.views import Takeover
from sglang_dsv4_graphs.engine.api import Engine
from sglang_dsv4_graphs.hooks.start import begin, finish, server_facts
from sglang_dsv4_graphs.log import RankLog, logger
from sglang_dsv4_graphs.settings import Settings


class Runtime:
    """The plugin in one process."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        manager: pluggy.PluginManager,
        log: RankLog,
        in_prefill_graph: Callable[[Step], list[Takeover]] | None = None,
    ) -> None:
        self.engine = engine
        self._in_prefill_graph = in_prefill_graph
        self.settings = settings
        self.manager = manager
        self.log = log
        self._begun: WeakKeyDictionary[ServedModel, Startup] = WeakKeyDictionary()
        self._served: WeakKeyDictionary[Any, ServedModel] = WeakKeyDictionary()

    def served(self, model: Any) -> ServedModel | None:
        """What is known of a model built in this process."""
        return self._served.get(model)

    def after_model_built(self, result: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        """AFTER ``DeepseekV4Model.__init__``."""
        served = ServedModel(self.engine, model, self.settings, self.manager, self.log)
        served.in_prefill_graph = self._in_prefill_graph
        self._served[model] = served
        # The engine's model must come to be whatever an extension does.
        self._guarded(served, partial(self.manager.hook.dsv4_graphs_model_built, served=served))

    def around_layer_loop(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """AROUND the model's layer loop."""
        try:
            served = self._served.get(model)
        except TypeError:  # a view of ours, which cannot be a key: the loop is already inside a range
            served = None
        if served is None:
            return original(model, *args, **kwargs)
        return served.run_loop(original, *args, **kwargs)

    def before_captures(self, *, model_runner: Any, **_: Any) -> None:
        """BEFORE the engine captures prefill graphs: a workspace that grew later would strand what they captured."""
        for served in self._pending(model_runner):
            self._guarded(served, partial(self._begin, served, model_runner))

    def before_startup(self, model_runner: Any) -> None:
        """BEFORE the engine's finalisation of its own captures."""
        for served in self._pending(model_runner):
            if served not in self._begun:
                self._guarded(served, partial(self._begin, served, model_runner))
            if served in self._begun:
                self._guarded(served, partial(finish, self._begun.pop(served), model_runner, self.manager))

    def _pending(self, runner: Any) -> list[ServedModel]:
        """Models of this runner whose startup is not decided yet; a draft's are never ours."""
        if runner.is_draft_worker:
            return []
        self.log.rank = self.engine.get_parallel().tp_rank
        found = (self._served.get(module) for module in runner.model.modules())
        return [s for s in found if s is not None and not s.ready and s.stand_down is None]

    def _begin(self, served: ServedModel, runner: Any) -> None:
        """Decide whether this server is ours, and grow."""
        facts = server_facts(self.engine, runner, served.model)
        served.stand_down = server_reason(facts, capturable_devices=self._devices(runner))
        if served.stand_down is None:
            self._begun[served] = begin(self.engine, served, runner, self.manager)

    def _guarded(self, served: ServedModel, part: Callable[[], None]) -> None:
        """Run a part of the startup; the server serves eagerly if it fails, or refuses to start if strict."""
        try:
            part()
        except Exception as e:
            served.ready = False
            served.stand_down = f"startup failed: {type(e).__name__}: {e}"
            logger.warning("startup failed", exc_info=True)
            if self.settings.strict:
                raise
        if served.stand_down is not None:
            self.log.info("eager", reason=served.stand_down)
            if self.settings.strict:
                raise RuntimeError(f"SGLANG_DSV4_GRAPHS_STRICT=1 and prefill stays eager: {served.stand_down}")

    def _devices(self, runner: Any) -> tuple[str, ...]:
        # A graph backend that an extension supplies (the CPU tape of demo and tests) makes its device capturable.
        supplied = self.manager.hook.dsv4_graphs_backend(device=str(runner.device))
        return ("cuda",) if supplied is None else ("cuda", str(runner.device).split(":")[0])
