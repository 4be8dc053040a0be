"""A stand-in for the engine package, small enough for CI and sensitive to what a benchmark could get wrong.

Its answers depend on the prompt, on what it answered before (a cached prompt is quick), and on whether the plugin is
on; its agent is the real one, on a runner that the fake steps through. Its process's clock moves only when it says
so, so that times are the same on a busy machine. Written into a folder as the package ``sglang``.
"""

from __future__ import annotations

_ENGINE = '''
import gzip, hashlib, json, os, signal, subprocess, sys, time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

__version__ = "0.5.23"
ON = os.environ.get("SGLANG_DSV4_GRAPHS") == "1"
now = [0]
time.perf_counter_ns = lambda: now[0]
time.perf_counter = lambda: now[0] / 1e9


def spend(ms):
    now[0] += round(ms * 1e6)


class Mode:
    def is_extend(self):
        return True


class Runner:
    """What the agent is put in front of."""

    def __init__(self, served):
        self.served = served
        self.attn_backend = SimpleNamespace(init_forward_metadata=lambda batch: spend(0.25))

    def forward(self, batch):
        self.attn_backend.init_forward_metadata(batch)
        return self.served.run_loop(batch)


class Served:
    stand_down = None

    def __init__(self):
        self.ready = ON
        self.replays, self.fallbacks = Counter(), Counter()
        self.log = SimpleNamespace(rank=0)
        self.settings = None

    def run_loop(self, batch):
        self.replays["full-layer", 128] += self.ready
        spend(2 if self.ready else 12)
        return "replayed" if self.ready else "eager"


class Rows(list):
    shape = property(lambda self: (len(self),))


class Engine:
    def __init__(self, **arguments):
        json.dumps(arguments)
        fault = os.environ.get("FAKE_FAULT")
        if fault == "start" and ON:
            raise RuntimeError("out of memory, says the fake")
        spend(3000)
        self.seen = set()
        self.asked = 0
        self.fault = fault
        self.served = Served()
        self.runner = Runner(self.served)
        if ON and fault != "captures nothing":
            print("dsv4-graphs: captured bank=full-layer graphs=2 rows=64..128 segments=9 gib=0.250 seconds=1.500")
            print("dsv4-graphs: captured bank=total graphs=2 segments=9 gib=0.250 seconds=2.000", flush=True)
        elif ON:
            print('dsv4-graphs: eager reason="prefill_graph"', flush=True)
        if os.environ.get("DSV4_GRAPHS_BENCH_AGENT") and ON:
            import sglang_dsv4_graphs.bench.agent as agent

            dummies = SimpleNamespace(_runner=self.runner)
            agent.dsv4_graphs_startup(SimpleNamespace(served=self.served, dummies=dummies, banks=[]))

    def generate(self, input_ids, sampling_params, **logprobs):
        self.asked += 1
        if self.fault == "killed" and self.asked > 18:
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *sys.argv])
            os.kill(os.getpid(), signal.SIGKILL)
        # The way there and back; every third request takes longer.
        spend(1 if self.asked % 3 else 1.5)
        return [self.answer(ids, sampling_params["max_new_tokens"], logprobs) for ids in input_ids]

    def answer(self, ids, new_tokens, logprobs):
        key = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
        prefix = json.dumps(ids[:16384]) if len(ids) > 16384 else None
        cached = len(ids) - 1 if key in self.seen else 16384 if prefix in self.seen else 0
        self.seen |= {key, json.dumps(ids)} if len(ids) == 16384 else {key}
        how = self.runner.forward(SimpleNamespace(forward_mode=Mode(), input_ids=Rows(ids)))
        # The first three tokens are the prompt's; from then on a replay goes its own way.
        first = int(key[:6], 16)
        tokens = [first + i + (7 if how == "replayed" and i >= 3 else 0) for i in range(new_tokens)]
        meta = {"cached_tokens": cached}
        if logprobs.get("top_logprobs_num"):
            shift = 0.25 if how == "replayed" else 0.0
            meta["output_top_logprobs"] = [[[-1.0 - shift, first, None], [-2.0, first + 1, None]]]
        return {"output_ids": tokens, "meta_info": meta}

    def flush_cache(self):
        self.seen.clear()

    def start_profile(self, output_dir, activities):
        self.traces = Path(output_dir)

    def stop_profile(self):
        spans = [("kernel", 0, 3000), ("kernel", 2000, 2000), ("gpu_memcpy", 6000, 500), ("cpu_op", 0, 90000)]
        events = [{"cat": c, "ts": ts, "dur": dur, "name": c} for c, ts, dur in spans]
        with gzip.open(self.traces / "trace.json.gz", "wt") as f:
            json.dump({"traceEvents": events}, f)

    def shutdown(self):
        print("fake engine is down", flush=True)
'''

_LAUNCH_SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

if os.environ.get("FAKE_FAULT") == "no server":
    sys.exit("no such flag, says the fake")
flags = sys.argv[1:]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"flags": flags, "plugin": os.environ["SGLANG_DSV4_GRAPHS"]}).encode())


HTTPServer(("127.0.0.1", int(flags[flags.index("--port") + 1])), Handler).serve_forever()
"""

_BENCH_SERVING = """
import json, sys, urllib.request
from pathlib import Path

given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
with urllib.request.urlopen(f"http://127.0.0.1:{given['--port']}/") as answer:
    served = json.load(answer)
assert served["flags"][served["flags"].index("--tokenizer-path") + 1] == given["--tokenizer"]
assert len(json.loads((Path(given["--tokenizer"]) / "tokenizer.json").read_text())["model"]["vocab"]) == 129280
assert given["--random-output-len"] == "3"
fast = served["plugin"] == "1"
row = {"completed": int(given["--num-prompts"]), "request_throughput": 20.0 if fast else 10.0, "p99_ttft_ms": 5}
Path(given["--output-file"]).write_text(json.dumps(row) + "\\n")
"""

MODULES = {"__init__": _ENGINE, "launch_server": _LAUNCH_SERVER, "bench_serving": _BENCH_SERVING}
