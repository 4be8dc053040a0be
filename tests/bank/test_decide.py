"""Every reason to stay eager, one by one: none may be lost, and what all ranks know decides."""

from __future__ import annotations

import dataclasses

import pytest

from sglang_dsv4_graphs.bank import decide
from sglang_dsv4_graphs.bank.decide import ServerFacts, StepFacts, rows_reason, server_reason, step_reason

ORDINARY = ServerFacts(device="cuda")
SERVER = {
    "dp_attention": "DP attention",
    "context_parallel": "context parallelism",
    "pipeline_parallel": "pipeline parallelism",
    "two_batch_overlap": "two-batch overlap",
    "unified_kv": "unified KV",
    "hisparse": "HiSparse",
    "lora": "LoRA",
    "weight_offload": "weight offload",
    "expert_all_to_all": "expert all-to-all",
    "memory_saver": "memory saver",
    "pool_borrowing": "graph-pool borrowing",
    "forward_hooks": "forward hooks",
    "decode_only": "disaggregated decode",
    "full_prefill_graph": "full prefill graph",
}
STEP = {
    "speculative": "speculative verify or draft",
    "multimodal": "multimodal input",
    "recording_experts": "expert recorder active",
    "context_parallel": "context-parallel step",
    "separate_global_ids": "global token ids differ from local ones",
    "unbounded_moe_count": "MoE row count that a graph cannot own",
    "other_rows": "rows of another type than the captured ones",
}


def flags(facts: type) -> set[str]:
    return {f.name for f in dataclasses.fields(facts) if f.type == "bool"}


def test_an_ordinary_server_captures() -> None:
    assert server_reason(ORDINARY) is None


@pytest.mark.parametrize(("fact", "start"), SERVER.items())
def test_reasons_of_a_server(fact: str, start: str) -> None:
    reason = server_reason(dataclasses.replace(ORDINARY, **{fact: True}))
    assert reason is not None
    assert reason.startswith(f"{start}: ")


def test_every_fact_of_a_server_has_a_reason() -> None:
    assert flags(ServerFacts) == {*SERVER, "lagged_hyper_connections"}


def test_a_model_without_lagged_hyper_connections() -> None:
    reason = server_reason(dataclasses.replace(ORDINARY, lagged_hyper_connections=False))
    assert reason == "model without lagged hyper-connections: not DeepSeek-V4.1"


@pytest.mark.parametrize("device", ["cpu", "hip", "xpu", "npu"])
def test_other_devices(device: str) -> None:
    facts = ServerFacts(device=device)
    assert server_reason(facts) == f"device {device}: CUDA graphs need an NVIDIA GPU"
    assert server_reason(facts, capturable_devices=("cuda", device)) is None
    assert server_reason(ORDINARY, capturable_devices=()) is not None


def test_the_first_reason_is_given() -> None:
    facts = dataclasses.replace(ORDINARY, lora=True, dp_attention=True, lagged_hyper_connections=False)
    assert str(server_reason(facts)).startswith("DP attention")
    assert "device" in str(server_reason(dataclasses.replace(facts, device="cpu")))


def test_an_ordinary_step_replays() -> None:
    assert step_reason(StepFacts(rows=1)) is None
    assert step_reason(StepFacts(rows=0)) is None  # rows are the bank's matter


@pytest.mark.parametrize(("fact", "reason"), STEP.items())
def test_reasons_of_a_step(fact: str, reason: str) -> None:
    assert step_reason(StepFacts(rows=100, **{fact: True})) == reason


def test_every_fact_of_a_step_has_a_reason() -> None:
    assert flags(StepFacts) == set(STEP)


@pytest.mark.parametrize(
    ("rows", "reason"), [(-1, "no rows"), (0, "no rows"), (1, "more rows than the largest bucket")]
)
def test_reasons_of_rows(rows: int, reason: str) -> None:
    assert rows_reason(rows) == reason


def test_reasons_are_distinct() -> None:
    """They are counter labels: two with one text could not be told apart."""
    steps = [*STEP.values(), decide.NO_ROWS, decide.TOO_MANY_ROWS, decide.NOTHING_CAPTURED, decide.RETIRED]
    servers = [server_reason(dataclasses.replace(ORDINARY, **{fact: True})) for fact in SERVER]
    assert len({*steps, *servers}) == len(steps) + len(servers)


@pytest.mark.parametrize("facts", [ORDINARY, StepFacts(rows=1)])
def test_facts_cannot_be_changed(facts: object) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(facts, dataclasses.fields(facts)[0].name, 2)  # type: ignore[arg-type]
