"""Startup on the engine's side: what kind of server this is, and the sweep with the engine's objects.

Everything the sweep needs is taken from the model runner here and passed on by itself; the banks never reach
through the runner.
"""

from __future__ import annotations

from typing import Any

import pluggy
import torch

from sglang_dsv4_graphs.bank.backend import GraphBackend
from sglang_dsv4_graphs.bank.cuda import CudaGraphBackend
from sglang_dsv4_graphs.bank.decide import ServerFacts
from sglang_dsv4_graphs.bank.decoder_replay import NAME as DECODER_REPLAY
from sglang_dsv4_graphs.bank.device import Device
from sglang_dsv4_graphs.bank.dummies import Dummies
from sglang_dsv4_graphs.bank.engine_tail import drive_engine_tail
from sglang_dsv4_graphs.bank.full_layer import NAME as FULL_LAYER
from sglang_dsv4_graphs.bank.guard import AddressGuard
from sglang_dsv4_graphs.bank.probes import derived_tensors, model_weights
from sglang_dsv4_graphs.bank.ranks import Ranks
from sglang_dsv4_graphs.bank.served import ServedModel
from sglang_dsv4_graphs.bank.sweep import Startup
from sglang_dsv4_graphs.bank.workspace import hold_workspace, stream_of_our_own
from sglang_dsv4_graphs.engine.api import Engine
from sglang_dsv4_graphs.extend import Probe

BANKS = (FULL_LAYER, DECODER_REPLAY)


def server_facts(engine: Engine, runner: Any, model: Any) -> ServerFacts:
    """What of this server decides whether banks may run at all."""
    parallel = engine.get_parallel()
    return ServerFacts(
        device=str(runner.device).split(":")[0],
        dp_attention=parallel.attn_dp_size > 1,
        context_parallel=parallel.attn_cp_size > 1,
        pipeline_parallel=parallel.pp_size > 1,
        two_batch_overlap=bool(engine.get_exec().overlap.enable_two_batch_overlap),
        unified_kv=bool(engine.unified_kv()),
        hisparse=getattr(runner, "hisparse_coordinator", None) is not None,
        lora=runner.lora_manager is not None,
        weight_offload=engine.offloads_weights(),
        expert_all_to_all=not engine.moe_a2a_backend().is_none(),
        memory_saver=bool(getattr(runner.server_args, "enable_memory_saver", False)),
        pool_borrowing=bool(engine.envs.SGLANG_ENABLE_GRAPH_POOL_BORROW.get()),
        forward_hooks=bool(engine.get_observability().forward_hooks),
        full_prefill_graph=engine.captures_full_prefill(),
        decode_only=engine.get_disagg().disaggregation_mode == "decode",
        lagged_hyper_connections=bool(model.hc_pre_from_prev_sublayer),
    )


def make_ranks(engine: Engine) -> Ranks:
    """The ranks of this server's tensor-parallel group, on a CPU group of their own.

    Called once per served model, by all ranks alike: after the stand-downs that follow from what every rank knows.
    A draft's model runner shares the engine's group and has no part in this one.
    """
    parallel = engine.get_parallel()
    if parallel.tp_size == 1:
        return Ranks(0, 1)
    return Ranks.of(parallel.tp_rank, parallel.tp_group.ranks)


def begin(
    engine: Engine, served: ServedModel, runner: Any, manager: pluggy.PluginManager, eager_runner: Any = None
) -> Startup:
    """Say that we are in, and make the sweep; it grows next, before the engine's captures as before ours."""
    banks = [name for name in BANKS if manager.has_plugin(name)]
    served.log.info("installed", engine=engine.version, banks=",".join(banks))
    return make_startup(engine, served, runner, manager, eager_runner)


def finish(startup: Startup, runner: Any, manager: pluggy.PluginManager) -> None:
    """Capture every bank, give memory back, and rehearse; the step path is closed again afterwards.

    Garbage collections of the sweep look at its own objects alone, as those of the engine's captures do: one that
    looks at a whole server's takes half a second.
    """
    engine = startup.served.engine
    with engine.freeze_gc(engine.get_exec().graph.enable_cudagraph_gc):
        startup.open()
        manager.hook.dsv4_graphs_startup(startup=startup)
        drive_engine_tail(startup)
        startup.release()
        startup.rehearse(getattr(runner, "forward_stream", None))


def make_startup(
    engine: Engine, served: ServedModel, runner: Any, manager: pluggy.PluginManager, eager_runner: Any = None
) -> Startup:
    model = served.model
    probe = Probe(runner, runner.attn_backend, model)

    def guard(first: int, last: int) -> AddressGuard:
        buffers = [b for found in manager.hook.dsv4_graphs_guard(probe=probe) for b in found]
        return AddressGuard([*buffers, *derived_tensors(model, first, last)], model_weights(model, first, last))

    schedule = engine.get_schedule()
    mixed = bool(schedule.enable_mixed_chunk)
    return Startup(
        served=served,
        dummies=Dummies(engine, runner, model, eager_runner),
        backend=make_backend(engine, served, runner, manager),
        make_guard=guard,
        ranks=served.ranks,
        device=Device(str(runner.device)),
        chunk_size=schedule.chunked_prefill_size,
        # A mixed chunk carries decode rows beside a full chunk, each a request beyond the limit of a prefill's.
        extra_rows=int(runner.max_running_requests) if mixed else 0,
        max_requests=None if mixed else schedule.prefill_max_requests,
        strict=served.settings.strict,
        store_in_graph=served.settings.merged_kv_store and engine.stores_in_graph(runner.attn_backend),
    )


def make_backend(engine: Engine, served: ServedModel, runner: Any, manager: pluggy.PluginManager) -> GraphBackend:
    """The supplied backend for this device, or CUDA graphs in the engine's global pool (or a private one)."""
    supplied = manager.hook.dsv4_graphs_backend(device=str(runner.device))
    if supplied is not None:
        return supplied
    shared = bool(served.settings.global_pool)
    if shared:
        pool, stream = engine.global_graph_pool(torch.cuda), engine.global_capture_stream()
        # The engine captures on this stream after us; our graphs must be able to go without harm to its.
        if not hold_workspace(stream):
            served.log.warning("private-pool", reason="the engine's capture stream was in use before the plugin")
            shared = False
    if not shared:
        pool, stream = torch.cuda.graph_pool_handle(), stream_of_our_own()
    # A private pool too is of both banks, and one may drop its graphs before the other captures.
    return CudaGraphBackend(engine, pool=pool, stream=stream, ranks=served.ranks, shared=True)
