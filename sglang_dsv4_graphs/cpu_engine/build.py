"""Build a runner: process, substitutes, model, weights, in the order in which they depend on each other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sglang_dsv4_graphs.cpu_engine.config import ModelShape, write_config
from sglang_dsv4_graphs.cpu_engine.process import World, init_process
from sglang_dsv4_graphs.cpu_engine.runner import CpuRunner, context_lends_counts
from sglang_dsv4_graphs.cpu_engine.substitutes import apply_substitutes
from sglang_dsv4_graphs.cpu_engine.torchvision_shim import ensure_torchvision
from sglang_dsv4_graphs.cpu_engine.weights import init_weights

# A second thread gains a third on an idle machine, and loses a factor of ten on a busy one.
MAX_THREADS = 1


def build_runner(
    bounded_replay: bool = True,
    layers: int | None = None,
    seed: int = 0,
    *,
    hooks_first: Callable[[], object] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    world: World | None = None,
    shape: ModelShape | None = None,
    device_counts: bool = False,
    slots: int = 4096,
    **server_args: Any,
) -> CpuRunner:
    """Build the engine's model on this machine, ready for steps; about ten seconds, most of them imports.

    Args:
        bounded_replay: decoder SWA bounded replay on or off.
        layers: decoder layers, if not the default shape's.
        seed: of the weights.
        hooks_first: called before the engine's model module is touched, e.g. the engine's ``load_plugins``.
        dtype: of weights and KV. ``torch.float32`` makes different groupings of rows comparable: in bfloat16
            a rounding step can send a row to another expert.
        world: this process's rank, in tests with several.
        shape: the model's shape, instead of ``layers``.
        device_counts: give every batch its count tensors (0.5.23).
        slots: KV slots, for all tokens of all requests.
        server_args: more of the engine's ServerArgs, e.g. ``chunked_prefill_size``.
    """
    if shape is None:
        shape = ModelShape() if layers is None else ModelShape(layers=layers)
    world = world or World()
    torch.set_num_threads(min(MAX_THREADS, torch.get_num_threads()))
    ensure_torchvision()
    with tempfile.TemporaryDirectory(prefix="dsv4_graphs_") as directory:
        model_dir = write_config(Path(directory), shape)
        server_args = {"chunked_prefill_size": 1024, **server_args}
        args = init_process(model_dir, world, enable_decoder_swa_bounded_replay=bounded_replay, **server_args)
        from sglang.srt.utils.hf_transformers_utils import get_config

        config = get_config(str(model_dir), trust_remote_code=False)
    if hooks_first is not None:
        hooks_first()
    apply_substitutes()
    if device_counts and not context_lends_counts():
        raise NotImplementedError("device_counts: this engine's routing takes no row count on a CPU")
    model = _new_model(config, dtype)
    init_weights(model, seed, world.rank)
    return CpuRunner(
        model=model.eval(),
        config=config,
        shape=shape,
        server_args=args,
        bounded_replay=bounded_replay,
        world=world,
        device_counts=device_counts,
        slots=slots,
    )


def _new_model(config: Any, dtype: torch.dtype) -> Any:
    """The engine's model with every parameter in ``dtype``, its weights not set yet."""
    from sglang.srt.models.deepseek_v4 import DeepseekV4Model

    with _default_dtype(dtype):
        model = DeepseekV4Model(config)
    for parameter in model.parameters():
        # Some layers ask for bfloat16 by name. ``Module.to`` would convert the complex rope table too.
        if parameter.dtype is torch.bfloat16:
            parameter.data = parameter.data.to(dtype)
    return model


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(previous)
