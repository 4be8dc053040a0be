"""The model that the demo serves on a GPU: DeepSeek-V4.1-Flash as one rank of four sees it, without weights.

Layers, widths and heads are the served model's, so that a prefill step launches what it launches there; the experts
are a quarter as wide and an eighth as many, so that the engine's dummy weights fit one GPU. No vision, no Engram.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYERS = 40
# Layers without compression, then of ratio 2 up to the last source of compressed KV, then of ratio 1.
UNCOMPRESSED, LAST_SOURCE = 2, 20
KV_SOURCES = range(UNCOMPRESSED, LAST_SOURCE + 1, 6)
INDEX_SOURCES = [*KV_SOURCES, *range(LAST_SOURCE + 4, LAYERS, 4)]
VOCABULARY = 129280
CONTEXT = 65536


def config_dict() -> dict[str, Any]:
    """The model's ``config.json``."""
    ratios = [0] * UNCOMPRESSED + [2] * (LAST_SOURCE - UNCOMPRESSED) + [1] * (LAYERS - LAST_SOURCE)
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": VOCABULARY,
        "num_hidden_layers": LAYERS,
        "hidden_size": 5120,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "num_nextn_predict_layers": 0,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": VOCABULARY - 16,
        "text_config": text | _attention() | _compression(ratios) | _experts() | _hyper_connections(),
    }


def _attention() -> dict[str, Any]:
    scaling = {"rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1}
    return {
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1280,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "attention_bias": False,
        "sliding_window": 128,
        "rope_theta": 10000,
        "rope_scaling": scaling | {"original_max_position_embeddings": CONTEXT},
    }


def _compression(ratios: list[int]) -> dict[str, Any]:
    return {
        "compress_ratios": ratios,
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": list(KV_SOURCES),
        "index_source_layer_ids": INDEX_SOURCES,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "candidate_source_layer_id": LAST_SOURCE,
        "candidate_topk_blocks": 2048,
        "candidate_block_size": 8,
    }


def _experts() -> dict[str, Any]:
    return {
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 576,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
    }


def _hyper_connections() -> dict[str, Any]:
    return {"hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6}


def write_config(directory: Path) -> None:
    """Write ``config.json`` into ``directory``."""
    (directory / "config.json").write_text(json.dumps(config_dict(), indent=1) + "\n")
