"""Whether a step replays, and why not: pure decisions on plain values.

Under tensor parallelism every rank must decide alike, so the facts are what all ranks know of a step. Each
reason is a value: it is counted, logged once, and listed in docs/fallbacks.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What decides for the life of a server."""

    device: str
    dp_attention: bool = False
    context_parallel: bool = False
    pipeline_parallel: bool = False
    two_batch_overlap: bool = False
    unified_kv: bool = False
    hisparse: bool = False
    lora: bool = False
    weight_offload: bool = False
    expert_all_to_all: bool = False
    memory_saver: bool = False
    pool_borrowing: bool = False
    forward_hooks: bool = False
    decode_only: bool = False
    full_prefill_graph: bool = False
    lagged_hyper_connections: bool = True


# (field of ServerFacts, reason); the first that holds is given.
_SERVER_REASONS = (
    ("dp_attention", "DP attention: ranks of one step hold different rows"),
    ("context_parallel", "context parallelism: a rank holds part of the rows"),
    ("pipeline_parallel", "pipeline parallelism: the layer ranges span ranks"),
    ("two_batch_overlap", "two-batch overlap: the engine interleaves two halves of a step"),
    ("unified_kv", "unified KV: attention stores through another path"),
    ("hisparse", "HiSparse: KV slots move between steps"),
    ("lora", "LoRA: adapters change what the layers compute"),
    ("weight_offload", "weight offload: weights of a layer are copied to the GPU anew in each step"),
    ("expert_all_to_all", "expert all-to-all: dispatch sizes follow each step's routing and span ranks"),
    ("memory_saver", "memory saver: weights and pools may be released while graphs hold their addresses"),
    ("pool_borrowing", "graph-pool borrowing: other code writes into graph memory"),
    ("decode_only", "disaggregated decode: this server runs no prefill"),
    ("full_prefill_graph", "full prefill graph: not shown to be safe beside the banks"),
    ("forward_hooks", "forward hooks: a replay does not call them"),
)


def server_reason(facts: ServerFacts, *, capturable_devices: tuple[str, ...] = ("cuda",)) -> str | None:
    """Why this server's prefill stays eager, or None."""
    if facts.device not in capturable_devices:
        return f"device {facts.device}: CUDA graphs need an NVIDIA GPU"
    for name, reason in _SERVER_REASONS:
        if getattr(facts, name):
            return reason
    if not facts.lagged_hyper_connections:
        return "model without lagged hyper-connections: not DeepSeek-V4.1"
    return None


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What decides for one extend step: ``rows`` counts its tokens, ``requests`` what they belong to."""

    rows: int
    requests: int = 1
    speculative: bool = False
    multimodal: bool = False
    recording_experts: bool = False
    context_parallel: bool = False
    separate_global_ids: bool = False
    unbounded_moe_count: bool = False
    other_rows: bool = False


OTHER_ROWS = "rows of another type than the captured ones"
_STEP_REASONS = (
    ("speculative", "speculative verify or draft"),
    ("multimodal", "multimodal input"),
    ("recording_experts", "expert recorder active"),
    ("context_parallel", "context-parallel step"),
    ("separate_global_ids", "global token ids differ from local ones"),
    ("unbounded_moe_count", "MoE row count that a graph cannot own"),
    ("other_rows", OTHER_ROWS),
)
TOO_MANY_ROWS = "more rows than the largest bucket"
TOO_FEW_REQUESTS = "too few requests for so large a graph"
NO_ROWS = "no rows"
NOTHING_CAPTURED = "nothing captured"
RETIRED = "bank retired"


def step_reason(facts: StepFacts) -> str | None:
    """Why this step runs eagerly whatever its rows, or None."""
    for name, reason in _STEP_REASONS:
        if getattr(facts, name):
            return reason
    return None


def rows_reason(rows: int) -> str:
    """Why ``rows`` have no bucket."""
    return NO_ROWS if rows <= 0 else TOO_MANY_ROWS
