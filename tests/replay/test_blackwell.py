"""What the engine decides by the GPU and a CPU can show: on Blackwell 0.5.22 calls its sources without a break."""

from __future__ import annotations

from functools import wraps
from typing import Any

import pytest

from tests.replay.server import DECODER_REPLAY, DECODER_REPLAY_CAP, FULL_LAYER, FULL_LAYER_CAP, Servers
from tests.replay.story import poisoning, serves

pytestmark = pytest.mark.engine

SETTINGS = {FULL_LAYER_CAP: "192", DECODER_REPLAY_CAP: "128"}


@pytest.mark.parametrize("lean", ["1", "0"])
def test_sources_break_where_the_engine_captures_them(
    lean: str, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read the live step, and no run of ours takes the captured way: only a prefill graph has metadata for it."""
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend

    from sglang_dsv4_graphs.cpu_engine.attention import CpuAttentionBackend

    class Blackwell(CpuAttentionBackend):
        low_ratio_prefill_graph = True

        def forward_low_ratio_sources(self, **kwargs: Any) -> None:
            DeepseekV4AttnBackend.forward_low_ratio_sources(self, **kwargs)

    @wraps(DeepseekV4AttnBackend.forward_low_ratio_sources)  # its signature is checked
    def sources(self: Any, **kwargs: Any) -> None:
        assert not DeepseekV4AttnBackend._low_ratio_in_prefill_graph(self)
        CpuAttentionBackend.forward_low_ratio_sources(self, **kwargs)

    # Before the plugin is installed: its hook goes around this.
    monkeypatch.setattr(DeepseekV4AttnBackend, "forward_low_ratio_sources", sources)
    server = servers.own(
        {**SETTINGS, "SGLANG_DSV4_EAGER_GRAPH_LEAN_BREAKS": lean},
        prepare=lambda runner: setattr(runner.attn_backend, "__class__", Blackwell),
        make_backend=poisoning,
    )
    assert server.log.having("capture-failed") == []
    assert (server.bank(FULL_LAYER).buckets, server.bank(DECODER_REPLAY).buckets) == ((64, 128, 192), (128,))
    serves(server, {"a": 61}, {"a": 40, "b": 3}, {"b": 150, "a": 2}, {"c": 64})
    servers.down()
