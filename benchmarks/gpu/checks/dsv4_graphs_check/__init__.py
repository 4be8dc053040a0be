"""An extension that checks captured graphs inside a real server, at the end of its startup.

Outputs can only be compared within one process: kernels differ from run to run, and random weights amplify
rounding. So this runs where the graphs live: it builds extend steps whose requests own real KV slots, with other
tokens, lengths and positions than the captures had, and records into the JSON file named by
``DSV4_GRAPHS_CHECK``, for each row count: replay against eager on the same padded rows, eager against itself,
replay against itself; and then replays in random order with ``empty_cache()`` between, against their first result.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import random
import threading
import time

import torch

from sglang_dsv4_graphs import hookimpl
from sglang_dsv4_graphs.bank.shadow import largest_difference

ROWS = (1, 2, 63, 64, 65, 100, 128, 129, 200, 256, 257, 300, 700, 1000, 1024, 1500, 2048, 3000, 4096, 5000, 8192)
CHURN = 50


profiler = cProfile.Profile()
control = {"served": None, "profile": False, "profiling": False}


@hookimpl(trylast=True)
def dsv4_graphs_startup(startup):
    control["served"] = startup.served
    if os.environ.get("DSV4_GRAPHS_CONTROL"):
        threading.Thread(target=watch, args=(os.environ["DSV4_GRAPHS_CONTROL"],), daemon=True).start()
    path = os.environ.get("DSV4_GRAPHS_CHECK")
    if path:
        report = {bank.name: Checks(startup, bank).run() for bank in startup.banks if bank.buckets}
        with open(path, "w") as f:
            json.dump(report, f, indent=1)


def watch(path):
    """Obey one-word orders written to ``path``: on, off (banks), profile, dump; the answer replaces the order."""
    while True:
        time.sleep(0.002)
        try:
            with open(path) as f:
                order = f.read().strip()
        except OSError:
            continue
        if order in ("on", "off"):
            control["served"].ready = order == "on"
        elif order == "profile":
            control["profile"] = True
        elif order.startswith("dump "):
            control["profile"] = False
            time.sleep(0.3)
            with open(order[5:], "w") as f:
                stats = pstats.Stats(profiler, stream=f)
                stats.sort_stats("tottime").print_stats(70)
                stats.sort_stats("cumtime").print_stats(90)
        elif order == "counts":
            served = control["served"]
            with open(path + ".counts", "w") as f:
                json.dump(
                    {
                        "replays": [[*k, v] for k, v in served.replays.items()],
                        "fallbacks": [[*k, v] for k, v in served.fallbacks.items()],
                    },
                    f,
                )
        else:
            continue
        with open(path, "w") as f:
            f.write("done")


@hookimpl(tryfirst=True)
def dsv4_graphs_step(step):
    # Profilers work per thread: this hook runs on the one that serves.
    if control["profile"] and not control["profiling"]:
        control["profiling"] = True
        profiler.enable()
    elif control["profiling"] and not control["profile"]:
        control["profiling"] = False
        profiler.disable()


class Checks:
    """Checks of one bank."""

    def __init__(self, startup, bank):
        self.startup, self.bank = startup, bank
        self.runner = startup.dummies._runner
        self.random = random.Random(7)

    def run(self):
        wanted = map(int, os.environ.get("DSV4_GRAPHS_CHECK_ROWS", ",".join(map(str, ROWS))).split(","))
        rows = [r for r in wanted if r <= self.bank.buckets[-1]]
        return {"rows": [self.compare(r) for r in rows], "churn": self.churn(rows)}

    def lengths(self, rows, pick):
        """Request lengths: one to four for the full width, whole tails of at most 128 for the late layers."""
        if self.bank.layers.first > 0:
            return [min(128, rows - at) for at in range(0, rows, 128)]
        parts = min(rows, pick.choice((1, 1, 2, 3, 4)))
        cuts = sorted(pick.sample(range(1, rows), parts - 1)) if parts > 1 else []
        return [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]

    def step(self, rows, seed, visit):
        """Run an extend that gives the bank ``rows`` rows and call ``visit`` where its range starts."""
        pick = random.Random(seed)
        lengths = self.lengths(rows, pick)
        device = self.runner.device
        vocabulary = min(100000, int(self.startup.served.model.config.vocab_size))
        ids = torch.tensor([pick.randrange(3, vocabulary) for _ in range(rows)], device=device)
        batch = self.startup.served.engine.extend_batch(runner=self.runner, lengths=lengths, input_ids=ids)
        table = self.runner.req_to_token_pool.req_to_token
        mapping = self.runner.token_to_kv_pool.full_to_swa_index_mapping
        saved, saved_mapping = table.clone(), mapping.clone()
        # Whole pages per request, as the engine's allocator gives them; the window's slots carry the same numbers.
        page, start, slots = 256, pick.randrange(1, 4), []
        for i, n in enumerate(lengths):
            own = torch.arange(n, device=device) + page * start
            start += -(-n // page)
            table[i, :n] = own.to(table.dtype)
            slots.append(own)
        batch.out_cache_loc = torch.cat(slots)
        mapping[batch.out_cache_loc] = batch.out_cache_loc.to(mapping.dtype)
        seen = {}

        def visited(live, step_batch):
            seen["result"] = visit(live, step_batch)
            return self.bank.outputs(self.bank.bucket_for(live.rows), live.rows)

        try:
            self.startup.visit(self.bank, batch, visited)
        finally:
            table.copy_(saved)
            mapping.copy_(saved_mapping)
        return seen["result"]

    def compare(self, rows):
        def visit(live, batch):
            bucket = self.bank.bucket_for(live.rows)
            self.bank.check(bucket, everything=True)
            replay = self.bank.replay(bucket, live, batch).cloned()
            eager = self.bank.run_eagerly(bucket, live, batch).cloned()
            again = self.bank.run_eagerly(bucket, live, batch).cloned()
            replay_again = self.bank.replay(bucket, live, batch).cloned()
            scale = float(eager.residual.float().abs().mean())
            return {
                "bank": self.bank.name,
                "rows": live.rows,
                "bucket": bucket,
                "requests": batch.batch_size,
                "replay_vs_eager": largest_difference(replay, eager),
                "eager_vs_eager": largest_difference(eager, again),
                "replay_vs_replay": largest_difference(replay, replay_again),
                "mean_abs": scale,
                "finite": bool(torch.isfinite(replay.residual).all()),
            }

        result = self.step(rows, rows, visit)
        print("CHECK", json.dumps(result), flush=True)
        return result

    def churn(self, rows):
        first, worst, count = {}, 0.0, 0
        order = [self.random.choice(rows) for _ in range(CHURN)]
        for r in order:

            def visit(live, batch):
                bucket = self.bank.bucket_for(live.rows)
                return self.bank.replay(bucket, live, batch).cloned()

            result = self.step(r, r, visit)
            if r in first:
                worst = max(worst, largest_difference(first[r], result))
                count += 1
            else:
                first[r] = result
            garbage = [
                torch.full((self.random.randrange(1, 64) << 20,), 7, dtype=torch.uint8, device="cuda") for _ in range(4)
            ]
            del garbage
            torch.cuda.empty_cache()
        result = {"replays": CHURN, "compared": count, "largest_difference": worst}
        print("CHURN", json.dumps(result), flush=True)
        return result
