"""Steps of named requests, each run with the plugin and without, and compared.

Two comparisons per step. Each replayed range equals, bit for bit, the eager range on the same padded rows, and
leaves the same KV. And the whole step equals the step of the engine alone: bit for bit where nothing was padded, to
rounding where padding gave matrix products other shapes.
"""

from __future__ import annotations

from typing import Any

from tests.replay.judge import Judge, Verdict, distance, same
from tests.replay.server import DECODER_REPLAY, FULL_LAYER, Server, tape_backend

# float32; a wrong row or slot gives 0.1 and more.
ROUNDING = 1e-4
TOO_MANY = "more rows than the largest bucket"
NOTHING_CAPTURED = "nothing captured"
# What a prompt's step is: new tokens per request, by the name of the request.
Step = dict[str, int]


def poisoning(installation: Any) -> Any:
    """A tape whose replays first spoil all memory that its segments allocated."""
    return tape_backend(installation, poison=True)


def bucket_of(rows: int, buckets: tuple[int, ...]) -> int | None:
    return next((b for b in buckets if b >= rows), None)


class Story:
    """Steps of named requests, each run with the plugin and without, and compared."""

    def __init__(self, server: Server, judge: Judge, seed: int = 0) -> None:
        self.server, self.judge, self.seed = server, judge, seed
        self.requests: dict[str, Any] = {}
        server.runner.reset_pools()

    def batch(self, step: Step) -> Any:
        """The step's batch; requests get the tokens that they lack."""
        from sglang_dsv4_graphs.cpu_engine import Request

        for name, count in step.items():
            request = self.requests.setdefault(name, Request([]))
            request.grow(count, seed=self.seed + sum(map(ord, name)))
        return self.server.runner.batch([self.requests[name] for name in step])

    def run(self, batch: Any) -> tuple[dict[Any, int], dict[Any, int], list[Verdict]]:
        """Run and compare ``batch``; its replays, fallbacks, and the verdicts on the replays."""
        server, runner = self.server, self.server.runner
        before = server.state()
        with server.plugin_off():
            eager = runner.forward(batch)
        eager_kept = server.kept_now()
        server.load_state(before)
        self.judge.take()
        step, replays, fallbacks = server.new_counts(lambda: runner.forward(batch))
        verdicts = self.judge.take()
        assert [v for v in verdicts if v.wrong] == []
        assert sorted(replays.items()) == sorted(((v.bank, v.bucket), 1) for v in verdicts)
        assert same(step.tail_rows, eager.tail_rows)
        padded = any(v.rows != v.bucket for v in verdicts)
        self._compare("tail", step.tail, eager.tail, padded)
        self._compare("pre_head", step.pre_head[step.tail_rows], eager.pre_head[step.tail_rows], padded)
        for name, tensor in server.kept().items():
            written = eager_kept[name].flatten(1).abs().sum(1) > 0
            # Rows that the engine alone did not write stay unwritten: padding stores nothing.
            assert not tensor[~written].any(), name
            self._compare(name, tensor[written], eager_kept[name][written], padded)
        return replays, fallbacks, verdicts

    @staticmethod
    def _compare(what: str, one: Any, other: Any, padded: bool) -> None:
        if not padded:
            assert same(one, other), what
        elif one.shape[0]:
            # Not ">": a NaN must fail.
            assert distance(one, other) <= ROUNDING, (what, distance(one, other))

    def step(self, step: Step) -> tuple[dict[Any, int], dict[Any, int]]:
        """Run ``step`` and check that each bank replayed the bucket for its rows, or said that it has none."""
        rows, late_rows = sum(step.values()), sum(min(128, n) for n in step.values())
        replays, fallbacks, _ = self.run(self.batch(step))
        expected, missing = {}, {}
        for bank, n in ((FULL_LAYER, rows), (DECODER_REPLAY, late_rows)):
            if self.server.bank(bank) is None:
                continue
            bucket = bucket_of(n, self.server.bank(bank).buckets)
            if bucket is None:
                missing[bank, TOO_MANY if self.server.bank(bank).buckets else NOTHING_CAPTURED] = 1
            else:
                expected[bank, bucket] = 1
        assert (replays, fallbacks) == (expected, missing)
        return replays, fallbacks


def serves(server: Server, *steps: Step) -> None:
    """Run and compare steps of one story."""
    story = Story(server, Judge.of(server))
    for step in steps:
        story.step(step)
