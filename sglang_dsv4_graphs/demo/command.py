"""Run the plugin in the real engine, with and without graphs, and compare.

Without a GPU: the engine's own model on the CPU, graphs as tapes, every replay compared with an eager run of the same
padded rows. With a CUDA GPU: a server with dummy weights, times to the first token with the plugin and without.
"""

from __future__ import annotations

import argparse
import sys

from sglang_dsv4_graphs.arguments import positive
from sglang_dsv4_graphs.demo.preflight import DemoError, check_installed

NAME = "demo"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: cuda if torch sees a GPU, else cpu",
    )
    parser.add_argument(
        "--repeats", type=positive, default=7, metavar="N", help="cuda: requests per prompt length (default 7)"
    )


def run(options: argparse.Namespace) -> int:
    """Run the demo; 0: everything compared equal, 1: something differed, 2: it could not run."""
    try:
        check_installed()
        if options.device == "cuda" or (options.device == "auto" and _has_gpu()):
            from sglang_dsv4_graphs.demo import gpu

            return gpu.run(options.repeats)
        from sglang_dsv4_graphs.demo import cpu

        return cpu.run()
    except DemoError as e:
        print(f"demo: cannot run: {e}", file=sys.stderr)
        return 2


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available() and torch.version.cuda is not None
