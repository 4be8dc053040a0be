"""Put CPU substitutes where the engine would launch a CUDA or Triton kernel.

The rule: leaves only. The model's loop, its layers, the attention layer's forward and prepare, the decision
to break, the break functions, the tail layout and the tail runner's construction stay the engine's own
objects, and no name that the plugin hooks is touched, so that hooks may be applied before or after.
"""

from __future__ import annotations

import importlib
from typing import Any

from sglang_dsv4_graphs.cpu_engine import kernels
from sglang_dsv4_graphs.cpu_engine.streams import TorchNamespace

_MODEL = "sglang.srt.models.deepseek_v4"
_MHC = "sglang.kernels.ops.layernorm.mhc"
_MOE = "sglang.srt.layers.moe.fused_moe_native"
_REPLAY_TAIL = "sglang.srt.models.deepseek_v4_replay_tail"
_ROW_BUCKETS = "sglang.srt.model_executor.runner.row_bucket_graph_runner"

# The one custom operator on our way; the engine registers its function for CUDA tensors only.
_ATTENTION_OP = "deepseek_v4_attention_with_output"

_applied = False
# A library's registrations end with the library object.
_libraries: list[Any] = []


def apply_substitutes() -> None:
    """Substitute the leaf kernels in this process, for good; a second call does nothing."""
    global _applied
    if _applied:
        return
    _substitute_model()
    _substitute_hyper_connections()
    _replace(importlib.import_module(_MOE), "moe_forward_native", kernels.dense_moe)
    _substitute_replay_tail()
    _run_attention_op_on_cpu()
    _applied = True


def _replace(owner: Any, name: str, value: Any) -> None:
    """Set ``owner.name``, which must exist: a kernel that moved would leave the CUDA one in place."""
    if not hasattr(owner, name):
        raise AttributeError(f"the engine has no {getattr(owner, '__name__', owner)}.{name} to substitute")
    setattr(owner, name, value)


def _substitute_model() -> None:
    model = importlib.import_module(_MODEL)
    # Take the branches that a GPU takes.
    _replace(model, "_is_cuda", True)
    if hasattr(model, "DeepseekV4CudaDecoderLayer"):
        _replace(model, "DeepseekV4DecoderLayer", model.DeepseekV4CudaDecoderLayer)
    _replace(model, "_fused_wo_a_arch_supported", lambda: False)
    _replace(model, "torch", TorchNamespace())
    for kernel in (kernels.fused_rope_inplace, kernels.fused_q_norm_rope, kernels.fused_norm_rope_inplace):
        _replace(model, kernel.__name__, kernel)
    # The CUDA path rotates by ``freqs_cis``; the rotary module is built and never called.
    _replace(model, "get_rope_wrapper", _no_rotary_module)


def _no_rotary_module(*args: Any, **kwargs: Any) -> Any:
    from torch import nn

    return nn.Identity()


def _substitute_hyper_connections() -> None:
    mhc = importlib.import_module(_MHC)
    _replace(mhc, "hc_split_sinkhorn", kernels.hc_split_sinkhorn)
    _replace(mhc, "mhc_post", kernels.mhc_post)
    # 0.5.22 calls it hc_combine.
    _replace(mhc, "mhc_combine" if hasattr(mhc, "mhc_combine") else "hc_combine", kernels.mhc_combine)


def _substitute_replay_tail() -> None:
    """Let the engine build its own tail runner (0.5.23), which never becomes ready: it needs CUDA graphs."""
    try:
        tail = importlib.import_module(_REPLAY_TAIL)
    except ModuleNotFoundError:
        return
    _replace(tail, "is_cuda", lambda: True)
    _replace(importlib.import_module(_ROW_BUCKETS).RowBucketGraphRunner, "ready", _never_ready)


def _never_ready(runner: Any, num_tokens: int) -> bool:
    return False


def _run_attention_op_on_cpu() -> None:
    """Let the attention break's operator take CPU tensors, by the engine's own function for CUDA ones."""
    import torch

    overload = getattr(torch.ops.sglang, _ATTENTION_OP).default
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    library = torch.library.Library("sglang", "IMPL")
    library.impl(_ATTENTION_OP, lambda *args: overload.redispatch(cuda, *args), "CPU")
    _libraries.append(library)
