"""Steps compute what they should, however the rows are grouped into steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.engine

# float32 throughout; another grouping of rows changes the order of a few sums.
TOLERANCE = 1e-4


def distance(a: Any, b: Any) -> float:
    """The largest relative difference of a row."""
    return float(((a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)).max())


def request(length: int, seed: int = 1) -> Any:
    from sglang_dsv4_graphs.cpu_engine import Request

    return Request.of(length, seed)


def test_long_prompt_carries_signal_and_is_quick(make_runner: Callable[..., Any]) -> None:
    runner = make_runner(dtype="bfloat16")
    runner.extend([request(300)])
    started = time.perf_counter()
    step = runner.extend([request(300, seed=2)])
    assert time.perf_counter() - started < 5  # 0.2 s on two idle cores
    assert step.hidden.shape == (300, runner.shape.hidden)
    assert step.tail.isfinite().all()
    # Unit scale, and every row its own.
    assert 0.5 < float(step.tail.float().std()) < 2
    assert distance(step.tail[1:], step.tail[:-1]) > 0.1


@pytest.mark.parametrize("bounded_replay", [False, True])
@pytest.mark.parametrize("chunks", [(200, 200), (101, 70, 229), (1, 1, 128, 270)])
def test_chunks_equal_one_step(make_runner: Callable[..., Any], bounded_replay: bool, chunks: tuple[int, ...]) -> None:
    runner = make_runner(bounded_replay)
    whole = runner.extend([request(sum(chunks))])
    runner.reset_pools()
    chunked = request(sum(chunks))
    for chunk in chunks:
        step = runner.extend([chunked], [chunk])
    rows = step.tail.shape[0] if not bounded_replay else 128
    assert distance(step.tail, whole.tail[-rows:]) < TOLERANCE


@pytest.mark.parametrize("bounded_replay", [False, True])
def test_batch_equals_each_request_alone(make_runner: Callable[..., Any], bounded_replay: bool) -> None:
    runner = make_runner(bounded_replay)
    lengths = [1, 37, 400, 130, 5]
    together = runner.extend([request(n, seed=n) for n in lengths])
    for row, length in enumerate(lengths):
        runner.reset_pools()
        alone = runner.extend([request(length, seed=length)])
        assert distance(together.last[row : row + 1], alone.last) < TOLERANCE, length


def test_prefix_hits_of_several_requests(runner: Any) -> None:
    first, second = request(150, seed=3), request(40, seed=4)
    runner.extend([first, second])
    grown = runner.extend([second.grow(130, seed=9), first.grow(200, seed=9)])
    whole = [list(second.tokens), list(first.tokens)]
    from sglang_dsv4_graphs.cpu_engine import Request

    for row, tokens in enumerate(whole):
        runner.reset_pools()
        assert distance(grown.last[row : row + 1], runner.extend([Request(tokens)]).last) < TOLERANCE


def test_same_step_twice_from_one_state(runner: Any) -> None:
    prompt = request(300)
    runner.extend([prompt], [170])
    batch = runner.batch([prompt])
    before = runner.state()
    first = runner.forward(batch)
    after = runner.state()
    assert any(not (before["pool"][k] == after["pool"][k]).all() for k in before["pool"])
    runner.load_state(before)
    assert (runner.forward(batch).tail == first.tail).all()
    assert all((runner.state()["pool"][k] == after["pool"][k]).all() for k in after["pool"])


def test_state_restores_requests_and_allocator(runner: Any) -> None:
    prompt, late = request(60), request(20, seed=5)
    runner.extend([prompt], [30])
    before = runner.state()
    runner.extend([prompt, late])
    runner.load_state(before)
    assert (prompt.done, late.done, late.slot) == (30, 0, None)
    again = runner.extend([prompt, late])
    runner.reset_pools()
    assert (prompt.done, prompt.slot) == (0, None)
    assert distance(again.last[1:], runner.extend([request(20, seed=5)]).last) < TOLERANCE


def test_release_gives_back_everything(runner: Any) -> None:
    for _ in range(17):  # more than the pools hold at once, of requests and of slots
        prompt = request(200)
        runner.extend([prompt])
        runner.release(prompt)
    with pytest.raises(ValueError, match="pending"):
        runner.extend([prompt], [201])


def test_late_layers_run_the_tail_only(runner: Any) -> None:
    model = runner.model.model
    rows: dict[int, int] = {}
    handles = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: rows.__setitem__(module.layer_id, kwargs["x"].shape[0]),
            with_kwargs=True,
        )
        for layer in model.layers
    ]
    try:
        step = runner.extend([request(300), request(50, seed=2)])
    finally:
        for handle in handles:
            handle.remove()
    assert step.tail_rows.tolist() == [*range(172, 300), *range(300, 350)]
    start = model.late_layer_start
    assert rows == {i: 350 if i < start else 178 for i in range(len(model.layers))}


def test_without_bounded_replay_every_row_is_computed(make_runner: Callable[..., Any]) -> None:
    runner = make_runner(bounded_replay=False)
    assert runner.model.model.late_layer_start is None
    assert runner.extend([request(300)]).tail.shape[0] == 300


def test_batches_with_count_tensors(runner: Any) -> None:
    from sglang_dsv4_graphs.cpu_engine.runner import context_lends_counts

    if not context_lends_counts():
        pytest.skip("0.5.22 takes none on a CPU")
    plain = runner.extend([request(60)])
    runner.reset_pools()
    runner.device_counts = True
    try:
        batch = runner.batch([request(60)])
    finally:
        runner.device_counts = False
    assert int(batch.num_token_non_padded) == int(batch.global_num_token_non_padded) == 60
    assert (runner.forward(batch).tail == plain.tail).all()
    runner.reset_pools()
    batch = runner.batch([request(60)])
    # The experts mask what lies behind the count: too small a count must show.
    import torch

    batch.global_num_token_non_padded = torch.tensor(30, dtype=torch.int32)
    batch.set_local_num_token_non_padded(sharded=False)
    assert distance(runner.forward(batch).tail, plain.tail) > 1e-2
