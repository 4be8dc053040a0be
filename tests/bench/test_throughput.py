"""The mixed load's commands are ones that the engine takes, and its tokenizer one that it reads, offline."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sglang_dsv4_graphs.bench import throughput
from sglang_dsv4_graphs.bench.engine import engine_arguments
from sglang_dsv4_graphs.bench.errors import BenchError
from sglang_dsv4_graphs.bench.gpu import vocabulary_of
from sglang_dsv4_graphs.bench.variants import VARIANTS


def test_arguments_become_flags() -> None:
    given = {"a_b": 1, "on": True, "off": False, "none": None, "many": [1, 2], "config": {"x": 1}}
    flags = ["--a-b", "1", "--on", "--many", "1", "2", "--config", '{"x": 1}']
    assert throughput.server_flags(given) == flags


@pytest.mark.engine
@pytest.mark.parametrize("variant", VARIANTS, ids=[v.name for v in VARIANTS])
def test_the_engine_s_server_takes_the_flags(variant: object, tmp_path: Path) -> None:
    from sglang_dsv4_graphs.cpu_engine.torchvision_shim import ensure_torchvision

    ensure_torchvision()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    arguments = engine_arguments("model", **variant.engine_args)  # type: ignore[attr-defined]
    command = throughput.server_command(arguments, tmp_path / "tokenizer", 1234)
    parsed = parser.parse_args(command[3:])
    assert (parsed.port, parsed.tokenizer_path) == (1234, str(tmp_path / "tokenizer"))
    assert parsed.chunked_prefill_size == 8192
    # With it answers have no text, and the client would time no first token.
    assert not parsed.skip_tokenizer_init


class Anything(ModuleType):
    """Has every attribute, and none that could be called."""

    def __getattr__(self, name: str) -> object:
        return object()


@pytest.mark.engine
def test_the_load_is_made_without_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_dsv4_graphs.cpu_engine.torchvision_shim import ensure_torchvision

    ensure_torchvision()
    # The package that would download; the engine imports it for its other loads, and no lean environment has it.
    monkeypatch.setitem(sys.modules, "datasets", Anything("datasets"))
    from sglang.benchmark import datasets, serving, utils

    for name, value in throughput.OFFLINE.items():
        monkeypatch.setenv(name, value)
    throughput.write_tokenizer(tmp_path / "tokenizer", 5000)
    load = throughput.Load(requests=20, input_tokens=50, output_tokens=4)
    command = throughput.client_command(load, tmp_path / "tokenizer", 1234, tmp_path / "out.jsonl")
    seen = []
    monkeypatch.setattr(serving, "run_benchmark", seen.append)
    monkeypatch.setattr("sys.argv", command[2:])
    serving.cli_main()
    (args,) = seen
    tokenizer = utils.get_tokenizer(args.tokenizer)
    assert tokenizer.vocab_size == 5000
    assert tokenizer.encode(tokenizer.decode([7, 8, 4999])) == [7, 8, 4999]
    rows = datasets.get_dataset(args, tokenizer)
    assert len(rows) == 20
    assert all(len(r.prompt) == r.prompt_len <= 50 and r.output_len <= 4 for r in rows)
    assert all(0 <= token < 5000 for r in rows for token in r.prompt)
    # Mixed: not all of one length.
    assert len({r.prompt_len for r in rows}) > 3


@pytest.mark.engine
def test_a_server_encodes_chats_with_the_tokenizer(tmp_path: Path) -> None:
    """0.5.23 does when it starts, and ends where it cannot."""
    from sglang_dsv4_graphs.cpu_engine.torchvision_shim import ensure_torchvision

    ensure_torchvision()
    pytest.importorskip("sglang.srt.entrypoints.openai.serving_deepseek_recipe", reason="0.5.22 encodes chats itself")
    from sglang.srt.entrypoints.openai.serving_deepseek_recipe import DeepSeekRecipeChatEncodingAdapter
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    throughput.write_tokenizer(tmp_path, 5000)
    adapter = DeepSeekRecipeChatEncodingAdapter(
        chat_encoding_spec="dsv41",
        tokenizer=get_tokenizer(str(tmp_path)),
        reasoning_parser=None,
        tool_call_parser=None,
        chat_hooks=None,
        default_chat_template_kwargs=None,
    )
    asked = {"messages": [{"role": "user", "content": "t7 t4999"}], "thinking": True}
    ids = adapter.deepseek_recipe.encode(asked)
    assert {0, 2, 3, 4, 7} <= set(ids) <= set(range(5000))


def test_a_model_that_does_not_tell_its_vocabulary_is_named(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"config\.json has no vocab_size: --throughput needs it"):
        vocabulary_of(str(tmp_path))
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 77}}')
    assert vocabulary_of(str(tmp_path)) == 77
