"""A folder in which a fake engine and this project are installed, and the command run with it on the path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.bench import fake_engine
from tests.distributions import PLUGIN, install_distribution

ROOT = Path(__file__).resolve().parent.parent.parent


def make_site(folder: Path) -> Path:
    """Install both into ``folder``, the project as a plain folder on the path has it."""
    (folder / "sglang").mkdir(parents=True)
    modules = {f"sglang/{name}": source for name, source in fake_engine.MODULES.items()}
    install_distribution(folder, "sglang", {}, **modules)
    return install_distribution(folder, "sglang-dsv4-graphs", PLUGIN)


def bench(site: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """``sglang-dsv4-graphs bench`` on the part for a GPU, in the folder above ``site``."""
    path = [str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "sglang_dsv4_graphs", "bench", "--gpu", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)} | environment,
        cwd=site.parent,
        text=True,
        capture_output=True,
        timeout=120,
    )
