"""Device memory and the machine, asked from outside the server: the answer costs no context on the GPU."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

GIB = 1024.0
PACKAGES = ("sglang", "torch", "triton")


def used_gib(device: int = 0) -> float | None:
    """GiB in use on the GPU, by every process; from nvidia-smi, else from torch, or None where there is neither."""
    rows = _nvidia_smi("memory.used")
    if device < len(rows) and rows[device].isdecimal():  # a GPU in parts does not tell
        return round(int(rows[device]) / GIB, 3)
    # The engine has imported it; it is not worth seconds where there is none.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(device)
    return round((total - free) / 2**30, 3)


def machine() -> dict[str, Any]:
    """What a number depends on: GPUs, driver, host, Python, packages that bring kernels."""
    return {
        "gpus": _nvidia_smi("name"),
        "driver": next(iter(_nvidia_smi("driver_version")), None),
        "host_cores": os.cpu_count(),
        "host": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _nvidia_smi(query: str) -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    command += ["-i", visible] if visible else []
    try:
        done = subprocess.run(command, text=True, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]
