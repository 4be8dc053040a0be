"""The demo without a GPU: the engine's real model on the CPU, graphs as tapes.

The plugin comes in as in a server: the engine's ``load_plugins()`` finds its entry point, the model's import
installs it, the end of the engine's startup captures. Then the same steps run twice: with the plugin, and without
after it was uninstalled.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

from sglang_dsv4_graphs import plugin
from sglang_dsv4_graphs.demo import report, steps
from sglang_dsv4_graphs.demo.preflight import DemoError
from sglang_dsv4_graphs.engine.facts import DISTRIBUTION, MODEL_MODULE, PLUGIN_GROUP, installed_version
from sglang_dsv4_graphs.log import logger

if TYPE_CHECKING:
    from sglang_dsv4_graphs.bank.served import ServedModel
    from sglang_dsv4_graphs.cpu_engine import CpuRunner
    from sglang_dsv4_graphs.hooks.install import Installation
    from sglang_dsv4_graphs.hooks.ledger import Patch

SETTINGS = {
    # Few and small graphs: two cores capture them in seconds, and a step above the largest stays cheap.
    "SGLANG_DSV4_FULL_LAYER_GRAPH_MAX_TOKENS": "384",
    "SGLANG_DSV4_DECODER_REPLAY_GRAPH_MAX_ROWS": "256",
    # A shadowed step goes on with eager rows: comparing those with eager ones would show nothing.
    "SGLANG_DSV4_GRAPHS_SHADOW": "0",
}
# More than the largest bucket, so that a server could run the step that is larger than it.
CHUNK = 512


def run() -> int:
    """Run the demo and print it; 0 if all compared equal, else 1.

    Raises:
        DemoError: the plugin did not install or did not capture.
    """
    if MODEL_MODULE in sys.modules or plugin.installation() is not None:
        raise DemoError("the engine's model is already imported: the demo needs a process of its own")
    os.environ.update(SETTINGS)
    show_plugin_log()
    say(f"{DISTRIBUTION} {installed_version()} without a GPU: its DeepseekV4Model, small, on the CPU; graphs are tapes")
    say("settings of this demo: " + " ".join(f"{name}={value}" for name, value in SETTINGS.items()))
    began = time.perf_counter()
    installation, runner = build()
    say(f"plugin loaded and model built ({time.perf_counter() - began:.0f} s); startup captures:")
    status = serve(installation, runner)
    say(f"({time.perf_counter() - began:.0f} s in all)")
    return status


def say(text: str) -> None:
    print(text, flush=True)


def show_plugin_log() -> None:
    """Print what the plugin logs, and of the engine's own log only errors and what loads plugins."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("  %(message)s"))
    for of in (logger, logging.getLogger(PLUGIN_GROUP)):
        of.setLevel(logging.INFO)
        of.addHandler(handler)
        of.propagate = False
    # The engine warns of each GPU feature that this machine lacks; none is used here. Of its hooks only failures tell.
    for name in (DISTRIBUTION, f"{PLUGIN_GROUP}.hook_registry"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning)


def build() -> tuple[Installation, CpuRunner]:
    """Load the plugin through the engine, build the model."""
    import torch

    from sglang_dsv4_graphs.cpu_engine import build_runner

    # In bfloat16 a rounding step can send a row to another expert, and on/off could not be compared.
    runner = build_runner(bounded_replay=True, hooks_first=load_plugin, dtype=torch.float32, chunked_prefill_size=CHUNK)
    installation = plugin.installation()
    if installation is None:
        raise DemoError("the engine loaded its plugins and ours installed nothing; its log line above says why")
    return installation, runner


def load_plugin() -> None:
    """The engine's own loading of plugins; its module is named like the entry-point group."""
    importlib.import_module(PLUGIN_GROUP).load_plugins()


def serve(installation: Installation, runner: CpuRunner) -> int:
    """Capture, run the steps with the plugin and without, print what they came to."""
    from sglang_dsv4_graphs.bank.tape import TapeBackend
    from sglang_dsv4_graphs.demo.compare import Referee
    from sglang_dsv4_graphs.demo.execute import Watch, make_report, run_steps
    from sglang_dsv4_graphs.demo.layer_calls import LayerCalls

    model: Any = runner.model.model
    calls = LayerCalls(model.layers)
    # Poison: each replay first spoils the memory that its segments own, so that a stale value would show as NaN.
    tape = TapeBackend(installation.runtime.engine.current_capture_var, poison=True)
    referee = Referee(tape, runner, calls)
    installation.manager.register(referee)
    served = capture(installation, runner)
    banks = [bank for bank in referee.banks if bank.buckets]
    names = [bank.name for bank in banks]
    ladder = next((bank.buckets for bank in banks if bank.layers.first == model.start_layer), ())
    try:
        planned = steps.plan(ladder)
    except ValueError as e:
        raise DemoError(f"too little was captured, the log lines above say why: {e}") from e
    referee.watching = True
    say(f"{len(planned)} steps with the plugin, then without:")
    on = run_steps(runner, planned, calls, Watch(served, referee))
    left = uninstall(installation)
    off = run_steps(runner, planned, calls)
    reports = [make_report(i, *step) for i, step in enumerate(zip(planned, on, off, strict=True), 1)]
    found = report.problems(reports, names) + [f"uninstalled, but still patched: {t}" for t in left]
    print(report.table(reports, names), *report.LEGEND, sep="\n")
    say(report.summary(reports, names, found))
    return 1 if found else 0


def capture(installation: Installation, runner: CpuRunner) -> ServedModel:
    """The end of the engine's startup, where the plugin captures."""
    runner.startup()
    served = installation.runtime.served(runner.model.model)
    if served is None or not served.ready:
        reason = "the model is unknown to it" if served is None else served.stand_down
        raise DemoError(f"the plugin captured nothing: {reason}")
    return served


def uninstall(installation: Installation) -> list[str]:
    """Uninstall the plugin; the targets that did not get the engine's own objects back."""
    patches = installation.ledger.patches
    plugin.deactivate()
    return [patch.target for patch in patches if not is_restored(patch)]


def is_restored(patch: Patch) -> bool:
    from sglang_dsv4_graphs.hooks.ledger import raw_attribute

    return raw_attribute(patch.owner, patch.attribute) is patch.old
