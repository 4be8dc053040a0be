"""CUDA-graph prefill for DeepSeek-V4.1 on SGLang, as a plugin.

Public API: ``__version__``, and for extensions ``hookimpl`` and the types their hooks receive. Everything else
is internal. Importing this package imports neither torch nor sglang.
"""


from sglang_dsv4_graphs.version import __version__

__all__ = ["__version__"]
