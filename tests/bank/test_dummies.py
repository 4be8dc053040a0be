"""Dummy steps: made-up requests that fit the server, through the engine's own forward."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.dummies import Dummies  # noqa: E402


class Engine:
    def __init__(self) -> None:
        self.done: list[Any] = []
        self.loads: list[Any] = []

    def load_inputs(self, eager_runner: Any, batch: Any) -> Any:
        self.loads.append((eager_runner, batch))
        return SimpleNamespace(input_ids="loaded", positions="positions")

    def extend_batch(self, *, runner: Any, lengths: list[int], input_ids: torch.Tensor) -> Any:
        return SimpleNamespace(runner=runner, lengths=lengths, input_ids=input_ids, positions="positions")

    @contextmanager
    def _scope(self, *what: Any) -> Any:
        self.done.append(("enter", *what))
        yield
        self.done.append(("exit", what[0]))

    def model_scope(self, runner: Any) -> Any:
        return self._scope("model", runner)

    def fresh_step_context(self, backend: Any, batch: Any) -> Any:
        return self._scope("context", backend, batch)

    def prepare_metadata(self, backend: Any, runner: Any, batch: Any) -> None:
        self.done.append(("metadata", backend, runner, batch))


def make(
    context: int = 100, slots: int = 4, vocabulary: int = 50_000, eager_runner: Any = None
) -> tuple[Engine, Any, Dummies]:
    engine = Engine()

    def forward(which: str) -> Any:
        return lambda *args: engine.done.append((which, torch.is_grad_enabled(), *args))

    runner = SimpleNamespace(
        device="cpu",
        attn_backend="backend",
        model_config=SimpleNamespace(context_len=context),
        req_to_token_pool=SimpleNamespace(size=slots),
        model=SimpleNamespace(forward=forward("whole")),
    )
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=vocabulary), forward=forward("layers"))
    return engine, runner, Dummies(engine, runner, model, eager_runner)  # type: ignore[arg-type]


def test_limits() -> None:
    dummies = make(context=100, slots=4)[2]
    assert (dummies.most_rows, dummies.most_requests) == (400, 4)


@pytest.mark.parametrize(
    ("rows", "longest", "lengths"),
    [
        (1, None, [1]),
        (100, None, [100]),
        (101, None, [100, 1]),
        (400, None, [100] * 4),
        (90, 30, [30] * 3),
        (5, 1000, [5]),
    ],
)
def test_the_fewest_requests(rows: int, longest: int | None, lengths: list[int]) -> None:
    _, runner, dummies = make()
    batch = dummies.batch(rows, longest)
    assert batch.lengths == lengths
    assert batch.runner is runner
    assert batch.input_ids.shape == (rows,)
    assert batch.input_ids.dtype is torch.int64


@pytest.mark.parametrize(("rows", "longest"), [(401, None), (90, 20)])
def test_more_requests_than_the_server_has_slots(rows: int, longest: int | None) -> None:
    with pytest.raises(ValueError, match=f"{rows} dummy rows need 5 requests, the server has 4 slots"):
        make()[2].batch(rows, longest)


@pytest.mark.parametrize("vocabulary", [10, 50_000])
def test_tokens_are_spread_over_the_vocabulary(vocabulary: int) -> None:
    ids = make(context=5000, vocabulary=vocabulary)[2].batch(5000).input_ids
    assert int(ids.min()) >= 1
    assert int(ids.max()) < vocabulary
    assert ids.unique().numel() == min(5000, vocabulary - 1)
    assert not (ids[1:] == ids[:-1]).any()


@pytest.mark.parametrize(("run", "forward"), [("run", "layers"), ("run_whole", "whole")])
def test_a_dummy_step_is_prepared_as_a_real_one(run: str, forward: str) -> None:
    engine, runner, dummies = make()
    batch = dummies.batch(5)
    getattr(dummies, run)(batch)
    last = (None,) if forward == "layers" else ()
    assert not engine.loads
    assert engine.done == [
        ("enter", "model", runner),
        ("enter", "context", "backend", batch),
        ("metadata", "backend", runner, batch),
        (forward, False, batch.input_ids, "positions", batch, *last),
        ("exit", "context"),
        ("exit", "model"),
    ]


def test_everything_that_a_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs loaded by the engine's eager runner, and the likeliest token of the logits."""
    engine, runner, dummies = make(eager_runner="eager")
    logits, chosen = torch.randn(2, 7), []
    whole = runner.model.forward
    runner.model.forward = lambda *args: whole(*args) or SimpleNamespace(next_token_logits=logits)
    monkeypatch.setattr(torch, "argmax", lambda *args: chosen.append(args))
    batch = dummies.batch(5)
    dummies.run_whole(batch)
    assert engine.loads == [("eager", batch)]
    (forward,) = [done for done in engine.done if done[0] == "whole"]
    assert forward[2] == "loaded"
    assert chosen == [(logits, -1)]
    # Layers alone, for captures, take the batch as it is.
    dummies.run(batch)
    assert len(engine.loads) == 1
