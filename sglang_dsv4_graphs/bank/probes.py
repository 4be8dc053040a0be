"""The plugin's own guarded buffers: what captured kernels are known to read by address and others own."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from sglang_dsv4_graphs.bank.guard import GuardedBuffer, Weight
from sglang_dsv4_graphs.extend import Probe, hookimpl


class KnownBuffers:
    """Guard implementation for the request window's workspace and flashinfer's workspace cache."""

    @hookimpl
    def dsv4_graphs_guard(self, probe: Probe) -> Iterable[GuardedBuffer]:
        yield from _request_window(probe)
        yield from _window_keys(probe)
        yield from _flashinfer_cache()


def _request_window(probe: Probe) -> Iterable[GuardedBuffer]:
    pool = probe.attn_backend.token_to_kv_pool

    def workspace() -> torch.Tensor | None:
        window = getattr(pool, "request_window", None)
        held = None if window is None else window.workspace
        return None if held is None else held.kv_buffer[0]

    if getattr(pool, "request_window", None) is not None:
        yield GuardedBuffer("request-window-workspace", workspace)


def _window_keys(probe: Probe) -> Iterable[GuardedBuffer]:
    """The window's K pool of each layer, which captured stores write to.

    Not cheap: it is allocated once, and asking for it waits for a layer that a host cache is still loading.
    """
    pool = probe.attn_backend.token_to_kv_pool
    if hasattr(pool, "get_swa_key_buffer_radix"):
        for layer in range(probe.model.start_layer, probe.model.end_layer):
            yield GuardedBuffer(f"window-k-{layer}", partial(pool.get_swa_key_buffer_radix, layer), cheap=False)


def _flashinfer_cache() -> Iterable[GuardedBuffer]:
    """Buffers that flashinfer keeps by name and grows on demand; only those that exist when captures begin."""
    utils: Any = sys.modules.get("flashinfer.utils")
    cache = getattr(utils, "_cache_buf", None)
    if not isinstance(cache, dict):
        return
    for key in list(cache):
        yield GuardedBuffer(f"flashinfer:{key[0]}", lambda key=key: cache.get(key))  # type: ignore[misc]


def model_weights(model: torch.nn.Module, first: int, last: int) -> list[Weight]:
    """Parameters and buffers of layers ``[first, last)``, by name."""
    found: list[Weight] = []
    for path, module in _modules(model, first, last):
        for slots in (module._parameters, module._buffers):
            found += [Weight(f"{path}.{key}", slots, key) for key, t in slots.items() if t is not None]
    return found


def derived_tensors(model: torch.nn.Module, first: int, last: int) -> Iterator[GuardedBuffer]:
    """Tensors that modules of layers ``[first, last)`` keep as plain attributes, alone or in a tuple or list.

    The engine derives some from weights (splits, transposed or padded copies) and makes them anew in an update. Others
    may change from step to step without any graph reading them, so they are compared after an update only.
    """
    for path, module in _modules(model, first, last):
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield GuardedBuffer(f"{path}.{key}", partial(_attribute, module, key), cheap=False)
            elif isinstance(value, tuple | list):
                for i in (i for i, part in enumerate(value) if isinstance(part, torch.Tensor)):
                    yield GuardedBuffer(f"{path}.{key}[{i}]", partial(_part, module, key, i), cheap=False)


def _modules(model: torch.nn.Module, first: int, last: int) -> Iterator[tuple[str, torch.nn.Module]]:
    for i in range(first, last):
        layer = model.layers[i]  # type: ignore[index]
        if isinstance(layer, torch.nn.Module):
            yield from layer.named_modules(prefix=f"layers.{i}")


def _attribute(module: torch.nn.Module, key: str) -> Any:
    return vars(module).get(key)


def _part(module: torch.nn.Module, key: str, index: int) -> Any:
    whole = vars(module).get(key)
    return None if whole is None else whole[index]
