"""A buffer that moved between steps: the bank is retired before a graph reads the old place, and the step is right."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.replay.judge import Judge, same
from tests.replay.server import DECODER_REPLAY, DECODER_REPLAY_CAP, FULL_LAYER, FULL_LAYER_CAP, Server, Servers
from tests.replay.story import Story

pytestmark = pytest.mark.engine

SETTINGS = {FULL_LAYER_CAP: "64", DECODER_REPLAY_CAP: "128"}
RETIRED = "bank retired"


@pytest.fixture
def extension() -> Iterator[Any]:
    """The example's module, with a buffer as after the largest step."""
    from tests.replay import example_guard

    example_guard.workspace = None
    example_guard.grow(64)
    yield example_guard
    example_guard.workspace = None


def address_of(tensor: Any) -> str:
    return hex(tensor.data_ptr())


def retired_with(server: Server, buffer: str, before: str, now: str) -> None:
    """Both banks said which bucket's graph read what, and where it lay and lies."""
    for name in (FULL_LAYER, DECODER_REPLAY):
        (line,) = server.log.having("moved-buffer", f"bank={name} ")
        assert re.search(rf"bank={name} bucket=\d+ buffer={re.escape(buffer)} moved: ", line), line
        assert f"captured at {before}, now at {now};" in line, line
        assert server.bank(name).retired
        assert server.bank(name).buckets == ()


def test_the_example_is_an_extension(extension: Any) -> None:
    """pluggy finds its hook, under the specification's name and arguments."""
    from sglang_dsv4_graphs.extend import make_manager

    manager = make_manager(third_parties=False)
    manager.register(extension)
    manager.check_pending()
    assert [i.plugin for i in manager.hook.dsv4_graphs_guard.get_hookimpls()] == [extension]


def test_a_buffer_that_stays_is_no_reason(servers: Servers, extension: Any) -> None:
    server = servers.own(SETTINGS, extensions=[extension])
    assert "my-workspace" in server.bank(FULL_LAYER).guard.names
    story = Story(server, Judge.of(server))
    for step in ({"a": 60}, {"a": 1, "b": 50}):
        extension.workspace.fill_(7.0)  # rewritten in place: that is what buffers are for
        story.step(step)
    assert server.log.having("moved-buffer") == []


@pytest.mark.parametrize("to", ["elsewhere", "nowhere"])
def test_a_moved_buffer_retires_the_banks(servers: Servers, extension: Any, to: str) -> None:
    server = servers.own(SETTINGS, extensions=[extension])
    story = Story(server, Judge.of(server))
    story.step({"a": 60})
    held, before = extension.workspace, address_of(extension.workspace)
    if to == "elsewhere":
        extension.grow(128)
        now = address_of(extension.workspace)
    else:
        extension.workspace = None
        now = "nowhere"
    batch = story.batch({"a": 30, "b": 20})
    right = server.eager_tail(batch)
    step, replays, fallbacks = server.new_counts(lambda: server.runner.forward(batch))
    assert held is not extension.workspace
    assert replays == {}
    assert fallbacks == {(FULL_LAYER, RETIRED): 1, (DECODER_REPLAY, RETIRED): 1}
    assert same(step.tail, right)
    retired_with(server, "my-workspace", before, now)
    # For good: coming back to the old place is no reason to trust what the graphs read.
    extension.workspace = held
    _, replays, fallbacks = server.new_counts(lambda: server.runner.forward(story.batch({"c": 5})))
    assert replays == {}
    assert set(fallbacks) == {(FULL_LAYER, RETIRED), (DECODER_REPLAY, RETIRED)}
    assert len(server.log.having("moved-buffer")) == 2


def test_the_first_buffer_after_the_captures_is_a_move(servers: Servers, extension: Any) -> None:
    extension.workspace = None
    server = servers.own(SETTINGS, extensions=[extension])
    story = Story(server, Judge.of(server))
    story.step({"a": 60})
    extension.grow(64)
    server.runner.forward(story.batch({"a": 30}))
    retired_with(server, "my-workspace", "nowhere", address_of(extension.workspace))


def test_a_costly_probe_is_asked_at_captures_only(servers: Servers, extension: Any) -> None:
    from sglang_dsv4_graphs.bank.guard import GuardedBuffer, MovedBufferError
    from sglang_dsv4_graphs.extend import hookimpl

    asked: list[Any] = []

    class Costly:
        @hookimpl
        def dsv4_graphs_guard(self, probe: Any) -> list[GuardedBuffer]:
            asked.append(probe)
            return [GuardedBuffer("costly", lambda: (asked.append(1), extension.workspace)[1], cheap=False)]

    server = servers.own(SETTINGS, extensions=[Costly()])
    assert (asked[0].model_runner, asked[0].model) == (server.runner, server.model)
    assert asked[0].attn_backend is server.runner.attn_backend
    story, before = Story(server, Judge.of(server)), len(asked)
    extension.workspace = extension.workspace.clone()
    story.step({"a": 60})
    assert len(asked) == before
    with pytest.raises(MovedBufferError, match="buffer=costly moved"):
        server.bank(FULL_LAYER).check(64, everything=True)


def test_strict_stops_at_a_moved_buffer(servers: Servers, extension: Any) -> None:
    from sglang_dsv4_graphs.bank.guard import MovedBufferError

    server = servers.own({**SETTINGS, "SGLANG_DSV4_GRAPHS_STRICT": "1"}, extensions=[extension])
    story = Story(server, Judge.of(server))
    story.step({"a": 60})
    before = address_of(extension.workspace)
    extension.grow(128)
    with pytest.raises(MovedBufferError) as raised:
        server.runner.forward(story.batch({"a": 30}))
    error = raised.value
    assert (error.bank, error.bucket, error.buffer) == (FULL_LAYER, 64, "my-workspace")
    assert f"captured at {before}, now at {address_of(extension.workspace)}" in str(error)


def in_place_of_its_storage(module: Any, name: str) -> None:
    """An update that gives a parameter other memory."""
    parameter = getattr(module, name)
    parameter.data = parameter.data.clone()


def in_place_of_the_parameter(module: Any, name: str) -> None:
    """An update that puts another parameter in the layer."""
    from torch import nn

    setattr(module, name, nn.Parameter(getattr(module, name).data.clone(), requires_grad=False))


@pytest.mark.parametrize("move", [in_place_of_its_storage, in_place_of_the_parameter])
@pytest.mark.parametrize(("bank", "layer"), [(FULL_LAYER, 0), (FULL_LAYER, "last"), (DECODER_REPLAY, -1)])
def test_no_step_replays_with_a_moved_weight(servers: Servers, bank: str, layer: Any, move: Any) -> None:
    """The next step is right with the new weight, in the bank that reads it; the other bank serves on."""
    server = servers.own(SETTINGS)
    story = Story(server, Judge.of(server))
    story.step({"a": 60})
    at = server.model.late_layer_start - 1 if layer == "last" else layer % len(server.model.layers)
    module = server.model.layers[at].self_attn.wo_b
    batch = story.batch({"a": 3})
    stale = server.eager_tail(batch)
    before, kept = address_of(module.weight), module.weight.detach()
    move(module, "weight")
    module.weight.data.mul_(0.5)  # the old one, which the graphs would read, is as it was
    right = server.eager_tail(batch)
    step, replays, fallbacks = server.new_counts(lambda: server.runner.forward(batch))
    # The other bank's rows are padded: equal but for rounding.
    assert (step.tail - right).abs().max() < 1e-4 < (step.tail - stale).abs().max()
    assert {name for name, _ in replays} == {FULL_LAYER, DECODER_REPLAY} - {bank}
    assert fallbacks == {(bank, RETIRED): 1}
    (line,) = server.log.having("moved-buffer")
    assert f"bank={bank} " in line
    assert f"buffer=layers.{at}.self_attn.wo_b.weight moved: captured at {before}" in line
    assert kept is not None


def test_what_is_derived_from_weights_is_compared_after_an_update(servers: Servers) -> None:
    """Through the engine's own entry points: in both versions a scheduler ends every update with these."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    server = servers.own(SETTINGS, startup=False)
    module = server.model.layers[0].self_attn
    module.transposed = derived = module.wo_b.weight.detach().t().contiguous()
    server.runner.startup()
    story = Story(server, Judge.of(server))
    updater = WeightUpdater.__new__(WeightUpdater)
    with pytest.raises(AttributeError):  # half-way through an update of nothing
        updater.end_weight_update(run_post_load=True)
    story.step({"a": 60})
    module.transposed = derived.clone()
    story.step({"a": 5})  # nobody said that weights changed: a module's own scratch is no reason
    assert server.log.having("moved-buffer") == []
    with pytest.raises(AttributeError):
        updater.begin_weight_update()
    _, replays, fallbacks = server.new_counts(lambda: server.runner.forward(story.batch({"a": 3})))
    assert {name for name, _ in replays} == {DECODER_REPLAY}
    assert fallbacks == {(FULL_LAYER, RETIRED): 1}
    (line,) = server.log.having("moved-buffer", "buffer=layers.0.self_attn.transposed moved")
    assert f"bank={FULL_LAYER} " in line


def test_a_window_that_moved_is_found_after_an_update(servers: Servers) -> None:
    """Captured stores write there by address; asking for it may wait, so it is asked where much has changed."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    server = servers.own(SETTINGS)
    story, pool = Story(server, Judge.of(server)), server.runner.token_to_kv_pool
    story.step({"a": 60})
    before, held = address_of(pool.swa[2]), pool.swa[2]
    pool.swa[2] = held.clone()
    with pytest.raises(AttributeError):  # of an update of nothing
        WeightUpdater.__new__(WeightUpdater).begin_weight_update()
    batch = story.batch({"a": 3})
    right = server.eager_tail(batch)
    step, replays, fallbacks = server.new_counts(lambda: server.runner.forward(batch))
    assert same(step.tail, right)
    assert replays == {}
    assert fallbacks == {(FULL_LAYER, RETIRED): 1, (DECODER_REPLAY, RETIRED): 1}
    retired_with(server, "window-k-2", before, address_of(pool.swa[2]))


def test_a_buffer_that_moves_during_the_startup_is_replayed_by_no_dummy_step(
    servers: Servers, extension: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workspace grows in the first capture of the late layers; the next dummy step passes the full-layer bank."""
    from sglang_dsv4_graphs.bank.bank import Bank
    from sglang_dsv4_graphs.bank.guard import MovedBufferError

    replays: list[tuple[str, bool]] = []
    capture, replay = Bank.capture, Bank.replay

    def growing(bank: Any, bucket: int, *args: Any) -> Any:
        if bank.name == DECODER_REPLAY:
            extension.grow(128)
        return capture(bank, bucket, *args)

    def watched(bank: Any, bucket: int, *args: Any) -> Any:
        try:
            bank.check(bucket)
            replays.append((bank.name, False))
        except MovedBufferError:
            replays.append((bank.name, True))
        return replay(bank, bucket, *args)

    monkeypatch.setattr(Bank, "capture", growing)
    monkeypatch.setattr(Bank, "replay", watched)
    settings = {FULL_LAYER_CAP: "256", DECODER_REPLAY_CAP: "256"}
    server = servers.own(settings, extensions=[extension])
    assert server.log.having("captured bank=decoder-replay graphs=2 ")
    assert replays.count((FULL_LAYER, False)) == 1  # before the first capture
    assert (FULL_LAYER, True) not in replays
    # The rehearsal is a step like any other, and says so.
    assert server.log.having("moved-buffer", "bank=full-layer ")
