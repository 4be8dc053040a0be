"""An extension for benchmarks/gpu/prefill_graph.py: switches the engine's prefill graph beside the banks.

Does nothing unless ``DSV4_PREFILL_GRAPH_VARIANT`` is set. Then it applies the variant (each takes away, or brings back,
something that a fault beside that graph may hang on: docs/notes/prefill-graph.md), and gives the benchmark's agent two
more orders: ``prefill-graph``, whether the engine's graph takes part in the next steps, and
``paths``, which prefill graphs have replayed. The agent's own switch the banks and count their replays. With
``DSV4_PREFILL_GRAPH_HISTORY`` set to a file, the allocator's history up to the first replay goes there.
"""

from __future__ import annotations

import os
from collections import Counter

import torch

from sglang_dsv4_graphs import hookimpl

VARIANT = os.environ.get("DSV4_PREFILL_GRAPH_VARIANT")
HISTORY = os.environ.get("DSV4_PREFILL_GRAPH_HISTORY")
state = {"begun": False, "graph": True}
paths: Counter = Counter()
kept = []


@hookimpl
def dsv4_graphs_model_built(served):
    # The model exists and nothing is captured yet: the last moment to change how the engine captures.
    if VARIANT and not state["begun"]:
        state["begun"] = True
        give_orders()
        count_prefill_graphs()
        if HISTORY:
            torch.cuda.memory._record_memory_history(max_entries=500000, stacks="python")
        apply_variant(VARIANT)


def give_orders():
    """The agent obeys whatever its listener has a method for."""
    from sglang_dsv4_graphs.bench.listen import Listener

    def order_prefill_graph(listener, on):
        state["graph"] = bool(on)

    def order_paths(listener):
        return {"paths": dict(paths)}

    Listener.order_prefill_graph, Listener.order_paths = order_prefill_graph, order_paths


def dump_history():
    """Who held which GPU memory, up to the first replay of a prefill graph: what a fault's address belonged to."""
    if HISTORY and not paths:
        torch.cuda.memory._dump_snapshot(HISTORY)
        torch.cuda.memory._record_memory_history(enabled=None)


def count_prefill_graphs():
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner
    from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend

    replay, can_run = BreakableCudaGraphBackend.replay, PrefillCudaGraphRunner.can_run_graph

    def counted(self, shape_key, *args, **kwargs):
        dump_history()
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
