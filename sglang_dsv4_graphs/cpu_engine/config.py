"""A small DeepSeek-V4.1 configuration with every kind of layer the served model has.

A test model that lacks one of them proves nothing about it, so the default has, in the served model's order:
two layers without compression, a ratio-2 source and a ratio-2 reader, a ratio-1 source that is also the index
and candidate source (where decoder SWA bounded replay starts its tail), a reader, and an index source that
scores only what the candidate source published. Widths are small and carry no meaning.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SWA_WINDOW = 128


@dataclass(frozen=True)
class ModelShape:
    """How large the model is.

    ``layers`` counts decoder layers, at least 6: two of ratio 0, then half (rounded up) of ratio 2, the rest
    of ratio 1.
    """

    layers: int = 7
    hidden: int = 128
    heads: int = 4
    head_dim: int = 128
    context: int = 2048

    def __post_init__(self) -> None:
        if self.layers < 6:
            raise ValueError(f"layers={self.layers}: at least 6 are needed to have every kind of layer")

    @property
    def last_source(self) -> int:
        """The last layer that owns compressed KV; the layers after it never compress."""
        return 2 + (self.layers - 2) // 2

    @property
    def compress_ratios(self) -> list[int]:
        return [0, 0] + [2] * (self.last_source - 2) + [1] * (self.layers - self.last_source)

    @property
    def kv_sources(self) -> list[int]:
        return [2, self.last_source]

    @property
    def index_sources(self) -> list[int]:
        return [*self.kv_sources, self.layers - 1]

    def source_of(self, layer_id: int) -> int | None:
        """The layer whose compressed KV ``layer_id`` reads, or None for a layer without compression."""
        ratio = self.compress_ratios[layer_id]
        sources = [s for s in self.kv_sources if s <= layer_id and self.compress_ratios[s] == ratio]
        return max(sources, default=None) if ratio else None


def config_dict(shape: ModelShape) -> dict[str, Any]:
    """The model's ``config.json`` as a dictionary."""
    return {
        "model_type": "deepseek_v41",
        "architectures": ["DeepseekV41ForCausalLM"],
        "torch_dtype": "bfloat16",
        "vocab_size": 512,
        "hidden_size": shape.hidden,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": 1,
        "head_dim": shape.head_dim,
        "qk_nope_head_dim": shape.head_dim - 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": shape.head_dim,
        "kv_lora_rank": shape.head_dim,
        "q_lora_rank": 64,
        "o_lora_rank": 64,
        "o_groups": 2,
        "index_head_dim": 64,
        "index_n_heads": 4,
        # Small, so that what the indexer picks matters from a few dozen tokens on.
        "index_topk": 8,
        "candidate_source_layer_id": shape.last_source,
        "candidate_topk_blocks": 6,
        "candidate_block_size": 4,
        "compress_ratios": shape.compress_ratios,
        "kv_source_layer_ids": shape.kv_sources,
        "index_source_layer_ids": shape.index_sources,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
        "n_hash_layers": 0,
        "num_hash_layers": 0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "rope_theta": 10000,
        "compress_rope_theta": 40000,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 1024,
        },
        "sliding_window": SWA_WINDOW,
        "window_size": SWA_WINDOW,
        "hc_mult": 4,
        # Fewer than the served model's 20: each is two dozen operations of plain torch, in a kernel that is one launch.
        "hc_sinkhorn_iters": 4,
        "hc_eps": 1e-6,
        "hc_pre_from_prev_sublayer": True,
        "q_head_norm": False,
        "vision_n_layers": 0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def write_config(directory: Path, shape: ModelShape) -> Path:
    """Write ``config.json`` into ``directory`` and return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_dict(shape), indent=1) + "\n")
    return directory
