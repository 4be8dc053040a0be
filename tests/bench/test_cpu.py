"""The counterpart without a GPU runs, small: its report has its shape, and every kind of break occurs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.distributions import PLUGIN, install_distribution
from tests.fresh import in_fresh_process
from tests.replay.server import DECODER_REPLAY_CAP, FULL_LAYER_CAP

BREAKS = ["break: attention", "break: low-ratio sources"]


def run_small(out: str) -> int:
    """In a fresh process: the command as a person runs it where torch sees no GPU, on one length."""
    from sglang_dsv4_graphs.bench import cpu
    from sglang_dsv4_graphs.cli import main
    from sglang_dsv4_graphs.demo import cpu as demo

    demo.SETTINGS |= {FULL_LAYER_CAP: "64", DECODER_REPLAY_CAP: "128"}
    run = cpu.run
    cpu.run = lambda out, requests: run(out, requests, lengths=(40,))
    return main(["bench", "--cpu", "--requests", "2", "--out", out])


@pytest.mark.engine
def test_every_part_of_a_replayed_step_is_reported(tmp_path: Path) -> None:
    site = install_distribution(tmp_path / "site", "sglang-dsv4-graphs", PLUGIN)
    done = in_fresh_process(run_small, str(tmp_path / "out"), path=[site])
    assert done.value == 0, done.output
    record = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert (record["mode"], record["state"]) == ("cpu", "complete")
    (row,) = record["processes"][0]["breakdown"]
    assert (row["tokens"], len(row["steps"])) == (40, 2)
    for bank in ("full-layer", "decoder-replay"):
        parts = {p["part"]: p for p in row["parts"] if p["bank"] == bank}
        assert [name for name in parts if name.startswith("break")] == BREAKS
        assert parts["segment launches"]["count"] == sum(parts[name]["count"] for name in BREAKS) + 1
        assert all(
            p["us"] > 0 and p["mean_us"] == pytest.approx(p["us"] / p["count"], abs=0.01) for p in parts.values()
        )
        assert {"bucket and guard check", "copy-in", "output hand-off"} <= set(parts)
    step = {p["part"]: p["us"] for p in row["parts"] if p["bank"] is None}
    assert {"engine's metadata", "layer loop outside the banks"} <= set(step)
    # No client asked, so nobody's request path can be told.
    assert not [part for part in step if "request path" in part]
    assert re.search(r"^break: attention +full-layer +[45] ", done.output, flags=re.MULTILINE)
    assert "a timer costs" in done.output
