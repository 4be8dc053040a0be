"""Make ``import torchvision`` work beside a CPU build of torch.

The engine imports torchvision through transformers. torchvision's published wheels hold a library that wants
CUDA's; beside a CPU torch it is skipped silently, the operators it would define do not exist, and the import
dies when the package describes them. Nothing here runs an operator of torchvision: two empty schemas suffice.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# The dispatcher forgets a library's operators when the library object dies.
_libraries: list[Any] = []


def ensure_torchvision() -> None:
    """Import torchvision, defining its missing operators if the first attempt dies for want of them.

    Does nothing where torchvision is absent or imports by itself.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        import torch

        if _libraries or torch.version.cuda is not None:
            raise
        library = torch.library.Library("torchvision", "DEF")
        for schema in _SCHEMAS:
            library.define(schema)
        _libraries.append(library)
        importlib.import_module("torchvision")
