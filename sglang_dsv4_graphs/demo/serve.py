"""One server of the GPU demo: dummy weights, requests of one new token, times to it. Runs as a process of its own.

Whether the plugin installs is the environment's affair (``SGLANG_DSV4_GRAPHS``). What the parent reads of the output
are lines that start with ``ROW``; everything else is the engine's log.
"""

from __future__ import annotations

import argparse
import json
import sys

from sglang_dsv4_graphs.bench.cases import tokens
from sglang_dsv4_graphs.bench.engine import CHUNK, EngineServer, engine_arguments

ROW = "dsv4-graphs-demo-row "


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--lengths", required=True, type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--repeats", required=True, type=int)
    options = parser.parse_args()
    # Prompts repeat; a cached one would have nothing left to prefill.
    server = EngineServer(engine_arguments(options.model, disable_radix_cache=True))
    try:
        # A full chunk first: it compiles kernels, and the engine captures its own tail graphs behind one.
        for length in (CHUNK, *options.lengths):
            server.ask([tokens(length, length)])
        for length in options.lengths:
            times = [server.ask([tokens(length, length)]).ms for _ in range(options.repeats)]
            print(ROW + json.dumps({"length": length, "ms": times}), flush=True)
    finally:
        server.close()
    return 0


# The engine starts its processes by importing this module again.
if __name__ == "__main__":
    sys.exit(main())
