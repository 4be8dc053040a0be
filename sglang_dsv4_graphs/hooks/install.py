"""Installing: every precondition first, then everything or nothing.

A half-installed plugin is the worst state: the engine would run our step path without our startup. So settings,
version and contracts come before the first side effect, each patch is checked after it was applied, and a
problem takes all of them back. The engine swallows ``Exception`` from plugins and from model imports, so a strict
server is stopped with ``SystemExit``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pluggy

from sglang_dsv4_graphs.bank.decoder_replay import NAME as DECODER_REPLAY
from sglang_dsv4_graphs.bank.decoder_replay import DecoderReplayBank
from sglang_dsv4_graphs.bank.engram import around_hash_break
from sglang_dsv4_graphs.bank.full_layer import NAME as FULL_LAYER
from sglang_dsv4_graphs.bank.full_layer import FullLayerBank
from sglang_dsv4_graphs.bank.probes import KnownBuffers
from sglang_dsv4_graphs.engine.api import Engine, speaks_for_server
from sglang_dsv4_graphs.engine.facts import WEIGHT_UPDATES, hooks_for, installed_version
from sglang_dsv4_graphs.extend import ExtensionError, make_manager
from sglang_dsv4_graphs.hooks.breaks import RangeBreaks
from sglang_dsv4_graphs.hooks.compressor import CompressorBreaks
from sglang_dsv4_graphs.hooks.contracts import install_reason
from sglang_dsv4_graphs.hooks.indexer import IndexerBreaks
from sglang_dsv4_graphs.hooks.ledger import Ledger, PatchError
from sglang_dsv4_graphs.hooks.prefill_block import PrefillGraphBlock
from sglang_dsv4_graphs.hooks.prefill_graph import PrefillGraphTail
from sglang_dsv4_graphs.hooks.runtime import Runtime
from sglang_dsv4_graphs.hooks.weight_updates import WeightUpdates
from sglang_dsv4_graphs.log import RankLog, line, logger
from sglang_dsv4_graphs.settings import Settings


class StrictError(SystemExit):
    """A strict server cannot install; not an ``Exception``, which the engine would swallow."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"dsv4-graphs: SGLANG_DSV4_GRAPHS_STRICT=1 refuses to start: {reason}")
        self.reason = reason


@dataclass
class Installation:
    """The plugin in this process; ``undo`` may be called twice."""

    runtime: Runtime
    ledger: Ledger
    manager: pluggy.PluginManager

    def undo(self) -> None:
        """Give the engine back as it was."""
        if self.ledger.patches:
            self.ledger.undo()
            self._shut_down()

    def _shut_down(self) -> None:
        """Tell every plugin of the manager; one that raises must not keep the banks from giving up their memory."""
        plugins = self.manager.get_plugins()
        for plugin in plugins:
            try:
                self.manager.subset_hook_caller("dsv4_graphs_shutdown", plugins - {plugin})()
            except Exception:
                logger.warning(line("shutdown-failed", extension=self.manager.get_name(plugin)), exc_info=True)


def install(settings: Settings, *, third_parties: bool = True) -> Installation | None:
    """Install into the engine of this process, or log why not and return None.

    Raises:
        StrictError: in strict mode, instead of logging.
    """
    log = RankLog()
    version = installed_version()
    reason = install_reason(version, allow_untested=settings.allow_untested_engine)
    if reason is None and version is not None:
        try:
            return _install(settings, Engine(version), log, third_parties)
        except (PatchError, ExtensionError) as e:
            reason = str(e)
    stand_down(reason or "no engine", settings.strict, log)
    return None


def stand_down(reason: str, strict: bool, log: RankLog | None = None) -> None:
    """Say why prefill stays eager, once per server; a strict server stops here."""
    if strict:
        raise StrictError(reason)
    if speaks_for_server():
        (log or RankLog()).info("eager", reason=reason)


def _install(settings: Settings, engine: Engine, log: RankLog, third_parties: bool) -> Installation:
    manager = make_manager(third_parties=third_parties)
    decoder_replay = DecoderReplayBank()
    manager.register(KnownBuffers(), name="known-buffers")
    # pluggy calls the last registered first: the full-layer bank captures before the decoder-replay bank.
    manager.register(decoder_replay, name=DECODER_REPLAY)
    full_layer = FullLayerBank()
    manager.register(full_layer, name=FULL_LAYER)
    # 0.5.23 has a break for late layers in its prefill graph; 0.5.22 gets one.
    block = None if engine.has("tail_run") else PrefillGraphBlock(engine, decoder_replay).takeovers
    runtime = Runtime(engine, settings, manager, log, block)
    breaks = RangeBreaks(engine, settings)
    indexer = IndexerBreaks(engine)
    updates = WeightUpdates([full_layer, decoder_replay])
    prefill_graph = PrefillGraphTail(runtime.served, decoder_replay)
    hooks: dict[str, tuple[str, Callable[..., Any]]] = {
        "model_built": ("after", runtime.after_model_built),
        "layer_loop": ("around", runtime.around_layer_loop),
        "before_captures": ("before", runtime.before_captures),
        "startup": ("before", runtime.before_startup),
        "attention": ("around", breaks.around_attention),
        "tail_kv_store": ("around", breaks.around_tail_kv_store),
        "kv_store": ("around", breaks.around_kv_store),
        "low_ratio_sources": ("around", breaks.around_low_ratio_sources),
        "backend_sources": ("around", breaks.around_backend_sources),
        "index_full_topk": ("around", indexer.around_full_topk),
        "index_publish": ("around", indexer.around_publish),
        "index_consume": ("around", indexer.around_consume),
        "index_requests": ("around", indexer.around_requests),
        "pair_partners": ("around", CompressorBreaks(engine).around_pair_partners),
        "engram_hash": ("around", around_hash_break),
        "tail_breaks_out": ("around", prefill_graph.around_breaks_out),
        "tail_run": ("around", prefill_graph.around_run),
        **{c.name: ("around", updates.around) for c in WEIGHT_UPDATES},
    }
    ledger = Ledger(engine)
    ledger.apply([(c, *hooks[c.name]) for c in hooks_for(engine.version)])
    return Installation(runtime, ledger, manager)
