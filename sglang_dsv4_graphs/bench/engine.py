"""The engine in this process: dummy weights, token ids in, time to the new tokens out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

CHUNK = 8192


def engine_arguments(model: str, **changes: Any) -> dict[str, Any]:
    """Arguments of the engine: a server as always, without what only costs start time or needs files."""
    return {
        "model_path": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "random_seed": 1,
        "tp_size": 1,
        "mem_fraction_static": 0.6,
        "max_running_requests": 16,
        "chunked_prefill_size": CHUNK,
        # The prefill graph is off for this model by default. One new token never decodes.
        "cuda_graph_backend_prefill": "disabled",
        "cuda_graph_backend_decode": "disabled",
        "disable_flashinfer_autotune": True,
        "sampling_backend": "pytorch",
        # First use compiles kernels for minutes.
        "watchdog_timeout": 100000,
        "log_level": "info",
    } | changes


@dataclass(frozen=True)
class Answer:
    """What a request came to: milliseconds until every prompt had its new tokens, and per prompt its tokens, how many
    of its tokens were cached, and [log-probability, token] of the first new token's likeliest ones if asked for."""

    ms: float
    tokens: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    top: list[list[list[float]]] = field(default_factory=list)


class EngineServer:
    """An engine of this process; ``close`` ends its processes."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        import sglang

        start = time.perf_counter()
        self.engine = sglang.Engine(**arguments)
        self.startup_s = time.perf_counter() - start
        self.version = str(getattr(sglang, "__version__", "unknown"))

    def ask(self, prompts: Sequence[list[int]], new_tokens: int = 1, *, top: int = 0) -> Answer:
        """Send ``prompts`` at once and wait; ``top``: how many log-probabilities of the first new token."""
        more = {"return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": top} if top else {}
        start = time.perf_counter()
        outs = self.engine.generate(
            input_ids=list(prompts),
            sampling_params={"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
            **more,
        )
        ms = (time.perf_counter() - start) * 1e3
        outs = outs if isinstance(outs, list) else [outs]
        metas = [out.get("meta_info", {}) for out in outs]
        return Answer(
            round(ms, 3),
            [list(out.get("output_ids", ())) for out in outs],
            [int(meta.get("cached_tokens", 0) or 0) for meta in metas],
            [_top(meta) for meta in metas] if top else [],
        )

    def flush(self) -> None:
        """Forget every cached prompt."""
        self.engine.flush_cache()

    def close(self) -> None:
        self.engine.shutdown()


def _top(meta: dict[str, Any]) -> list[list[float]]:
    return [[round(float(p), 5), int(token)] for p, token, *_ in meta["output_top_logprobs"][0]]
