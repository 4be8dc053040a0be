"""Typed settings, read once from the environment.

The plugin lives in processes that somebody else starts, so the environment is its only configuration. A value
that does not parse must never silently become the default: the person who set it believes that it holds. Names
are public (docs/settings.md) and some were named by the upstream proposal, so they are kept to the letter.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields

# How the names of settings begin, and of nothing of the engine's own: what else begins so is a misspelt setting.
PREFIXES = (
    "SGLANG_DSV4_GRAPH",
    "SGLANG_DSV4_FULL_LAYER_GRAPH",
    "SGLANG_DSV4_DECODER_REPLAY_GRAPH",
    "SGLANG_DSV4_EAGER_GRAPH",
)


class SettingsError(ValueError):
    """A setting's value does not parse; the message names variable, value and what is allowed."""


def _flag(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError


def _at_least(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text.strip())
        if value < minimum:
            raise ValueError
        return value

    return parse


def _setting(name: str, default: object, parse: Callable[[str], object], allowed: str, what: str):  # type: ignore[no-untyped-def]
    return field(default=default, metadata={"name": name, "parse": parse, "allowed": allowed, "what": what})


_FLAG = "0 or 1"


@dataclass(frozen=True)
class Settings:
    """Every setting of the plugin; row counts are tokens of one prefill step. Immutable once read."""

    enabled: bool = _setting("SGLANG_DSV4_GRAPHS", True, _flag, _FLAG, "0: load, install nothing")
    strict: bool = _setting(
        "SGLANG_DSV4_GRAPHS_STRICT",
        False,
        _flag,
        _FLAG,
        "1: a server that cannot install or capture refuses to start",
    )
    allow_untested_engine: bool = _setting(
        "SGLANG_DSV4_GRAPHS_ALLOW_UNTESTED_ENGINE",
        False,
        _flag,
        _FLAG,
        "1: install on an engine version outside the tested list if every contract check passes",
    )
    full_layer_max_tokens: int = _setting(
        "SGLANG_DSV4_FULL_LAYER_GRAPH_MAX_TOKENS",
        -1,
        _at_least(-1),
        "-1 (the chunked prefill size, at most 8192), 0 (off) or a number of tokens",
        "cap of the full-layer bank",
    )
    decoder_replay_max_rows: int = _setting(
        "SGLANG_DSV4_DECODER_REPLAY_GRAPH_MAX_ROWS",
        2048,
        _at_least(0),
        "0 (off) or a number of rows, used in steps of 128",
        "cap of the decoder-replay bank",
    )
    global_pool: bool = _setting(
        "SGLANG_DSV4_EAGER_GRAPH_GLOBAL_POOL",
        True,
        _flag,
        _FLAG,
        "0: a private memory pool and stream for the banks",
    )
    lean_breaks: bool = _setting(
        "SGLANG_DSV4_EAGER_GRAPH_LEAN_BREAKS", True, _flag, _FLAG, "0: breaks as the engine has them"
    )
    merged_kv_store: bool = _setting(
        "SGLANG_DSV4_EAGER_GRAPH_MERGED_KV_STORE",
        True,
        _flag,
        _FLAG,
        "0: KV store and attention break separately",
    )
    debug: bool = _setting(
        "SGLANG_DSV4_DECODER_REPLAY_GRAPH_DEBUG",
        False,
        _flag,
        _FLAG,
        "1: replay segment by segment with a sync after each; a fault names its segment or break",
    )
    shadow: int = _setting(
        "SGLANG_DSV4_GRAPHS_SHADOW",
        0,
        _at_least(0),
        "0 (off) or a number of replayed steps",
        "run that many replayed steps eagerly too, compare, log and count",
    )

    @classmethod
    def names(cls) -> list[str]:
        """Every environment variable that is read."""
        return [f.metadata["name"] for f in fields(cls)]

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Parse ``environ`` (the process's by default).

        Raises:
            SettingsError: naming every variable that does not parse, its value and what is allowed.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, object] = {}
        problems: list[str] = []
        for f in fields(cls):
            text = environ.get(f.metadata["name"])
            if text is None or text.strip() == "":
                continue
            try:
                values[f.name] = f.metadata["parse"](text)
            except ValueError:
                problems.append(f"{f.metadata['name']}={text!r} is not allowed: give {f.metadata['allowed']}")
        if problems:
            raise SettingsError("; ".join(problems))
        return cls(**values)  # type: ignore[arg-type]


def strict_requested(environ: Mapping[str, str] | None = None) -> bool:
    """Whether strict mode is asked for, also when another setting does not parse."""
    text = (os.environ if environ is None else environ).get("SGLANG_DSV4_GRAPHS_STRICT", "")
    try:
        return _flag(text)
    except ValueError:
        return False


def unknown_names(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Set variables that look like ours but are none, each with the nearest known name (or None)."""
    environ = os.environ if environ is None else environ
    known = Settings.names()
    strangers = sorted(n for n in environ if n.startswith(PREFIXES) and n not in known)
    return {n: next(iter(difflib.get_close_matches(n, known, n=1)), None) for n in strangers}
