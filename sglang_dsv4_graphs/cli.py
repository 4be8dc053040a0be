"""The command ``sglang-dsv4-graphs``: one subcommand per thing a person wants to know.

A subcommand is a module in ``COMMANDS`` with ``NAME``, a docstring whose first line is its help, ``configure(parser)``
and ``run(options) -> exit status``. They are imported here, so none may import torch or the engine before ``run``.
Exit status: 0 good, 1 what was checked does not hold, 2 it could not be checked.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sglang_dsv4_graphs.bench import command as bench
from sglang_dsv4_graphs.demo import command as demo
from sglang_dsv4_graphs.engine.facts import installed_version
from sglang_dsv4_graphs.version import DISTRIBUTION, __version__

COMMANDS = (demo, bench)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line ``arguments`` (the process's own by default) and return its exit status."""
    options = make_parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; ``options.run`` is the chosen subcommand's."""
    parser = argparse.ArgumentParser(prog=DISTRIBUTION, description="CUDA-graph prefill for DeepSeek-V4.1 on SGLang.")
    engine = installed_version() or "not installed"
    parser.add_argument("--version", action="version", version=f"{DISTRIBUTION} {__version__}, sglang {engine}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        summary = str(command.__doc__).partition("\n")[0]
        subparser = subparsers.add_parser(command.NAME, help=summary, description=summary)
        command.configure(subparser)
        subparser.set_defaults(run=command.run)
    return parser
