"""The choices a user has, as server processes: plugin on or off, the engine's own prefill graph on or off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_dsv4_graphs.bench.errors import BenchError

SWITCH = "SGLANG_DSV4_GRAPHS"
PREFILL_BACKEND = "cuda_graph_backend_prefill"


@dataclass(frozen=True)
class Variant:
    """One choice: whether the plugin installs, and the engine arguments that make the choice."""

    name: str
    plugin: bool
    engine_args: dict[str, Any] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {SWITCH: "1" if self.plugin else "0"}


EAGER = Variant("eager", False, {PREFILL_BACKEND: "disabled"})
PLUGIN = Variant("plugin", True, {PREFILL_BACKEND: "disabled"})
VARIANTS = (
    EAGER,
    Variant("prefill-graph", False, {PREFILL_BACKEND: "breakable"}),
    PLUGIN,
    Variant("plugin+prefill-graph", True, {PREFILL_BACKEND: "breakable"}),
)


def parse_variants(text: str) -> list[Variant]:
    """``eager,plugin`` as variants, in that order.

    Raises:
        BenchError: naming what is no variant, and the variants there are.
    """
    known = {v.name: v for v in VARIANTS}
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names or len(set(names)) != len(names):
        problem = ", ".join(unknown) + " is no variant" if unknown else "give each variant once"
        raise BenchError(f"--variants {text!r}: {problem}; there are {', '.join(known)}")
    return [known[name] for name in names]


def schedule(variants: Sequence[Variant], rounds: int) -> list[tuple[int, Variant]]:
    """(round, variant) in the order of running: every second round is reversed, so that drift hits no one variant."""
    order = []
    for number in range(1, rounds + 1):
        order += [(number, v) for v in (variants if number % 2 else list(reversed(variants)))]
    return order
