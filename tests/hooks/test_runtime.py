"""What the patches call: models are found again, startup comes in two parts, and only strict lets errors out."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank.decide import ServerFacts  # noqa: E402
from sglang_dsv4_graphs.bank.ranks import Failure, RankError  # noqa: E402
from sglang_dsv4_graphs.bank.served import ServedModel  # noqa: E402
from sglang_dsv4_graphs.bank.views import ModelView  # noqa: E402
from sglang_dsv4_graphs.extend import hookimpl, make_manager  # noqa: E402
from sglang_dsv4_graphs.hooks import runtime as module  # noqa: E402
from sglang_dsv4_graphs.hooks.runtime import Runtime  # noqa: E402
from sglang_dsv4_graphs.log import RankLog  # noqa: E402
from sglang_dsv4_graphs.settings import Settings  # noqa: E402


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()


class Runner:
    """A model runner whose model holds ``decoders`` somewhere inside."""

    device = "cuda"

    def __init__(self, *decoders: Decoder, is_draft_worker: bool = False) -> None:
        self.model = torch.nn.Module()
        self.model.inner = torch.nn.ModuleList(decoders)
        self.is_draft_worker = is_draft_worker


class Process:
    """A runtime whose startup parts are noted, or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, facts: ServerFacts, **settings: Any) -> None:
        self.done: list[tuple[str, ServedModel]] = []
        self.fails: dict[str, Exception] = {}
        self.eager_runners: list[Any] = []
        self.manager = make_manager(third_parties=False)
        engine = SimpleNamespace(get_parallel=lambda: SimpleNamespace(tp_rank=0, tp_size=1))
        self.runtime = Runtime(engine, Settings(**settings), self.manager, RankLog())  # type: ignore[arg-type]
        monkeypatch.setattr(module, "server_facts", lambda *args: facts)
        monkeypatch.setattr(module, "begin", self.begin)
        monkeypatch.setattr(module, "finish", self.finish)

    def _do(self, part: str, served: ServedModel) -> None:
        self.done.append((part, served))
        if part in self.fails:
            raise self.fails[part]

    def begin(self, engine: Any, served: ServedModel, runner: Any, manager: Any, eager_runner: Any) -> Any:
        self.eager_runners.append(eager_runner)
        self._do("begin", served)
        return SimpleNamespace(
            served=served,
            grow=lambda: self._do("grow", served),
            summary=lambda: self._do("summary", served),
            abandon=lambda reason: self.done.append((reason, served)),
        )

    def finish(self, startup: Any, runner: Any, manager: Any) -> None:
        self._do("finish", startup.served)
        assert not startup.served.ready  # until every rank has come so far

    def build(self) -> Decoder:
        decoder = Decoder()
        self.runtime.after_model_built(None, decoder, "config")
        return decoder

    def served(self, decoder: Decoder) -> ServedModel:
        served = self.runtime.served(decoder)
        assert served is not None
        return served

    def start(self, runner: Runner) -> None:
        self.runtime.before_captures(model_runner=runner, eager_runner=None)
        self.runtime.before_startup(runner)


ORDINARY = ServerFacts(device="cuda")
PARTS = ["begin", "grow", "finish", "summary"]


def test_a_built_model_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, ORDINARY)
    seen: list[ServedModel] = []

    class Built:
        @hookimpl
        def dsv4_graphs_model_built(self, served: ServedModel) -> None:
            seen.append(served)

    process.manager.register(Built())
    decoder = process.build()
    assert seen == [process.served(decoder)]
    assert process.runtime.served(Decoder()) is None
    assert process.served(decoder).model is decoder


def test_every_model_has_its_own_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, ORDINARY)
    one, two = process.build(), process.build()
    assert process.served(one) is not process.served(two)
    process.start(Runner(two))
    assert process.done == [(part, process.served(two)) for part in PARTS]
    assert not process.served(one).ready


def test_the_loop_of_a_known_model_goes_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, ORDINARY)
    decoder = process.build()
    calls: list[Any] = []
    monkeypatch.setattr(process.served(decoder), "run_loop", lambda loop, *args: calls.append((loop, args)) or "ours")

    def loop(*args: Any) -> Any:
        return ("plain", args)

    around = process.runtime.around_layer_loop
    assert around(loop, decoder, 1, 2) == "ours"
    assert calls == [(loop, (1, 2))]
    # A model that was built before us, and a view of ours inside a range.
    other = Decoder()
    assert around(loop, other, 1, 2) == ("plain", (other, 1, 2))
    view = ModelView(decoder, start_layer=0)
    assert around(loop, view, 1, 2) == ("plain", (view, 1, 2))
    assert len(calls) == 1


def test_startup_in_two_parts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, ORDINARY)
    decoder = process.build()
    runner = Runner(Decoder(), decoder)
    process.runtime.before_captures(model_runner=runner, eager_runner=None, force_for_draft_worker=False)
    assert [part for part, _ in process.done] == ["begin", "grow"]
    assert not process.served(decoder).ready
    for _ in range(2):
        process.runtime.before_startup(runner)
    assert [part for part, _ in process.done] == PARTS
    process.start(runner)
    assert [part for part, _ in process.done] == PARTS


def test_the_engines_eager_runner_goes_into_the_startup(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, ORDINARY)
    runner = Runner(process.build(), process.build())
    process.runtime.before_captures(model_runner=runner, eager_runner="eager")
    assert process.eager_runners == ["eager", "eager"]


def test_startup_where_the_engine_captures_no_prefill_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, ORDINARY)
    process.runtime.before_startup(Runner(process.build()))
    assert [part for part, _ in process.done] == PARTS


def test_a_drafts_runner_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, ORDINARY)
    process.start(Runner(process.build(), is_draft_worker=True))
    assert process.done == []


def test_hooks_return_nothing_that_the_engine_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A BEFORE hook's result replaces the arguments, an AFTER hook's the result."""
    process = Process(monkeypatch, ORDINARY)
    runner = Runner(process.build())
    assert process.runtime.after_model_built(None, Decoder()) is None
    assert process.runtime.before_captures(model_runner=runner, eager_runner=None) is None
    assert process.runtime.before_startup(runner) is None


def test_ranks_are_known_from_startup_on(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, ORDINARY)
    process.runtime.engine.get_parallel = lambda: SimpleNamespace(tp_rank=3, tp_size=1)
    process.start(Runner(process.build()))
    assert process.runtime.log.rank == 3


@pytest.mark.parametrize("strict", [False, True])
def test_a_server_that_is_not_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, strict: bool
) -> None:
    caplog.set_level(logging.INFO, logger="sglang_dsv4_graphs")
    process = Process(monkeypatch, ServerFacts(device="cuda", lora=True), strict=strict)
    runner = Runner(process.build())
    if strict:
        with pytest.raises(RuntimeError, match="SGLANG_DSV4_GRAPHS_STRICT=1 and prefill stays eager: LoRA: "):
            process.start(runner)
    else:
        process.start(runner)
        process.start(runner)
    assert process.done == []
    assert caplog.messages == ['dsv4-graphs: eager reason="LoRA: adapters change what the layers compute"']


@pytest.mark.parametrize("part", PARTS[:3])
@pytest.mark.parametrize("strict", [False, True])
def test_a_startup_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str, strict: bool
) -> None:
    caplog.set_level(logging.INFO, logger="sglang_dsv4_graphs")
    process = Process(monkeypatch, ORDINARY, strict=strict)
    process.fails[part] = torch.OutOfMemoryError("no room\nat all")
    decoder = process.build()
    runner = Runner(decoder)
    if strict:
        with pytest.raises(torch.OutOfMemoryError):
            process.start(runner)
        return
    process.start(runner)
    served = process.served(decoder)
    assert not served.ready
    reason = "startup failed: OutOfMemoryError: no room"
    assert served.stand_down == reason
    line = f'dsv4-graphs: eager reason="{reason}"'
    assert [m for m in caplog.messages if m.startswith("dsv4-graphs:")] == [line]
    # No graph stays behind.
    assert process.done[-1][0] == (reason if part != "begin" else "begin")
    done = list(process.done)
    process.start(runner)  # not tried again
    assert process.done == done


def test_what_ranks_agreed_on_does_not_hang_on_a_log_line(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, ORDINARY, strict=True)
    process.fails["summary"] = RuntimeError("no device")
    decoder = process.build()
    process.start(Runner(decoder))
    assert process.served(decoder).ready


@pytest.mark.parametrize("strict", [False, True])
def test_an_extension_that_fails_on_a_built_model(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, strict: bool
) -> None:
    """The engine's model must still be built; what the extension would have added is unknown, so it stays eager."""

    class Fails:
        @hookimpl
        def dsv4_graphs_model_built(self, served: ServedModel) -> None:
            raise OSError("no such device")

    caplog.set_level(logging.INFO, logger="sglang_dsv4_graphs")
    process = Process(monkeypatch, ORDINARY, strict=strict)
    process.manager.register(Fails())
    if strict:
        with pytest.raises(OSError, match="no such device"):
            process.build()
        return
    decoder = process.build()
    process.start(Runner(decoder))
    assert process.done == []
    assert 'dsv4-graphs: eager reason="startup failed: OSError: no such device"' in caplog.messages
    calls: list[Any] = []
    process.runtime.around_layer_loop(lambda *args: calls.append(args), decoder, *range(7))
    assert len(calls) == 1


@pytest.mark.parametrize(("supplied", "ours"), [(False, False), (True, True)])
def test_a_supplied_backend_makes_its_device_capturable(
    monkeypatch: pytest.MonkeyPatch, supplied: bool, ours: bool
) -> None:
    class Supplies:
        @hookimpl
        def dsv4_graphs_backend(self, device: str) -> str | None:
            return "tape" if device == "cpu" else None

    process = Process(monkeypatch, ServerFacts(device="cpu"))
    if supplied:
        process.manager.register(Supplies())
    decoder = process.build()
    runner = Runner(decoder)
    runner.device = "cpu"
    process.start(runner)
    assert process.served(decoder).ready is ours


class Peer:
    """Ranks of which another one fails in the part ``fails``; notes what this one would have done."""

    size = 2

    def __init__(self, fails: str) -> None:
        self.fails, self.parts = fails, []

    def together(self, what: str, part: Callable[[], object]) -> Failure | None:
        self.parts.append(what)
        try:
            part()
        except Exception as e:
            return Failure(0, "own", e)
        return Failure(1, "OutOfMemoryError: no room") if what == self.fails else None


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("part", ["begin", "finish"])
def test_a_part_that_fails_on_another_rank_is_over_here(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str, strict: bool
) -> None:
    caplog.set_level(logging.INFO, logger="sglang_dsv4_graphs")
    process, peer = Process(monkeypatch, ORDINARY, strict=strict), Peer(part)
    monkeypatch.setattr(module, "make_ranks", lambda engine: peer)
    decoder = process.build()
    reason = "startup failed: rank 1: OutOfMemoryError: no room"
    if strict:
        with pytest.raises(RuntimeError, match=f"STRICT=1 and prefill stays eager: {reason}"):
            process.start(Runner(decoder))
    else:
        process.start(Runner(decoder))
        assert process.done[-1] == (reason, process.served(decoder))  # the graphs are dropped
    assert f'dsv4-graphs: eager reason="{reason}"' in caplog.messages
    assert (process.served(decoder).ready, process.served(decoder).stand_down) == (False, reason)


def test_other_ranks_learn_of_an_extension_that_failed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails:
        @hookimpl
        def dsv4_graphs_model_built(self, served: ServedModel) -> None:
            raise OSError("no such device")

    process, peer = Process(monkeypatch, ORDINARY), Peer("")
    monkeypatch.setattr(module, "make_ranks", lambda engine: peer)
    process.manager.register(Fails())
    process.start(Runner(process.build()))
    assert (peer.parts, process.done) == (["begin"], [])


@pytest.mark.parametrize("ours", [False, True])
def test_ranks_gather_only_where_the_server_is_ours(monkeypatch: pytest.MonkeyPatch, ours: bool) -> None:
    """Reasons follow from the server's arguments: every rank stands down by itself."""
    process, made = Process(monkeypatch, ServerFacts(device="cuda", lora=not ours)), []
    monkeypatch.setattr(module, "make_ranks", lambda engine: made.append(1) or Peer(""))
    process.start(Runner(process.build()))
    assert made == [1] * ours


def test_ranks_that_lost_each_other_stand_down(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost(Peer):
        def together(self, what: str, part: Callable[[], object]) -> Failure | None:
            if what == "finish":
                raise RankError("rank 0 waited 600 s: nothing came from rank 1")
            return super().together(what, part)

    process = Process(monkeypatch, ORDINARY)
    monkeypatch.setattr(module, "make_ranks", lambda engine: Lost(""))
    decoder = process.build()
    process.start(Runner(decoder))
    reason = "startup failed: RankError: rank 0 waited 600 s: nothing came from rank 1"
    assert process.done[-1] == (reason, process.served(decoder))
    assert not process.served(decoder).ready


def test_a_failed_step_lets_go_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before memory is handed back: the frames of an error hold what the step had computed."""
    process, held = Process(monkeypatch, ORDINARY), []

    def finish(startup: Any, runner: Any, manager: Any) -> None:
        rows = torch.zeros(3)
        held.append(weakref.ref(rows))
        raise ValueError(f"no room for {rows.shape}")

    monkeypatch.setattr(module, "finish", finish)
    gone: list[bool] = []
    begin = process.begin

    def begin_noted(*args: Any) -> Any:
        startup = begin(*args)
        startup.abandon = lambda reason: gone.append(held[0]() is None)
        return startup

    monkeypatch.setattr(module, "begin", begin_noted)
    process.start(Runner(process.build()))
    assert gone == [True]
