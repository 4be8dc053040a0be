"""The engine: every fact about it (``facts``) and its functions by our names (``api``)."""

from sglang_dsv4_graphs.engine.api import Engine
from sglang_dsv4_graphs.engine.contract import Contract

__all__ = ["Contract", "Engine"]
