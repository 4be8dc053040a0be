"""What each switch does to a server: banks off one by one, debug replays, shadow mode."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.replay.judge import Judge
from tests.replay.server import (
    DECODER_REPLAY,
    DECODER_REPLAY_CAP,
    FULL_LAYER,
    FULL_LAYER_CAP,
    Server,
    Servers,
    store_breaks,
    tape_backend,
)
from tests.replay.story import Story, serves

pytestmark = pytest.mark.engine

ONE_BUCKET = {FULL_LAYER_CAP: "64", DECODER_REPLAY_CAP: "128"}
TWO_BUCKETS = {FULL_LAYER_CAP: "128", DECODER_REPLAY_CAP: "256"}


def test_late_layers_left_to_the_engine(servers: Servers) -> None:
    server = servers.own({FULL_LAYER_CAP: "64", DECODER_REPLAY_CAP: "0"})
    assert server.bank(DECODER_REPLAY) is None
    late = server.model.late_layer_start
    ran = layers_run(server, {"a": 60}, {"a": 33, "b": 2})
    assert ran == [*range(late, len(server.model.layers))] * 2
    assert server.served.fallbacks == {}


def test_full_width_layers_left_to_the_engine(servers: Servers) -> None:
    server = servers.own({FULL_LAYER_CAP: "0", DECODER_REPLAY_CAP: "128"})
    assert server.bank(FULL_LAYER) is None
    assert layers_run(server, {"a": 60}, {"a": 33, "b": 2}) == [*range(server.model.late_layer_start)] * 2
    assert server.served.fallbacks == {}


def test_both_off_is_the_engine_alone(servers: Servers) -> None:
    server = servers.own({FULL_LAYER_CAP: "0", DECODER_REPLAY_CAP: "0"})
    assert server.log.having("captured bank=total", "graphs=0 ")
    assert layers_run(server, {"a": 60}) == [*range(len(server.model.layers))]
    assert server.served.fallbacks == {}


def layers_run(server: Server, *steps: dict[str, int]) -> list[int]:
    """Layers that steps with the plugin run in Python; each step is compared."""
    story, ran = Story(server, Judge.of(server)), []
    story.judge.quiet = True
    handles = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, *_: ran.append(module.layer_id) if server.served.ready else None
        )
        for layer in server.model.layers
    ]
    try:
        for step in steps:
            story.step(step)
    finally:
        for handle in handles:
            handle.remove()
    return ran


def test_debug_replays_are_equal(servers: Servers) -> None:
    server = servers.own(TWO_BUCKETS | {"SGLANG_DSV4_DECODER_REPLAY_GRAPH_DEBUG": "1"})
    serves(server, {"a": 61}, {"a": 40, "b": 88}, {"c": 64})


@pytest.mark.parametrize(("make_backend", "name"), [(tape_backend, "attention"), (store_breaks, "store_and_attention")])
def test_debug_names_the_break_that_failed(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, make_backend: Any, name: str
) -> None:
    from sglang_dsv4_graphs.bank.backend import ReplayFault

    debug = {"SGLANG_DSV4_DECODER_REPLAY_GRAPH_DEBUG": "1"}
    server = servers.own(ONE_BUCKET | debug, make_backend=make_backend)
    story = Story(server, Judge.of(server))
    forward = server.runner.attn_backend.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        if kwargs["layer"].layer_id == 1:
            raise ZeroDivisionError("an attention that fails")
        return forward(*args, **kwargs)

    monkeypatch.setattr(server.runner.attn_backend, "forward", failing)
    with pytest.raises(ReplayFault, match=rf"in break 1 .*_run_{name} .*an attention that fails") as raised:
        server.runner.forward(story.batch({"a": 40}))
    assert (raised.value.part, raised.value.index) == ("break", 1)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


# Shadow mode


def count_eager_runs(server: Server) -> dict[str, int]:
    counts = dict.fromkeys((FULL_LAYER, DECODER_REPLAY), 0)
    for name in counts:
        bank = server.bank(name)
        run = bank.run_eagerly

        def counted(*args: Any, _name: str = name, _run: Any = run) -> Any:
            counts[_name] += 1
            return _run(*args)

        bank.run_eagerly = counted
    return counts


def compares(server: Server, name: str) -> bool:
    """0.5.22's late range starts behind its index source and cannot be run twice."""
    model = server.model
    return name == FULL_LAYER or model.late_layer_start in model.config.index_source_layer_ids


def test_shadow_compares_that_many_steps_of_each_bank(servers: Servers) -> None:
    """Steps of requests: the rehearsal is none."""
    server = servers.own(TWO_BUCKETS | {"SGLANG_DSV4_GRAPHS_SHADOW": "3"})
    counts = count_eager_runs(server)
    story = Story(server, Judge.of(server))
    story.judge.quiet = True
    for step in ({"a": 61}, {"a": 5}, {"b": 3, "c": 64}):
        story.step(step)
    # Not the step behind an odd prefix: run twice, it would pair a token with itself.
    late = compares(server, DECODER_REPLAY)
    assert counts == {FULL_LAYER: 2, DECODER_REPLAY: 2 * late}
    assert server.log.having("compared=") == []
    story.step({"c": 100})
    assert counts == {FULL_LAYER: 3, DECODER_REPLAY: 3 * late}
    for name in filter(partial(compares, server), counts):
        assert server.log.having(f"shadow bank={name} compared=3 differed=0")
    story.step({"d": 40})
    assert counts == {FULL_LAYER: 3, DECODER_REPLAY: 3 * late}
    assert server.log.having("largest_difference") == []


@pytest.mark.parametrize("name", [FULL_LAYER, DECODER_REPLAY])
def test_shadow_tells_of_a_wrong_replay_and_serves_the_eager_rows(servers: Servers, name: str) -> None:
    server = servers.own(ONE_BUCKET | {"SGLANG_DSV4_GRAPHS_SHADOW": "2"})
    if not compares(server, name):
        assert server.log.having(f"shadow bank={name} skipped=")
        return
    bank = server.bank(name)
    replay = bank.replay

    def wrong(*args: Any) -> Any:
        outputs = replay(*args)
        outputs.residual[3] += 1
        return outputs

    bank.replay = wrong
    batch = Story(server, Judge.of(server)).batch({"a": 40})
    right = server.eager_tail(batch)
    tail = server.runner.forward(batch).tail
    (line,) = server.log.having("largest_difference")
    assert line.startswith(
        f"dsv4-graphs: shadow rank=0 bank={name} bucket={bank.buckets[0]} rows=40 largest_difference=1"
    )
    assert float((tail - right).abs().max()) < 1e-4
