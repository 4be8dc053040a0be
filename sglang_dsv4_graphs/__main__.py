"""``python -m sglang_dsv4_graphs``: the command ``sglang-dsv4-graphs``."""

import sys

from sglang_dsv4_graphs.cli import main

if __name__ == "__main__":
    sys.exit(main())
