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
from sglang_dsv4_graphs.bank.layer_range import RangeInputs
from sglang_dsv4_graphs.bank.shadow import largest_difference
from sglang_dsv4_graphs.bank.views import Takeover

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
        rows = [r for r in ROWS if r <= self.bank.buckets[-1]]
        return {"rows": [self.compare(r) for r in rows], "churn": self.churn(rows)}

    def step(self, rows, seed, visit):
        """Run an extend of ``rows`` tokens in one to four requests and call ``visit`` where the bank's range starts."""
        pick = random.Random(seed)
        parts = min(rows, pick.choice((1, 1, 2, 3, 4)))
        cuts = sorted(pick.sample(range(1, rows), parts - 1)) if parts > 1 else []
        lengths = [b - a for a, b in zip([0, *cuts], [*cuts, rows], strict=True)]
        device = self.runner.device
        ids = torch.tensor([pick.randrange(3, 100000) for _ in range(rows)], device=device)
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

        def takeovers(step):
            def run(state, positions, input_ids, step_batch):
                pre = state.pre if self.bank.layers.first > 0 else None
                live = RangeInputs(state.residual, pre, positions, input_ids)
                seen["result"] = visit(live, step_batch)
                left = self.bank.outputs(self.bank.bucket_for(live.rows), live.rows)
                return self.startup.served.engine.HcState(left.residual, left.pre)

            last = self.bank.layers.last
            overrides = {"end_layer": last, "late_layer_start": None, "decoder_replay_tail": None}
            return [Takeover(self.bank.layers.first, last, run, overrides)]

        try:
            with self.startup.served.forced(takeovers):
                self.startup.dummies.run(batch)
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
