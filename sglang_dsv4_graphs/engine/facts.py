"""Every fact about the engine: versions, dotted targets, signatures, what differs per version.

The plugin patches and calls private functions of a foreign program that changes between releases. Each of them
is listed here once, with the parameters we rely on, so that one check before installing tells whether this
engine is the one we know. Nothing else in the package spells an engine path (``cpu_engine`` apart, which stands
in for the engine's hardware).

How a contract is written and looked up is in ``contract``. Source: sglang 0.5.22 and 0.5.23, wheels as published.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from sglang_dsv4_graphs.engine.contract import Contract, release

DISTRIBUTION = "sglang"
TESTED_VERSIONS = ("0.5.22", "0.5.23")
PLUGIN_GROUP = "sglang.srt.plugins"
# Our entry point in that group: what SGLANG_PLUGINS lists.
ENTRY_POINT = "dsv4_graphs"
MODEL_MODULE = "sglang.srt.models.deepseek_v4"
# Off while a bank captures: under the capture flag it sends ratio-0 layers down a prepare that stores their K
# into the slots of the captured step.
MULTI_STREAM_ENV = "SGLANG_OPT_USE_MULTI_STREAM_OVERLAP"
# What a process knows of its own part in a server, as far as it has been told.
RUNTIME_CONTEXT = "sglang.srt.runtime_context"
# Rows of one request's tail under decoder SWA bounded replay.
TAIL_ROWS_PER_REQUEST = 128

_SRT = "sglang.srt."
_RUNNER = _SRT + "model_executor."
_BREAKABLE = _RUNNER + "runner_backend_utils.breakable_cuda_graph."
_PIECEWISE = _RUNNER + "runner_backend_utils.tc_piecewise_cuda_graph.context_manager."
_MODEL = MODEL_MODULE + "."
_TAIL = _SRT + "models.deepseek_v4_replay_tail."
_INDEXER = _SRT + "layers.attention.dsv4.v41_indexer."
_SETUP = _RUNNER + "model_runner_components.cuda_graph_setup."
_UPDATER = _RUNNER + "model_runner_components.weight_updater.WeightUpdater."
_CAUSAL_LM = _MODEL + "DeepseekV4ForCausalLM."
_BACKEND = _SRT + "layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend."
_V22, _V23 = ("0.5.22",), ("0.5.23",)

_LOOP = (
    "self, positions, hidden_states, forward_batch, input_ids, input_ids_global, capture_dspark, "
    "dspark_aux_hidden_states"
)
_SOURCES = "self, *, layer, x, q_lora, positions, forward_batch, run_compressor=, run_indexer="
_TAIL_METADATA = "self, forward_batch, *, for_prefill_graph=, max_seq_len_override="
_SET_CONTEXT = (
    "forward_batch, attention_layers, quant_config, moe_layers, moe_fusions, dsa_indexers=, "
    "mha_companion_layers=, num_tokens=, raw_num_tokens=, full_graph="
)


# Everything through which the engine changes the weights of a model in service. (Loading a model again builds another
# one; releasing memory needs the memory saver, with which nothing is captured.)
WEIGHT_UPDATES = (
    Contract(
        "weights_from_disk",
        _UPDATER + "update_weights_from_disk",
        "self, model_path, load_format, weight_name_filter=, recapture_cuda_graph=",
    ),
    Contract("weights_from_distributed", _UPDATER + "load_weights_from_distributed", "self, named_tensors"),
    Contract("weights_from_tensor", _UPDATER + "update_weights_from_tensor", "self, named_tensors, load_format="),
    Contract("weights_from_ipc", _UPDATER + "update_weights_from_ipc", "self, recv_req"),
    Contract("weight_update_begin", _UPDATER + "begin_weight_update", "self"),
    Contract("weight_update_end", _UPDATER + "end_weight_update", "self, *, run_post_load"),
    # Where the ways above end, and others come in: a backup of experts, a remote instance, a trainer in the process.
    Contract("weights_loaded", _CAUSAL_LM + "load_weights", "self, weights, is_nextn="),
    Contract("weights_derived", _CAUSAL_LM + "post_load_weights", "self, is_nextn=, weight_names="),
    Contract(
        "experts_relocated",
        _SRT + "eplb.expert_location_updater.ExpertLocationUpdater.update",
        "self, routed_experts_weights_of_layer, new_expert_location_metadata, update_layer_ids, nnodes, rank, "
        "use_flat_topology=",
    ),
)

HOOKS = (
    Contract("model_built", _MODEL + "DeepseekV4Model.__init__", "self, config, quant_config=, prefix="),
    Contract("layer_loop", _MODEL + "DeepseekV4Model._forward_layers_hc_pre_from_prev", _LOOP),
    Contract(
        "before_captures",
        _SETUP + "capture_prefill_graph",
        "*, model_runner, eager_runner, force_for_draft_worker=",
    ),
    Contract("startup", _SETUP + "finalize_cuda_graph_capture", "model_runner"),
    Contract(
        "tail_breaks_out", _TAIL + "DecoderReplayTail.breaks_out_of_prefill_graph", "self, tail, *, num_tokens", _V23
    ),
    Contract(
        "tail_run",
        _TAIL + "DecoderReplayTail.run",
        "self, *, state, positions, input_ids, input_ids_global, forward_batch, capture_dspark, dp_rows=, out_rows=",
        _V23,
    ),
    Contract(
        "attention",
        _MODEL + "bcg_deepseek_v4_attention_with_output",
        "query, key_value, output, layer_id, compress_ratio, attn_sink, save_kv_cache",
        _V23,
    ),
    # The same function; 0.5.22's operator wrapper hides its parameters.
    Contract("attention", _MODEL + "bcg_deepseek_v4_attention_with_output", "*args, **kwargs", _V22),
    # The break of the Engram hash: 0.5.23 fills a buffer, 0.5.22 returns the ids.
    Contract("engram_hash", _MODEL + "bcg_deepseek_v4_engram_hash_ids", "hasher, input_ids, out", _V23),
    Contract("engram_hash", _MODEL + "bcg_deepseek_v4_engram_hash_ids", "hasher, input_ids", _V22),
    Contract("tail_kv_store", _MODEL + "bcg_tail_kv_store", "attention, x, positions, qkv_a", _V23),
    # 0.5.22 stores the SWA K inside the segment and has no stub for the sources' capture pass.
    Contract(
        "kv_store",
        _MODEL + "MQALayer._compute_kv_to_cache",
        "self, x, positions, forward_batch, attn_backend, qkv_a=, q_rope=",
        _V22,
    ),
    Contract("low_ratio_sources", _MODEL + "bcg_deepseek_v4_low_ratio_sources", "layer, x, q_lora, positions", _V22),
    # On Blackwell its model breaks nowhere for them: it calls the backend inside the segment.
    Contract("backend_sources", _BACKEND + "forward_low_ratio_sources", _SOURCES, _V22),
    # The per-request indexer, as Hopper runs it.
    Contract("index_full_topk", _INDEXER + "full_topk.FullTopKIndexer.topk_prefill", "self, inputs"),
    Contract("index_publish", _INDEXER + "dense_blocks.DenseBlocksBackend.publish_prefill", "self, inputs"),
    Contract("index_consume", _INDEXER + "dense_blocks.DenseBlocksBackend.consume_prefill", "self, inputs, published"),
    Contract("index_requests", _INDEXER + "scoring.prefill_requests", "*, inputs, token_to_kv_pool", _V23),
    Contract(
        "index_requests", _INDEXER + "scoring.prefill_requests", "*, inputs, token_to_kv_pool, req_to_token", _V22
    ),
    Contract("pair_partners", _BACKEND + "_low_ratio_pair_partners", "self, *, layer_id, kv, score, req, pos, pad"),
    *WEIGHT_UPDATES,
)

CALLS = (
    Contract("RequestScores", _INDEXER + "scoring.RequestScores"),
    Contract("ChunkScores", _INDEXER + "scoring.ChunkScores"),
    Contract("BlockIds", _INDEXER + "dense_blocks.BlockIds"),
    Contract("score_budget", _INDEXER + "scoring._TORCH_SCORE_BUDGET_BYTES"),
    Contract("KVAndScore", _SRT + "mem_cache.deepseek_v4_compress_state.KVAndScore"),
    Contract(
        "kv_store_call",
        _MODEL + "MQALayer._compute_kv_to_cache",
        "self, x, positions, forward_batch, attn_backend, qkv_a=, q_rope=",
    ),
    Contract("hook_registry_apply", _SRT + "plugins.hook_registry.HookRegistry._apply_target", "target, hooks"),
    Contract("hook_registry", _SRT + "plugins.hook_registry.HookRegistry"),
    Contract("HookSource", _SRT + "plugins.hook_registry.HookSource"),
    Contract("HookType", _SRT + "plugins.hook_registry.HookType"),
    Contract("ForwardContext", _RUNNER + "forward_context.ForwardContext"),
    Contract("forward_context", _RUNNER + "forward_context.forward_context", "ctx, *, forward_batch=", _V23),
    Contract("forward_context", _RUNNER + "forward_context.forward_context", "ctx", _V22),
    Contract("get_forward_context", _RUNNER + "forward_context.get_forward_context", ""),
    Contract("has_forward_context", _RUNNER + "forward_context.has_forward_context", ""),
    Contract("get_attn_backend", _RUNNER + "forward_context.get_attn_backend", ""),
    Contract("set_break_context", _PIECEWISE + "set_tc_piecewise_forward_context", _SET_CONTEXT),
    Contract("get_break_context", _PIECEWISE + "get_tc_piecewise_forward_context", ""),
    Contract("enable_breakable", _BREAKABLE + "context.enable_breakable_cuda_graph", ""),
    Contract("in_breakable", _BREAKABLE + "context.is_in_breakable_cuda_graph", ""),
    # The mark itself, which the engine's scope clears when it is left, whoever set it: we put it back.
    Contract("breakable_mark", _BREAKABLE + "context._in_breakable_cuda_graph"),
    Contract("BreakableCUDAGraph", _BREAKABLE + "breakable_cuda_graph.BreakableCUDAGraph"),
    Contract(
        "BreakableCUDAGraphCapture",
        _BREAKABLE + "breakable_cuda_graph.BreakableCUDAGraphCapture",
        "cuda_graph, pool=, stream=, capture_error_mode=, barrier_fn=",
    ),
    Contract("eager_on_graph", _BREAKABLE + "breakable_cuda_graph.eager_on_graph", "fn=, capture_stub=, *, enable="),
    Contract("current_capture_var", _BREAKABLE + "breakable_cuda_graph._current_capture_var"),
    Contract(
        "load_batch",
        _RUNNER + "runner.eager_runner.EagerRunner.load_batch",
        "self, forward_batch, pp_proxy_tensors=, **kwargs",
    ),
    Contract("graph_capture", _SRT + "distributed.parallel_state.graph_capture", "stream="),
    Contract("parallel_groups", _SRT + "distributed.parallel_state._groups"),
    Contract("set_graph_pool_id", _SRT + "distributed.device_communicators.pynccl_allocator.set_graph_pool_id"),
    Contract(
        "global_graph_pool",
        _RUNNER + "runner_utils.pool.get_or_create_global_graph_memory_pool",
        "device_module",
    ),
    Contract("global_capture_stream", _RUNNER + "runner_utils.pool.get_or_create_global_graph_capture_stream", ""),
    Contract("pool_capture_scope", _RUNNER + "runner_utils.pool.graph_pool_capture_scope"),
    Contract("pool_replay_scope", _RUNNER + "runner_utils.pool.graph_pool_replay_scope"),
    Contract(
        "graph_layers",
        _RUNNER + "model_runner_components.layer_setup.compute_attention_and_moe_layers",
        "layer_model",
    ),
    Contract("freeze_gc", _RUNNER + "runner.base_cuda_graph_runner.freeze_gc", "enable_cudagraph_gc"),
    Contract("in_capture_mode", _RUNNER + "runner_utils.capture_mode.get_is_capture_mode", ""),
    Contract("HcState", _SRT + "models.deepseek_v4_mhc.HcState"),
    Contract(
        "AuxHiddenStatePacker", _SRT + "layers.aux_hidden_states.AuxHiddenStatePacker", "num_captures, out=", _V23
    ),
    Contract("ForwardBatch", _RUNNER + "forward_batch_info.ForwardBatch"),
    Contract("ForwardMode", _RUNNER + "forward_batch_info.ForwardMode"),
    Contract("CaptureHiddenMode", _RUNNER + "forward_batch_info.CaptureHiddenMode"),
    Contract("counts_padding", _RUNNER + "forward_batch_info.enable_num_token_non_padded", ""),
    Contract(
        "local_row_count",
        _RUNNER + "forward_batch_info.compute_local_num_token_non_padded_cpu",
        "global_num_token_non_padded, num_tokens_per_dp, *, sharded",
    ),
    Contract("moe_a2a_backend", _SRT + "layers.moe.utils.get_moe_a2a_backend", ""),
    Contract("expert_recorder", _SRT + "eplb.expert_distribution.get_global_expert_distribution_recorder", ""),
    Contract("get_parallel", _SRT + "runtime_context.get_parallel", ""),
    Contract("get_schedule", _SRT + "runtime_context.get_schedule", ""),
    Contract("get_exec", _SRT + "runtime_context.get_exec", ""),
    Contract("get_model_args", _SRT + "runtime_context.get_model", ""),
    Contract("get_disagg", _SRT + "runtime_context.get_disagg", ""),
    Contract("get_observability", _SRT + "runtime_context.get_observability", ""),
    Contract("unified_kv", _SRT + "layers.attention.dsv4.unified_kv_gate.is_unified_kv_triton", "", _V23),
    Contract(
        "unified_kv",
        "sglang.kernels.ops.attention.dsv4.unified_kv_kernels.env_gate.is_unified_kv_triton",
        "",
        _V22,
    ),
    Contract("set_dp_buffer_len", _SRT + "layers.dp_attention.set_dp_buffer_len"),
    Contract("set_is_extend_in_batch", _SRT + "layers.dp_attention.set_is_extend_in_batch"),
    Contract("envs", _SRT + "environ.envs"),
    Contract("residual_start", _SRT + "layers.layer_boundary.residual.batch.start", "forward_batch", _V23),
    Contract(
        "residual_write",
        _SRT + "layers.layer_boundary.residual.batch.set_written",
        "hidden_states, forward_batch",
        _V23,
    ),
    Contract("residual_clear", _SRT + "layers.layer_boundary.residual.batch.clear", "forward_batch", _V23),
    Contract(
        "tail_run_eagerly",
        _TAIL + "DecoderReplayTail._run_layers_eagerly",
        "self, *, state, positions, input_ids, input_ids_global, forward_batch, capture_dspark, dp_rows=",
        _V23,
    ),
    # 0.5.22's late layers in a prefill graph: our break switches onto the exact tail, as 0.5.23's own does.
    Contract("tail_metadata", _BACKEND + "_build_late_layer_tail_metadata", _TAIL_METADATA, _V22),
    Contract("enter_tail", _BACKEND + "enter_late_layer_tail", "self, forward_batch", _V22),
    Contract("exit_tail", _BACKEND + "exit_late_layer_tail", "self, saved, forward_batch", _V22),
    Contract("graph_enter_tail", _BACKEND + "prefill_graph_enter_late_layer_tail", "self, forward_batch", _V22),
    Contract("tail_scope", _SRT + "models.deepseek_v4_replay_tail._replay_tail_scope", "", _V23),
)


def installed_version() -> str | None:
    """The engine's version, or None if there is none."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def contracts_for(engine_version: str) -> tuple[Contract, ...]:
    """Every contract of an engine; an untested version is held to the newest tested one's."""
    known = engine_version if release(engine_version) in TESTED_VERSIONS else TESTED_VERSIONS[-1]
    return tuple(c for c in (*HOOKS, *CALLS) if c.holds_for(known))


def hooks_for(engine_version: str) -> tuple[Contract, ...]:
    """The contracts that are hook targets, in the order they are registered."""
    wanted = contracts_for(engine_version)
    return tuple(c for c in HOOKS if c in wanted)
