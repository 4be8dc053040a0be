"""One server of the GPU demo: dummy weights, requests of one new token, times to it. Runs as a process of its own.

Whether the plugin installs is the environment's affair (``SGLANG_DSV4_GRAPHS``). What the parent reads of the output
are lines that start with ``ROW``; everything else is the engine's log.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any

ROW = "dsv4-graphs-demo-row "
CHUNK = 8192


def engine_arguments(model: str) -> dict[str, Any]:
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
        # Prompts repeat; a cached one would have nothing left to prefill.
        "disable_radix_cache": True,
        # The prefill graph is off for this model by default. One new token never decodes.
        "cuda_graph_backend_prefill": "disabled",
        "cuda_graph_backend_decode": "disabled",
        "disable_flashinfer_autotune": True,
        "sampling_backend": "pytorch",
        # First use compiles kernels for minutes.
        "watchdog_timeout": 100000,
        "log_level": "info",
    }


def prompt(length: int) -> list[int]:
    draw = random.Random(length)
    return [draw.randrange(3, 120000) for _ in range(length)]


def time_to_first_token(engine: Any, tokens: list[int]) -> float:
    """Milliseconds from the request to its one new token."""
    start = time.perf_counter()
    engine.generate(input_ids=tokens, sampling_params={"max_new_tokens": 1, "temperature": 0, "ignore_eos": True})
    return (time.perf_counter() - start) * 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--lengths", required=True, type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--repeats", required=True, type=int)
    options = parser.parse_args()
    import sglang

    engine = sglang.Engine(**engine_arguments(options.model))
    try:
        # A full chunk first: it compiles kernels, and the engine captures its own tail graphs behind one.
        for length in (CHUNK, *options.lengths):
            time_to_first_token(engine, prompt(length))
        for length in options.lengths:
            times = [time_to_first_token(engine, prompt(length)) for _ in range(options.repeats)]
            print(ROW + json.dumps({"length": length, "ms": times}), flush=True)
    finally:
        engine.shutdown()
    return 0


# The engine starts its processes by importing this module again.
if __name__ == "__main__":
    sys.exit(main())
