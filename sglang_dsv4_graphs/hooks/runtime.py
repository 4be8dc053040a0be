"""What the patches call: from the engine's functions to the plugin's own hooks.

One instance per installation. It keeps the models that were built in this process and starts the sweep when the
engine has captured its own graphs. An exception that leaves here would end the engine's step or start, so only
strict mode lets one. Under tensor parallelism every part of the startup ends alike on all ranks (``bank.ranks``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from traceback import clear_frames
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import pluggy

from sglang_dsv4_graphs.bank.decide import server_reason
from sglang_dsv4_graphs.bank.ranks import RankError, brief
from sglang_dsv4_graphs.bank.served import ServedModel, Step
from sglang_dsv4_graphs.bank.sweep import Startup
from sglang_dsv4_graphs.bank.views import Takeover
from sglang_dsv4_graphs.engine.api import Engine
from sglang_dsv4_graphs.hooks.start import begin, finish, make_ranks, server_facts
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
        # Models whose startup is over, one way or the other.
        self._decided: WeakSet[ServedModel] = WeakSet()
        # What an extension raised when the model was built, on this rank; the others learn of it at startup.
        self._unbuilt: WeakKeyDictionary[ServedModel, Exception] = WeakKeyDictionary()

    def served(self, model: Any) -> ServedModel | None:
        """What is known of a model built in this process."""
        return self._served.get(model)

    def after_model_built(self, result: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        """AFTER ``DeepseekV4Model.__init__``."""
        served = ServedModel(self.engine, model, self.settings, self.manager, self.log)
        served.in_prefill_graph = self._in_prefill_graph
        self._served[model] = served
        try:
            self.manager.hook.dsv4_graphs_model_built(served=served)
        except Exception as e:  # the engine's model must come to be whatever an extension does
            served.stand_down = f"startup failed: {brief(e)}"
            self._unbuilt[served] = e
            logger.warning("an extension failed on a model that was built", exc_info=True)
            if self.settings.strict:
                raise

    def around_layer_loop(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """AROUND the model's layer loop."""
        try:
            served = self._served.get(model)
        except TypeError:  # a view of ours, which cannot be a key: the loop is already inside a range
            served = None
        if served is None:
            return original(model, *args, **kwargs)
        return served.run_loop(original, *args, **kwargs)

    def before_captures(self, *, model_runner: Any, eager_runner: Any, **_: Any) -> None:
        """BEFORE the engine captures prefill graphs: a workspace that grew later would strand what they captured."""
        for served in self._pending(model_runner):
            self._begin(served, model_runner, eager_runner)

    def before_startup(self, model_runner: Any) -> None:
        """BEFORE the engine's finalisation of its own captures."""
        for served in self._pending(model_runner):
            if served not in self._begun:
                self._begin(served, model_runner)
            if served in self._begun:
                self._finish(served, model_runner)

    def _pending(self, runner: Any) -> list[ServedModel]:
        """Models of this runner whose startup is not decided yet; a draft's are never ours."""
        if runner.is_draft_worker:
            return []
        self.log.rank = self.engine.get_parallel().tp_rank
        found = (self._served.get(module) for module in runner.model.modules())
        return [s for s in found if s is not None and s not in self._decided]

    def _begin(self, served: ServedModel, runner: Any, eager_runner: Any = None) -> None:
        """Decide whether this server is ours, and grow."""

        try:
            # Follows from the server's arguments, so no rank has to ask another.
            facts = server_facts(self.engine, runner, served.model)
            reason = server_reason(facts, capturable_devices=self._devices(runner))
            if reason is None:
                served.ranks = make_ranks(self.engine)
        except Exception as e:
            self._failed(served, brief(e), e)
            return
        if reason is not None:
            self._stand_down(served, reason)
            return

        def part() -> None:
            if served in self._unbuilt:
                raise self._unbuilt[served]
            self._begun[served] = startup = begin(self.engine, served, runner, self.manager, eager_runner)
            startup.grow()

        self._together(served, "begin", part)

    def _finish(self, served: ServedModel, runner: Any) -> None:
        """Capture and rehearse; requests take the step path once every rank has come to the end of that."""
        startup = self._begun[served]
        if self._together(served, "finish", partial(finish, startup, runner, self.manager)):
            del self._begun[served]
            self._decided.add(served)
            served.ready = True
            try:
                startup.summary()
            except Exception:  # all ranks have agreed; a line of the log must not part them again
                logger.warning("the summary could not be written", exc_info=True)

    def _together(self, served: ServedModel, name: str, part: Callable[[], None]) -> bool:
        """Run a part of the startup on all ranks; False, and all of them eager, if it failed on one."""
        try:
            failure = served.ranks.together(name, part)
        except RankError as e:
            self._failed(served, brief(e), e)
            return False
        if failure is not None:
            self._failed(served, str(failure) if served.ranks.size > 1 else failure.why, failure.error)
        return failure is None

    def _failed(self, served: ServedModel, why: str, error: Exception | None) -> None:
        """The server serves eagerly, or refuses to start if strict; no graph stays behind."""
        reason = f"startup failed: {why}"
        if error is not None and served not in self._unbuilt:
            logger.warning("startup failed", exc_info=error)
        startup = self._begun.pop(served, None)
        if startup is not None:
            if error is not None:
                _let_go(error)
            try:
                startup.abandon(reason)
            except Exception:  # a device that has failed gives nothing back
                logger.warning("the captured graphs' memory could not be handed back", exc_info=True)
        self._stand_down(served, reason, error)

    def _stand_down(self, served: ServedModel, reason: str, error: Exception | None = None) -> None:
        self._decided.add(served)
        served.ready, served.stand_down = False, reason
        if self.settings.strict and error is not None:
            raise error
        self.log.info("eager", reason=reason)
        if self.settings.strict:
            raise RuntimeError(f"SGLANG_DSV4_GRAPHS_STRICT=1 and prefill stays eager: {reason}")

    def _devices(self, runner: Any) -> tuple[str, ...]:
        # A graph backend that an extension supplies (the CPU tape of demo and tests) makes its device capturable.
        supplied = self.manager.hook.dsv4_graphs_backend(device=str(runner.device))
        return ("cuda",) if supplied is None else ("cuda", str(runner.device).split(":")[0])


def _let_go(error: BaseException | None) -> None:
    """Drop what the frames of an error hold: the tensors of the step that failed."""
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
