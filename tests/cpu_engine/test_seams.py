"""The seams between the stand-in and the plugin: imports, substitutes, hooks, startup, attributes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.fresh import in_fresh_process


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_import_is_free() -> None:
    code = (
        "import sys, sglang_dsv4_graphs.cpu_engine as c, sglang_dsv4_graphs.cpu_engine.process as p\n"
        "assert not {'torch', 'sglang', 'torchvision'} & set(sys.modules), sorted(sys.modules)\n"
        "assert p.World() and c.ModelShape()"
    )
    run_python(code)


def test_unknown_name_is_an_attribute_error() -> None:
    import sglang_dsv4_graphs.cpu_engine as package

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


@pytest.mark.engine
def test_torchvision_imports_beside_a_cpu_torch() -> None:
    code = (
        "import sys\n"
        # Whatever else mends it on this machine is not ours.
        "sys.meta_path[:] = [f for f in sys.meta_path if 'shim' not in type(f).__module__]\n"
        "from sglang_dsv4_graphs.cpu_engine.torchvision_shim import ensure_torchvision\n"
        "ensure_torchvision(); ensure_torchvision()\n"
        "import importlib.util\n"
        "if importlib.util.find_spec('torchvision'): import torchvision.transforms"
    )
    run_python(code)


def in_a_process_with_hooks(order: str) -> tuple[list[str], int]:
    """What hooks saw of a server's startup and first step, and how many layers it has."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_dsv4_graphs.cpu_engine import Request, apply_substitutes, build_runner

    seen: list[str] = []
    model = "sglang.srt.models.deepseek_v4."
    startup = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.finalize_cuda_graph_capture"

    def built(result: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append("built")
        return result

    def noting(what: str) -> Any:
        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(what)
            return original(*args, **kwargs)

        return around

    def hooks() -> None:
        HookRegistry.register(model + "DeepseekV4Model.__init__", built, HookType.AFTER)
        loop = model + "DeepseekV4Model._forward_layers_hc_pre_from_prev"
        HookRegistry.register(loop, noting("loop"), HookType.AROUND)
        HookRegistry.register(model + "MQALayer._compute_kv_to_cache", noting("store"), HookType.AROUND)
        HookRegistry.register(startup, lambda runner: seen.append("startup"), HookType.BEFORE)
        HookRegistry.apply_hooks()

    if order == "hooks last":
        from sglang_dsv4_graphs.cpu_engine.torchvision_shim import ensure_torchvision

        ensure_torchvision()
        apply_substitutes()
        hooks()
        runner = build_runner()
    else:
        runner = build_runner(hooks_first=hooks)
    runner.startup()
    runner.extend([Request.of(20)])
    return seen, runner.shape.layers


@pytest.mark.engine
@pytest.mark.parametrize("order", ["hooks first", "hooks last"])
def test_hooks_and_substitutes_in_either_order(order: str) -> None:
    seen, layers = in_fresh_process(in_a_process_with_hooks, order).value
    assert seen == ["built", "startup", "loop"] + ["store"] * layers


@pytest.mark.engine
def test_missing_kernel_is_an_error() -> None:
    from sglang_dsv4_graphs.cpu_engine import substitutes

    with pytest.raises(AttributeError, match=r"no config\.nothing to substitute"):
        substitutes._replace(type("config", (), {}), "nothing", None)


@pytest.mark.engine
def test_what_stays_the_engines(runner: Any) -> None:
    from sglang.srt.models import deepseek_v4

    model = runner.model.model
    assert type(model) is deepseek_v4.DeepseekV4Model
    for layer in model.layers:
        assert type(layer.self_attn) is deepseek_v4.MQALayer
    owned = [deepseek_v4.MQALayer.forward, deepseek_v4.MQALayer._forward_prepare]
    owned += [deepseek_v4.MQALayer._compute_kv_to_cache, type(model.layers[0]).__init__]
    assert all(f.__module__.startswith("sglang.") for f in owned)
    tail = runner.attn_backend
    tail.init_forward_metadata(runner.batch([_request(10)]))
    assert type(tail.tail_forward_metadata.late_layer_tail).__module__.startswith("sglang.")


@pytest.mark.engine
def test_the_engines_own_tail_runner_is_built_and_never_ready(runner: Any) -> None:
    tail = getattr(runner.model.model, "decoder_replay_tail", None)
    if tail is None:
        pytest.skip("0.5.22 has none")
    runner.extend([_request(1100)])
    assert not tail.runner.warm


@pytest.mark.engine
def test_attributes_of_a_model_runner(runner: Any) -> None:
    assert runner.device == "cpu"
    assert runner.spec_algorithm.is_none()
    assert runner.model_config.context_len == runner.shape.context
    batch = runner.batch([_request(5)])
    runner.kv_index_translator.bind_runner_slots(batch)
    assert runner.prepare_dummy_forward_batch(batch) is batch
    assert not batch.attn_tp_sequence_sharded
    assert (batch.seq_lens_sum, batch.extend_num_tokens, batch.global_num_token_non_padded_cpu) == (5, 5, 5)


def _request(length: int) -> Any:
    from sglang_dsv4_graphs.cpu_engine import Request

    return Request.of(length)
