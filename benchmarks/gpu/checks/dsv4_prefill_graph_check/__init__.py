"""An extension for benchmarks/gpu/prefill_graph.py: lets banks run beside the engine's prefill graph, and switches.

Does nothing unless ``DSV4_PREFILL_GRAPH_CHECK`` names a control file. Then it lifts the stand-down row of the prefill
graph for this process, applies the variant named by ``DSV4_PREFILL_GRAPH_VARIANT`` (each removes one suspect of the
fault in docs/notes/prefill-graph.md), and obeys orders written to the control file: which of prefill graph and banks
take part in the next steps, and counts.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter

from sglang_dsv4_graphs import hookimpl
from sglang_dsv4_graphs.bank import decide

CONTROL = os.environ.get("DSV4_PREFILL_GRAPH_CHECK")
VARIANT = os.environ.get("DSV4_PREFILL_GRAPH_VARIANT", "base")
# order -> (prefill graph, banks)
MODES = {"both": (True, True), "graph": (True, False), "banks": (False, True), "eager": (False, False)}
state = {"served": None, "graph": True}
paths: Counter = Counter()
kept = []

if CONTROL:
    decide.PREFILL_GRAPH_SHOWN = True


@hookimpl
def dsv4_graphs_model_built(served):
    # The model exists and nothing is captured yet: the last moment to change how the engine captures.
    if CONTROL and state["served"] is None:
        state["served"] = served
        count_prefill_graphs()
        apply_variant(VARIANT)
        threading.Thread(target=obey, daemon=True).start()


def count_prefill_graphs():
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
    from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend

    replay, can_run = BreakableCudaGraphBackend.replay, PrefillCudaGraphRunner.can_run_graph

    def counted(self, shape_key, *args, **kwargs):
        paths[f"prefill-graph {shape_key.size}"] += 1
        return replay(self, shape_key, *args, **kwargs)

    def switched(self, batch):
        return state["graph"] and can_run(self, batch)

    BreakableCudaGraphBackend.replay, PrefillCudaGraphRunner.can_run_graph = counted, switched


def apply_variant(name):
    """Take one suspect away (docs/notes/prefill-graph.md)."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    if name == "grow-late":  # the order in which the fault was seen: growing after the engine's capture
        from sglang_dsv4_graphs.hooks.runtime import Runtime

        pending = Runtime._pending
        Runtime._pending = lambda self, runner: pending(self, runner) if kept else []
        after("capture", PrefillCudaGraphRunner, lambda result: kept.append("captured"))
    elif name == "keep-batches":  # the engine keeps its capture batches under DP attention only
        after("capture_prepare", PrefillCudaGraphRunner, lambda made: kept.append((made, dict(vars(made[0])))))
    elif name == "no-release":  # nothing is handed back to the device
        from sglang_dsv4_graphs.bank.device import Device

        Device.release = lambda self: None
    elif name not in ("base", "private-pool", "no-tail-bank", "no-full-bank"):  # the last three are settings
        raise ValueError(f"unknown variant {name!r}")


def after(name, owner, note):
    original = getattr(owner, name)

    def noted(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        note(result)
        return result

    setattr(owner, name, noted)


def obey():
    """Answer each order in the control file by ``done``."""
    while True:
        time.sleep(0.002)
        try:
            with open(CONTROL) as f:
                order = f.read().strip()
        except OSError:
            continue
        served = state["served"]
        if order in MODES:
            state["graph"], served.ready = MODES[order]
        elif order == "counts":
            found = dict(paths)
            found |= {f"{bank} {bucket}": n for (bank, bucket), n in served.replays.items()}
            found |= {f"fallback {bank}: {reason}": n for (bank, reason), n in served.fallbacks.items()}
            with open(CONTROL + ".counts", "w") as f:
                json.dump({"paths": found, "stand_down": served.stand_down, "ready": served.ready}, f)
        else:
            continue
        with open(CONTROL, "w") as f:
            f.write("done")
