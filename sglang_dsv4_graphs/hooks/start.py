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
from sglang_dsv4_graphs.bank.full_layer import NAME as FULL_LAYER
from sglang_dsv4_graphs.bank.guard import AddressGuard
from sglang_dsv4_graphs.bank.probes import model_weights
from sglang_dsv4_graphs.bank.ranks import Ranks
from sglang_dsv4_graphs.bank.served import ServedModel
from sglang_dsv4_graphs.bank.sweep import Startup
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
        memory_saver=bool(getattr(runner.server_args, "enable_memory_saver", False)),
        pool_borrowing=bool(engine.envs.SGLANG_ENABLE_GRAPH_POOL_BORROW.get()),
        forward_hooks=bool(engine.get_observability().forward_hooks),
        prefill_graph=engine.captures_prefill(),
        decode_only=engine.get_disagg().disaggregation_mode == "decode",
        lagged_hyper_connections=bool(model.hc_pre_from_prev_sublayer),
    )


def begin(engine: Engine, served: ServedModel, runner: Any, manager: pluggy.PluginManager) -> Startup:
    """Say that we are in, and grow every workspace: before the engine's captures as before ours."""
    banks = [name for name in BANKS if manager.has_plugin(name)]
    served.log.info("installed", engine=engine.version, banks=",".join(banks))
    startup = make_startup(engine, served, runner, manager)
    startup.grow()
    startup.release()  # the engine measures free memory before it captures
    return startup


def finish(startup: Startup, runner: Any, manager: pluggy.PluginManager) -> None:
    """Capture every bank, give memory back, open the step path, and say what it came to."""
    startup.open()
    manager.hook.dsv4_graphs_startup(startup=startup)
    startup.drive_engine_tail()
    startup.release()
    startup.served.ready = True
    startup.rehearse(getattr(runner, "forward_stream", None))
    startup.summary()


def make_startup(engine: Engine, served: ServedModel, runner: Any, manager: pluggy.PluginManager) -> Startup:
    model = served.model
    parallel = engine.get_parallel()
    probe = Probe(runner, runner.attn_backend, model)

    def guard() -> AddressGuard:
        buffers = [b for found in manager.hook.dsv4_graphs_guard(probe=probe) for b in found]
        return AddressGuard(buffers, model_weights(model, model.start_layer, model.end_layer))

    group = parallel.tp_group.cpu_group if parallel.tp_size > 1 else None
    served.ranks = Ranks(parallel.tp_rank, parallel.tp_size, group)
    return Startup(
        served=served,
        dummies=Dummies(engine, runner, model),
        backend=make_backend(engine, served, runner, manager),
        make_guard=guard,
        ranks=served.ranks,
        device=Device(str(runner.device)),
        chunk_size=engine.get_schedule().chunked_prefill_size,
        # A mixed chunk carries decode rows beside a full chunk.
        extra_rows=int(runner.max_running_requests) if engine.get_schedule().enable_mixed_chunk else 0,
        strict=served.settings.strict,
    )


def make_backend(engine: Engine, served: ServedModel, runner: Any, manager: pluggy.PluginManager) -> GraphBackend:
    """The supplied backend for this device, or CUDA graphs in the engine's global pool (or a private one)."""
    supplied = manager.hook.dsv4_graphs_backend(device=str(runner.device))
    if supplied is not None:
        return supplied
    if served.settings.global_pool:
        pool, stream = engine.global_graph_pool(torch.cuda), engine.global_capture_stream()
    else:
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    return CudaGraphBackend(engine, pool=pool, stream=stream, barrier=engine.get_parallel().tp_group.barrier)
