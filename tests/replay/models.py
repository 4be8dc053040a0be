"""Other models than the stand-in's default: its configuration with more in it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

VOCABULARY = 512


def configured(monkeypatch: pytest.MonkeyPatch, **more: Any) -> None:
    """Models built from here on have ``more`` in their configuration."""
    from sglang_dsv4_graphs.cpu_engine import config

    original = config.config_dict
    monkeypatch.setattr(config, "config_dict", lambda shape: original(shape) | more)


def with_vision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models with a vision tower: experts are routed by token ids, too."""
    configured(monkeypatch, vision_n_layers=2, image_token_id=5)


def with_engram(monkeypatch: pytest.MonkeyPatch, layers: Sequence[int]) -> None:
    """Models with the engine's Engram in ``layers``; ``fill_engram`` completes each."""
    from sglang.srt.layers import engram

    tokenizer = _tokenizer()
    _, compressed = engram.build_compressed_token_map(tokenizer)
    monkeypatch.setattr(engram, "get_tokenizer", lambda *args, **kwargs: tokenizer)
    # Two heads of bigrams and two of trigrams; every column has its own prime number of rows.
    sizes: dict[str, Any] = {
        "engram_layer_ids": list(layers),
        "engram_num_embeddings": [0] * len(layers),
        "engram_max_ngram_size": 3,
        "engram_vocab_size": 97,
        "engram_n_heads": 2,
        "engram_head_dim": 32,
        "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": compressed,
    }
    layout = engram.EngramLayout.from_config(SimpleNamespace(**sizes))
    rows = [sum(p for heads in of_layer for p in heads) for of_layer in layout.primes]
    configured(monkeypatch, **sizes | {"engram_num_embeddings": rows})


def fill_engram(runner: Any) -> None:
    """What loading weights and the engine's model runner do for Engram: tables, and the requests' history."""
    import torch

    model = runner.model.model
    model.engram_hasher.init_history(runner.max_running_requests + 1, "cpu")
    generator = torch.Generator().manual_seed(3)
    for layer in model.layers:
        if layer.engram is None:
            continue
        table = layer.engram.embed
        table.weight.data.copy_(torch.randn(table.weight.shape, generator=generator))
        table.scale.data.copy_(torch.ones(table.scale.shape))
        # The table's rows are bfloat16 whatever the model's dtype is.
        layer.engram.wkv.weight.data = layer.engram.wkv.weight.data.bfloat16()


def _tokenizer() -> Any:
    """A tokenizer of as many words as the stand-in has tokens."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    backend.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=backend)
