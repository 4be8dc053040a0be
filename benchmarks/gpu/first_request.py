"""The first request after startup against the ones that follow, as a user of ``sglang.launch_server`` meets them.

    RESULTS=dir MODELS=dir python3 benchmarks/gpu/first_request.py rank flash

One server process per model and choice (plugin on, off), started as anybody starts it: the engine's own warm-up of
three tokens is on, and a request is sent as soon as the server says that it is ready. Times are of one HTTP request of
128 tokens for one new token. The engine alone loads kernels and captures its tail graphs (behind the first full chunk)
while it serves; with the plugin nothing is left to capture. Needs the engine, one GPU, and the plugin installed.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from sglang_dsv4_graphs.bench.cases import tokens
from sglang_dsv4_graphs.bench.engine import engine_arguments
from sglang_dsv4_graphs.bench.process import ServerProcess, last_lines, raise_on_term
from sglang_dsv4_graphs.bench.throughput import SERVER_MODULE, server_flags
from sglang_dsv4_graphs.bench.variants import EAGER, PLUGIN, Variant
from sglang_dsv4_graphs.cpu_engine.process import free_port

READY = "The server is fired up and ready to roll"
TOKENS, REQUESTS, WITHIN = 128, 12, 1.5


class Client:
    """One connection to a server, opened before anything is timed: what a client's first request costs itself (in
    ``urllib`` an SSL context, some 40 ms) is not the server's. Opened, and no more: ``GET /health`` has the engine run
    a request of one token, and the first that is timed would be the second."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.connect()

    def ask(self, prompt: list[int]) -> float:
        """Milliseconds of one request of one new token."""
        body = json.dumps({"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
        start = time.perf_counter()
        self._connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        text = answer.read()
        ms = round((time.perf_counter() - start) * 1e3, 2)
        if answer.status != 200:
            raise SystemExit(f"POST /generate: {answer.status} {text[:500]!r}")
        return ms


def measure(model: Path, variant: Variant, log: Path, limit_s: float) -> dict[str, Any]:
    port = free_port()
    served = engine_arguments(str(model), **variant.engine_args) | {"host": "127.0.0.1", "port": port}
    start = time.monotonic()
    server = ServerProcess([sys.executable, "-m", SERVER_MODULE, *server_flags(served)], variant.environment, log)
    try:
        while READY not in server.log:
            if server.process.poll() is not None or time.monotonic() - start > limit_s:
                raise SystemExit(f"{model.name}, {variant.name}: no server; its log ends:\n{last_lines(server.log)}")
            time.sleep(0.05)
        up = time.monotonic() - start
        client = Client(port)
        times = [client.ask(tokens(TOKENS, ("first", i))) for i in range(REQUESTS)]
    finally:
        server.end()
    median = statistics.median(times[1:])
    row = {"model": model.name, "variant": variant.name, "up_s": round(up, 1), "ms": times}
    return row | {"first": times[0], "median_of_the_others": median, "ratio": round(times[0] / median, 2)}


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("models", nargs="*", default=["rank", "flash"], help="folders of MODELS")
    ap.add_argument("--limit", type=float, default=300, help="seconds until a server is up")
    ap.add_argument("--plugin-only", action="store_true", help="not the engine alone")
    args = ap.parse_args()
    raise_on_term()
    results = Path(os.environ["RESULTS"])
    results.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in args.models:
        for variant in (PLUGIN,) if args.plugin_only else (PLUGIN, EAGER):
            log = results / f"first-request-{name}-{variant.name}.log"
            rows.append(measure(Path(os.environ["MODELS"]) / name, variant, log, args.limit))
            (results / "first-request.json").write_text(json.dumps(rows, indent=1) + "\n")
            print(json.dumps(rows[-1]), flush=True)
    failed = [r["model"] for r in rows if r["variant"] == PLUGIN.name and r["ratio"] > WITHIN]
    print(f"FAIL {', '.join(failed)}" if failed else "PASS", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
