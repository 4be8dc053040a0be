"""Runs planned steps on a CPU runner and notes what each came to."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sglang_dsv4_graphs.bank.served import ServedModel
from sglang_dsv4_graphs.cpu_engine import CpuRunner, Request
from sglang_dsv4_graphs.demo.compare import Referee
from sglang_dsv4_graphs.demo.layer_calls import LayerCalls
from sglang_dsv4_graphs.demo.report import BankPart, StepReport
from sglang_dsv4_graphs.demo.steps import PlannedStep, describe_parts, prompt_lengths


@dataclass(frozen=True)
class Watch:
    """What tells of the plugin during a step."""

    served: ServedModel
    referee: Referee


@dataclass(frozen=True)
class Ran:
    """One step as it ran; without the plugin there are neither replays nor fallbacks."""

    prefixes: list[int]
    tail: Tensor
    calls: int
    replays: Counter[tuple[str, int]]
    fallbacks: Counter[tuple[str, str]]
    differences: dict[str, float]


class ImageInputs:
    """Multimodal inputs of a request with an image, as far as a step's batch asks for them."""

    def contains_image_inputs(self) -> bool:
        return True

    def contains_audio_inputs(self) -> bool:
        return False

    def contains_video_inputs(self) -> bool:
        return False


def run_steps(
    runner: CpuRunner, planned: Sequence[PlannedStep], calls: LayerCalls, watch: Watch | None = None
) -> list[Ran]:
    """Run ``planned`` from empty pools; equal arguments give equal tokens and slots."""
    runner.reset_pools()
    lengths = prompt_lengths(planned)
    requests = {name: Request.of(n, zlib.crc32(name.encode())) for name, n in lengths.items()}
    return [_run_step(runner, step, requests, calls, watch) for step in planned]


def _run_step(
    runner: CpuRunner,
    step: PlannedStep,
    requests: dict[str, Request],
    calls: LayerCalls,
    watch: Watch | None,
) -> Ran:
    taking = [requests[name] for name, _ in step.parts]
    prefixes = [request.done for request in taking]
    batch = runner.batch(taking, [tokens for _, tokens in step.parts])
    if step.image:
        batch.mm_inputs = [ImageInputs() for _ in taking]
    replays, fallbacks = _counters(watch)
    before = calls.count
    tail = runner.forward(batch).tail.clone()
    replays_after, fallbacks_after = _counters(watch)
    return Ran(
        prefixes,
        tail,
        calls.count - before,
        replays_after - replays,
        fallbacks_after - fallbacks,
        {} if watch is None else watch.referee.take(),
    )


def _counters(watch: Watch | None) -> tuple[Counter[Any], Counter[Any]]:
    if watch is None:
        return Counter(), Counter()
    return Counter(watch.served.replays), Counter(watch.served.fallbacks)


def make_report(number: int, step: PlannedStep, on: Ran, off: Ran) -> StepReport:
    """Lay the same step with the plugin and without side by side."""
    return StepReport(
        number=number,
        what=step.what,
        requests=describe_parts(on.prefixes, [tokens for _, tokens in step.parts]),
        rows=step.rows,
        tail_rows=on.tail.shape[0],
        parts={bank: BankPart(bucket, on.differences.get(bank)) for bank, bucket in on.replays},
        reasons=tuple(f"{bank}: {reason}" for bank, reason in on.fallbacks),
        calls_with=on.calls,
        calls_without=off.calls,
        whole=_relative_difference(on.tail, off.tail),
    )


def _relative_difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of a row, relative to the other's norm."""
    distances = (one.float() - other.float()).norm(dim=-1) / other.float().norm(dim=-1)
    # NaN compares as neither, and max() passes it on.
    return float(distances.max())
