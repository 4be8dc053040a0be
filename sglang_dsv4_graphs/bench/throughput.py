"""Throughput of a mixed load: the engine's own ``sglang.bench_serving`` against its ``sglang.launch_server``.

Nothing is downloaded: the load is the engine's dataset ``random-ids`` (token ids counted up from a random start, sent
as ids), and the tokenizer, which both sides want for counting and for text in the answers, is a local one made here
with a word per token id. The dataset ``random`` would fetch ShareGPT, and a server without tokenizer answers without
text, by which the client times its first tokens.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dsv4_graphs.bench.errors import BenchError
from sglang_dsv4_graphs.bench.process import ServerProcess, how_it_ended, last_lines, run_to_end
from sglang_dsv4_graphs.bench.variants import Variant
from sglang_dsv4_graphs.cpu_engine.process import free_port

SERVER_MODULE, CLIENT_MODULE = "sglang.launch_server", "sglang.bench_serving"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
POLL_S = 0.25
# What an empty chat prompt is made of (the package deepseek-recipe 0.2.0): the engine encodes one when it starts.
CHAT_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<think>")
KEPT = (
    "completed",
    "duration",
    "request_throughput",
    "input_throughput",
    "output_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_itl_ms",
)


@dataclass(frozen=True)
class Load:
    """A mixed load: lengths uniform from 1 to ``input_tokens`` and ``output_tokens``, ``at_once`` in flight."""

    requests: int = 200
    input_tokens: int = 4096
    output_tokens: int = 16
    at_once: int = 16


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A tokenizer of ``vocabulary`` ids, the chat's tokens and then a word each, that needs no file but these two."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [*CHAT_TOKENS, *(f"t{i}" for i in range(len(CHAT_TOKENS), vocabulary))]
    vocab = {word: i for i, word in enumerate(words)}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": vocab[word], "content": word, "special": True} | plain for word in CHAT_TOKENS],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": words[-1]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20, "unk_token": words[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def server_flags(arguments: dict[str, Any]) -> list[str]:
    """Engine arguments as flags of ``sglang.launch_server``; a False or None flag is left out."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            flags.append(flag)
        elif isinstance(value, (list, tuple)):
            flags += [flag, *map(str, value)]
        else:
            flags += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def server_command(arguments: dict[str, Any], tokenizer: Path, port: int) -> list[str]:
    served = {k: v for k, v in arguments.items() if k != "skip_tokenizer_init"}
    # The server's own warm-up decodes, and a first decode compiles for longer than it waits; the client warms up.
    served |= {"skip_server_warmup": True, "tokenizer_path": str(tokenizer), "host": "127.0.0.1", "port": port}
    return [sys.executable, "-m", SERVER_MODULE, *server_flags(served)]


def client_command(load: Load, tokenizer: Path, port: int, output: Path) -> list[str]:
    options = {
        "backend": "sglang",
        "host": "127.0.0.1",
        "port": port,
        # Looked at for a chat template only: a folder, so that nobody asks the network for it.
        "model": tokenizer,
        "tokenizer": tokenizer,
        "dataset-name": "random-ids",
        "num-prompts": load.requests,
        "random-input-len": load.input_tokens,
        "random-output-len": load.output_tokens,
        "random-range-ratio": 0.0,
        "max-concurrency": load.at_once,
        "seed": 1,
        "output-file": output,
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return [sys.executable, "-m", CLIENT_MODULE, *flags, "--tokenize-prompt", "--disable-tqdm"]


def measure(variant: Variant, arguments: dict[str, Any], load: Load, out: Path, limit_s: float) -> dict[str, Any]:
    """Serve ``variant`` and put ``load`` on it; the client's numbers.

    Raises:
        BenchError: the server did not come up, or the client failed; with the end of the log.
    """
    tokenizer, port = out / "tokenizer", free_port()
    log, client_log = out / f"throughput-{variant.name}.log", out / f"throughput-{variant.name}-client.log"
    output = out / f"throughput-{variant.name}.jsonl"
    output.unlink(missing_ok=True)
    deadline = time.monotonic() + limit_s
    server = ServerProcess(server_command(arguments, tokenizer, port), variant.environment, log)
    try:
        _wait_until_healthy(server, port, deadline, limit_s)
        left = max(1.0, deadline - time.monotonic())
        code = run_to_end(client_command(load, tokenizer, port, output), OFFLINE, client_log, limit_s=left)
    finally:
        server.end()
    rows = output.read_text().splitlines() if output.exists() else []
    if code != 0 or not rows:
        text = client_log.read_text(errors="replace")
        raise BenchError(f"{CLIENT_MODULE} {how_it_ended(code, left)}; its log ends:\n{last_lines(text)}")
    return {"variant": variant.name} | {key: json.loads(rows[-1]).get(key) for key in KEPT}


def _wait_until_healthy(server: ServerProcess, port: int, deadline: float, limit_s: float) -> None:
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        with suppress(subprocess.TimeoutExpired):
            server.process.wait(POLL_S)
    how = how_it_ended(server.process.poll(), limit_s)
    raise BenchError(f"{SERVER_MODULE} did not come up: it {how}; its log ends:\n{last_lines(server.log)}")
