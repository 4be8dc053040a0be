"""Let torchvision be imported beside a CPU build of torch.

torchvision's extension is linked against CUDA's half of torch. Beside a CPU torch it is skipped without a
word, and then torchvision's Python part fails at import, because it decorates operators that the extension
would have defined. Two schemas, defined just before its first import, are enough.

``engine_venv.py`` copies this file into its own environment, with a ``.pth`` beside it so that child
processes have it as well. It is no part of the package. torch is not imported before somebody imports
torchvision.
"""

import sys
from typing import Any


class Finder:
    """Finds nothing; notices torchvision's import."""

    kept: list[Any] = []  # noqa: RUF012  (an operator lives as long as its library)

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> None:
        if name != "torchvision" or cls.kept:
            return
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        cls.kept.append(library)


sys.meta_path.insert(0, Finder)
