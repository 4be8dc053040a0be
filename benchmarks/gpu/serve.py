"""One server process: time to first token of the cases asked for, banks on and off in turn.

Run by ``benchmarks/gpu/run.sh`` on a machine with the engine and a GPU. Prints one JSON line per case and writes all
of them to --json. With --toggle the process alternates both modes request by request (the check extension obeys
``DSV4_GRAPHS_CONTROL``), so that ratios and outputs are of one process; without it the mode is the environment's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from pathlib import Path

CONTROL = os.environ.get("DSV4_GRAPHS_CONTROL")


def order(word):
    """Give the server process one order and wait until it is done."""
    with open(CONTROL + ".new", "w") as f:
        f.write(word)
    os.replace(CONTROL + ".new", CONTROL)
    deadline = time.time() + 30
    while Path(CONTROL).read_text() != "done":
        if time.time() > deadline:
            raise TimeoutError(word)
        time.sleep(0.002)


def tokens(n, seed):
    pick = random.Random(repr(seed))
    return [pick.randrange(3, 120000) for _ in range(n)]


class Server:
    """The engine with dummy weights."""

    def __init__(self, model, extra):
        import sglang

        kwargs = {
            "model_path": model,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "tp_size": 1,
            "random_seed": 1,
            "mem_fraction_static": 0.6,
            "max_running_requests": 16,
            "chunked_prefill_size": 8192,
            "cuda_graph_backend_prefill": "disabled",
            "cuda_graph_backend_decode": "disabled",
            "disable_flashinfer_autotune": True,
            "sampling_backend": "pytorch",
            "watchdog_timeout": 100000,
            "log_level": "info",
        }
        kwargs.update(extra)
        start = time.perf_counter()
        self.engine = sglang.Engine(**kwargs)
        self.up = time.perf_counter() - start

    def ask(self, prompts, new_tokens=1):
        """Milliseconds until every prompt has its ``new_tokens``, token lists, first token's top log-probabilities."""
        start = time.perf_counter()
        outs = self.engine.generate(
            input_ids=prompts,
            return_logprob=True,
            logprob_start_len=-1,
            top_logprobs_num=5,
            sampling_params={"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True},
        )
        ms = (time.perf_counter() - start) * 1e3
        top = [[[round(float(p), 5), t] for p, t, *_ in o["meta_info"]["output_top_logprobs"][0]] for o in outs]
        return ms, [o["output_ids"] for o in outs], top


def cases(names):
    """(name, prompts for repetition r, prompts sent before each repetition)."""
    for n in (64, 128, 256, 1000, 2048, 4096, 8192) if "short" not in names else (128, 1000):
        if "cold" in names:
            yield f"cold {n}", lambda r, n=n: [tokens(n, (n, r))], None
    prefix = tokens(16384, 5)
    for n in (1, 30, 128, 300, 600, 1000, 2000):
        if "hits" in names:
            yield f"hit {n} on 16384", lambda r, n=n: [prefix + tokens(n, (n, r, 1))], None
    for b in (2, 4, 8, 16):
        if "batches" in names:
            yield f"batch {b} x 200", lambda r, b=b: [tokens(200, (b, r, i)) for i in range(b)], None
    if "chunked" in names:
        yield "chunked 32768", lambda r: [tokens(32768, (9, r))], None


def measure(server, args, modes):
    rows = []
    for name, prompts, _ in cases(args.cases.split(",")):
        times = {m: [] for m in modes}
        first = {}
        for r in range(args.reps):
            for m in modes if r % 2 == 0 else modes[::-1]:
                if args.toggle:
                    order(m)
                # A prompt seen before would be a cache hit of everything: each repetition and mode has its own.
                seed = r if args.same else f"{r}{m}"
                ms, out, top = server.ask(prompts(seed))
                times[m].append(round(ms, 2))
                first.setdefault(m, (out, top))
        row = {"case": name}
        for m in modes:
            row[m] = {"ms": times[m], "median": statistics.median(times[m][1:] or times[m])}
        if len(modes) == 2:
            row["ratio"] = round(row["off"]["median"] / row["on"]["median"], 3)
        else:
            row["tops"] = first[modes[0]][1][0]
        rows.append(row)
        print("ROW", json.dumps(row), flush=True)
    return rows


def equal(one, other):
    """Tokens that two answers to the same prompts have in common, place by place."""
    return sum(x == y for p, q in zip(one, other, strict=True) for x, y in zip(p, q, strict=True))


def compare_tokens(server, new_tokens, compared):
    """Decode after prefill: tokens with banks on, off, and off again (eager's own spread), same prompts."""
    rows = []
    for name, prompts, _ in cases(compared):
        result = {}
        for m, key in (("off", "eager"), ("on", "replayed"), ("off", "eager again"), ("on", "replayed again")):
            order(m)
            server.engine.flush_cache()
            _, out, top = server.ask(prompts("t"), new_tokens)
            result[key] = out
            result[key + " top"] = top[0]
        total = sum(len(o) for o in result["eager"])
        row = {
            "case": name,
            "tokens": total,
            "replayed equals eager": equal(result["replayed"], result["eager"]),
            "eager equals itself": equal(result["eager"], result["eager again"]),
            "replayed equals itself": equal(result["replayed"], result["replayed again"]),
            "eager top": result["eager top"],
            "replayed top": result["replayed top"],
        }
        rows.append(row)
        print("TOKENS", json.dumps(row), flush=True)
    return rows


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--model", required=True)
    ap.add_argument("--cases", default="cold")
    ap.add_argument("--reps", type=int, default=7)
    ap.add_argument("--same", action="store_true", help="repeat the same prompts (needs the radix cache off)")
    ap.add_argument("--toggle", action="store_true")
    ap.add_argument("--decode", type=int, default=0, help="also compare this many tokens")
    ap.add_argument("--compare", default="cold,batches", help="cases whose tokens --decode compares")
    ap.add_argument("--profile", help="host profile of 128-token steps, to this file")
    ap.add_argument("--engine-args", default="{}")
    ap.add_argument("--json")
    args = ap.parse_args()
    server = Server(args.model, json.loads(args.engine_args))
    print(f"UP {server.up:.1f}", flush=True)
    first_ms = [round(server.ask([tokens(128, ("first", i))])[0], 2) for i in range(8)]
    report = {"up_s": server.up, "first_requests_ms": first_ms}
    print("FIRST", first_ms, flush=True)
    report["rows"] = measure(server, args, ["on", "off"] if args.toggle else ["asis"])
    if args.toggle:
        order("counts")
        report["counts"] = json.loads(Path(CONTROL + ".counts").read_text())
        order("on")
    if args.profile:
        order("profile")
        for i in range(40):
            server.ask([tokens(128, ("p", i))])
        order("dump " + args.profile)
        server.ask([tokens(128, "last")])
    if args.decode:
        report["decode"] = compare_tokens(server, args.decode, args.compare.split(","))
    if args.json:
        with open(args.json, "w") as f:
            json.dump(report, f)
    server.engine.shutdown()


if __name__ == "__main__":
    main()
