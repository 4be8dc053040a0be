"""Startup on the engine's side: the facts of a server, the order of the sweep, and what it is given."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs import GuardedBuffer  # noqa: E402
from sglang_dsv4_graphs.bank.cuda import CudaGraphBackend  # noqa: E402
from sglang_dsv4_graphs.bank.decide import ServerFacts, server_reason  # noqa: E402
from sglang_dsv4_graphs.bank.guard import MovedBufferError  # noqa: E402
from sglang_dsv4_graphs.bank.ranks import WAIT, Ranks  # noqa: E402
from sglang_dsv4_graphs.extend import hookimpl, make_manager  # noqa: E402
from sglang_dsv4_graphs.hooks import start  # noqa: E402
from sglang_dsv4_graphs.hooks.start import begin, finish, make_backend, make_ranks, make_startup, server_facts  # noqa: E402
from sglang_dsv4_graphs.log import RankLog  # noqa: E402
from sglang_dsv4_graphs.settings import Settings  # noqa: E402
from tests.fresh import in_fresh_process  # noqa: E402


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "hold_workspace", lambda stream: True)


class Engine:
    """What startup asks of the engine; an ordinary server unless a test changes it."""

    version = "0.5.23"

    def __init__(self) -> None:
        self.parallel = SimpleNamespace(
            attn_dp_size=1, attn_cp_size=1, pp_size=1, tp_rank=0, tp_size=1, tp_group=SimpleNamespace(barrier=None)
        )
        self.overlap = SimpleNamespace(enable_two_batch_overlap=False)
        self.mixed = False
        self.max_requests: int | None = None
        self.unified, self.borrowing, self.hooks, self.mode, self.full_prefill = False, False, None, "null", False
        borrow = SimpleNamespace(get=lambda: self.borrowing)
        self.envs = SimpleNamespace(SGLANG_ENABLE_GRAPH_POOL_BORROW=borrow)
        self.offloads, self.a2a = False, "none"
        self.asked: list[str] = []
        self.collects, self.freezes, self.frozen = False, list[bool](), False
        # The backends that may store inside a graph.
        self.storing: list[Any] = []

    def stores_in_graph(self, backend: Any) -> bool:
        return backend in self.storing

    def get_parallel(self) -> Any:
        return self.parallel

    def get_exec(self) -> Any:
        return SimpleNamespace(overlap=self.overlap, graph=SimpleNamespace(enable_cudagraph_gc=self.collects))

    @contextmanager
    def freeze_gc(self, enable_cudagraph_gc: bool) -> Iterator[None]:
        self.freezes.append(enable_cudagraph_gc)
        self.frozen = True
        try:
            yield
        finally:
            self.frozen = False

    def offloads_weights(self) -> bool:
        return self.offloads

    def moe_a2a_backend(self) -> Any:
        return SimpleNamespace(is_none=lambda: self.a2a == "none")

    def get_observability(self) -> Any:
        return SimpleNamespace(forward_hooks=self.hooks)

    def get_disagg(self) -> Any:
        return SimpleNamespace(disaggregation_mode=self.mode)

    def get_schedule(self) -> Any:
        return SimpleNamespace(
            chunked_prefill_size=4096, enable_mixed_chunk=self.mixed, prefill_max_requests=self.max_requests
        )

    def unified_kv(self) -> bool:
        return self.unified

    def captures_full_prefill(self) -> bool:
        return self.full_prefill

    def global_graph_pool(self, device_module: Any) -> str:
        assert device_module is torch.cuda
        return "global pool"

    def global_capture_stream(self) -> str:
        return "global stream"


class Runner:
    device = "cuda:1"
    lora_manager = None
    hisparse_coordinator = None
    max_running_requests = 48

    def __init__(self) -> None:
        self.server_args = SimpleNamespace(enable_memory_saver=False)
        self.attn_backend = SimpleNamespace(token_to_kv_pool=SimpleNamespace(request_window=None))
        self.model_config = SimpleNamespace(context_len=256)
        self.req_to_token_pool = SimpleNamespace(size=4)


class Model:
    hc_pre_from_prev_sublayer = True
    start_layer, end_layer = 0, 2

    def __init__(self) -> None:
        self.layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
        self.config = SimpleNamespace(vocab_size=100)


class Served:
    def __init__(self, **settings: Any) -> None:
        self.model, self.settings, self.log = Model(), Settings(**settings), RankLog()
        self.ready, self.ranks, self.engine = False, Ranks(0, 1), Engine()


def facts(engine: Engine | None = None, runner: Runner | None = None, model: Model | None = None) -> ServerFacts:
    return server_facts(engine or Engine(), runner or Runner(), model or Model())  # type: ignore[arg-type]


def test_an_ordinary_server() -> None:
    assert facts() == ServerFacts(device="cuda")
    assert server_reason(facts()) is None


def _set(path: str, value: Any) -> Any:
    def change(engine: Engine, runner: Runner, model: Model) -> None:
        owner: Any = {"engine": engine, "runner": runner, "model": model}[path.split(".")[0]]
        *between, name = path.split(".")[1:]
        for part in between:
            owner = getattr(owner, part)
        setattr(owner, name, value)

    return change


CHANGES = {
    "device": ("runner.device", "cpu", "cpu"),
    "dp_attention": ("engine.parallel.attn_dp_size", 2, True),
    "context_parallel": ("engine.parallel.attn_cp_size", 2, True),
    "pipeline_parallel": ("engine.parallel.pp_size", 2, True),
    "two_batch_overlap": ("engine.overlap.enable_two_batch_overlap", True, True),
    "unified_kv": ("engine.unified", True, True),
    "hisparse": ("runner.hisparse_coordinator", object(), True),
    "lora": ("runner.lora_manager", object(), True),
    "weight_offload": ("engine.offloads", True, True),
    "expert_all_to_all": ("engine.a2a", "deepep", True),
    "memory_saver": ("runner.server_args.enable_memory_saver", True, True),
    "pool_borrowing": ("engine.borrowing", True, True),
    "forward_hooks": ("engine.hooks", [{"name": "x"}], True),
    "decode_only": ("engine.mode", "decode", True),
    "full_prefill_graph": ("engine.full_prefill", True, True),
    "lagged_hyper_connections": ("model.hc_pre_from_prev_sublayer", False, False),
}


@pytest.mark.parametrize("fact", CHANGES)
def test_each_fact_comes_from_its_place_in_the_engine(fact: str) -> None:
    path, value, expected = CHANGES[fact]
    parts = (Engine(), Runner(), Model())
    _set(path, value)(*parts)
    found = facts(*parts)
    assert getattr(found, fact) == expected
    assert server_reason(found) is not None
    others = {name for name in CHANGES if name != fact}
    assert {n: getattr(found, n) for n in others} == {n: getattr(ServerFacts(device="cuda"), n) for n in others}


def test_every_fact_is_read() -> None:
    assert set(CHANGES) == set(ServerFacts.__dataclass_fields__)


def test_a_prefill_server_is_served() -> None:
    engine = Engine()
    engine.mode = "prefill"
    assert server_reason(facts(engine)) is None


def in_a_process_with_published_arguments() -> list[str]:
    """The same places in the real engine; returns the facts that could be switched on there."""
    import tempfile

    from sglang_dsv4_graphs.cpu_engine.config import ModelShape, write_config
    from sglang_dsv4_graphs.cpu_engine.process import World, init_process
    from sglang_dsv4_graphs.cpu_engine.torchvision_shim import ensure_torchvision
    from sglang_dsv4_graphs.engine import Engine as RealEngine
    from sglang_dsv4_graphs.engine.facts import installed_version

    ensure_torchvision()
    with tempfile.TemporaryDirectory() as folder:
        args = init_process(write_config(Path(folder), ModelShape()), World())
    engine, runner, found = RealEngine(str(installed_version())), Runner(), []
    runner.server_args = args

    from sglang.srt.layers.moe.utils import MoeA2ABackend
    from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig
    from sglang.srt.runtime_context import get_flags

    def read() -> ServerFacts:
        return server_facts(engine, runner, Model())

    def prefill_graph(backend: str) -> Any:
        config = CudaGraphConfig(prefill=PhaseConfig(backend=backend))
        return engine.get_exec().graph.override(cuda_graph_config=config)

    assert read() == ServerFacts(device="cuda")
    scopes = {
        "weight_offload": engine.get_exec().offload.override(cpu_offload_gb=1),
        "expert_all_to_all": get_flags().moe.override(a2a_backend=MoeA2ABackend.DEEPEP),
        "two_batch_overlap": engine.get_exec().overlap.override(enable_two_batch_overlap=True),
        "forward_hooks": engine.get_observability().override(forward_hooks=[{"name": "x"}]),
        "decode_only": engine.get_disagg().override(disaggregation_mode="decode"),
        "pool_borrowing": engine.envs.SGLANG_ENABLE_GRAPH_POOL_BORROW.override(True),
        "full_prefill_graph": prefill_graph(Backend.FULL),
    }
    for fact, scope in scopes.items():
        with scope:
            found += [fact] * getattr(read(), fact)
        assert not getattr(read(), fact)
    assert args.enable_memory_saver is False
    # A kind that an engine may come to offer is as little known as ``full``.
    for kind in (*Backend.ALL, "another"):
        with prefill_graph(kind):
            assert read().full_prefill_graph is (kind not in (Backend.DISABLED, Backend.BREAKABLE)), kind
            assert engine.captures_prefill() is (kind != Backend.DISABLED), kind
    return found


@pytest.mark.engine
def test_the_real_engine_has_these_places() -> None:
    expected = [
        "weight_offload",
        "expert_all_to_all",
        "two_batch_overlap",
        "forward_hooks",
        "decode_only",
        "pool_borrowing",
        "full_prefill_graph",
    ]
    assert in_fresh_process(in_a_process_with_published_arguments).value == expected


class Supplies:
    @hookimpl
    def dsv4_graphs_backend(self, device: str) -> str | None:
        return f"supplied for {device}" if device == "cpu" else None


def test_a_supplied_backend_is_for_its_device() -> None:
    manager = make_manager(third_parties=False)
    manager.register(Supplies())
    runner = Runner()
    runner.device = "cpu"
    assert make_backend(Engine(), Served(), runner, manager) == "supplied for cpu"  # type: ignore[arg-type,comparison-overlap]
    assert isinstance(make_backend(Engine(), Served(), Runner(), manager), CudaGraphBackend)  # type: ignore[arg-type]


@pytest.mark.parametrize(("wanted", "held", "shared"), [(True, True, True), (False, True, False), (True, False, False)])
def test_pool_and_stream_of_cuda_graphs(
    wanted: bool, held: bool, shared: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "private pool")
    monkeypatch.setattr(start, "stream_of_our_own", lambda: "private stream")
    asked: list[Any] = []
    monkeypatch.setattr(start, "hold_workspace", lambda stream: asked.append(stream) or held)
    made: dict[str, Any] = {}
    monkeypatch.setattr(start, "CudaGraphBackend", lambda engine, **options: made.update(options))
    engine = Engine()
    served = Served(global_pool=wanted)
    make_backend(engine, served, Runner(), make_manager(third_parties=False))  # type: ignore[arg-type]
    kind = "global" if shared else "private"
    # A bank may drop its graphs and capture others: neither pool may go with its last graph.
    assert made == {"pool": f"{kind} pool", "stream": f"{kind} stream", "ranks": served.ranks, "shared": True}
    assert asked == (["global stream"] if wanted else [])
    # Graphs that others captured on the stream use a workspace that would go with one of ours.
    assert ("private-pool" in caplog.text) == (wanted and not held)


class Steps:
    """A sweep that notes its steps."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.done: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.done.append((name, self.served.ready, *args))


def test_beginning_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sglang_dsv4_graphs")
    served, manager = Served(), make_manager(third_parties=False)
    manager.register(object(), name="decoder-replay")
    manager.register(object(), name="another")
    manager.register(object(), name="full-layer")
    steps = Steps(served)
    monkeypatch.setattr(start, "make_startup", lambda *args: steps)
    assert begin(Engine(), served, Runner(), manager) is steps  # type: ignore[arg-type,comparison-overlap]
    assert caplog.messages == ["dsv4-graphs: installed engine=0.5.23 banks=full-layer,decoder-replay"]


@pytest.mark.parametrize("collects", [False, True])
def test_the_order_of_the_sweep(monkeypatch: pytest.MonkeyPatch, collects: bool) -> None:
    monkeypatch.setattr(start, "drive_engine_tail", lambda startup: startup.drive_engine_tail())

    class Captures:
        @hookimpl
        def dsv4_graphs_startup(self, startup: Any) -> None:
            startup.capture()
            frozen.append(engine.frozen)

    frozen: list[bool] = []
    served, manager = Served(), make_manager(third_parties=False)
    engine = served.engine
    engine.collects = collects  # --enable-cudagraph-gc
    manager.register(Captures())
    steps, runner = Steps(served), Runner()
    runner.forward_stream = "serving stream"
    for name in ("open", "rehearse"):
        note = getattr(steps, name)
        setattr(steps, name, lambda *a, note=note: frozen.append(engine.frozen) or note(*a))
    finish(steps, runner, manager)  # type: ignore[arg-type]
    assert steps.done == [
        ("open", False),
        ("capture", False),
        ("drive_engine_tail", False),
        ("release", False),
        ("rehearse", False, "serving stream"),  # opens the path that serves for itself alone
    ]
    assert not served.ready  # until all ranks have come here
    # Each release of the sweep collects, and half a second each would be lost on what no capture made.
    assert (frozen, engine.frozen, engine.freezes) == ([True] * 3, False, [collects])


def test_a_failed_capture_leaves_the_step_path_closed() -> None:
    class Fails:
        @hookimpl
        def dsv4_graphs_startup(self, startup: Any) -> None:
            raise RuntimeError("no room")

    served, manager = Served(), make_manager(third_parties=False)
    manager.register(Fails())
    with pytest.raises(RuntimeError, match="no room"):
        finish(Steps(served), Runner(), manager)  # type: ignore[arg-type]
    assert (served.engine.freezes, served.engine.frozen) == ([False], False)
    assert not served.ready


@pytest.mark.parametrize(("mixed", "rows"), [(False, 4096), (True, 4096 + 48)])
def test_a_mixed_chunk_is_larger_than_the_chunk(mixed: bool, rows: int) -> None:
    engine = Engine()
    engine.mixed = mixed
    startup = make_startup(engine, Served(), Runner(), make_manager(third_parties=False))  # type: ignore[arg-type]
    assert startup.largest_step == rows
    assert startup.chunk_size == 4096


@pytest.mark.parametrize(
    ("mixed", "limit", "most"), [(False, None, 4), (False, 2, 2), (False, 9, 4), (True, 2, 4), (True, None, 4)]
)
def test_the_most_requests_of_a_step(mixed: bool, limit: int | None, most: int) -> None:
    engine = Engine()
    engine.mixed, engine.max_requests = mixed, limit
    startup = make_startup(engine, Served(), Runner(), make_manager(third_parties=False))  # type: ignore[arg-type]
    assert startup.most_requests == most


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("able", [True, False])
def test_stores_are_captured_where_both_setting_and_backend_allow(merged: bool, able: bool) -> None:
    engine, runner, served = Engine(), Runner(), Served(merged_kv_store=merged)
    engine.storing = [runner.attn_backend] if able else []
    startup = make_startup(engine, served, runner, make_manager(third_parties=False))  # type: ignore[arg-type]
    assert startup._store_in_graph is (merged and able)


def test_ranks_have_a_group_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = Engine(), []
    assert make_ranks(engine).size == 1  # type: ignore[arg-type]
    engine.parallel.tp_size, engine.parallel.tp_rank = 2, 1
    engine.parallel.tp_group.ranks = [4, 5]
    monkeypatch.setattr(
        torch.distributed, "new_group", lambda ranks, **options: made.append((ranks, options)) or "ours"
    )
    ranks = make_ranks(engine)  # type: ignore[arg-type]
    assert (ranks.rank, ranks.size, ranks._group) == (1, 2, "ours")
    # Synchronised among its members alone: torch's count of groups, which names the engine's later ones, stays.
    assert made == [([4, 5], {"backend": "gloo", "timeout": WAIT, "use_local_synchronization": True})]


def test_what_the_sweep_is_given() -> None:
    engine, runner, served = Engine(), Runner(), Served(strict=True)
    runner.device = "cpu"
    held = {"workspace": torch.zeros(2)}
    probes: list[Any] = []

    class Guards:
        @hookimpl
        def dsv4_graphs_guard(self, probe: Any) -> Any:
            probes.append(probe)
            return [GuardedBuffer("workspace", lambda: held["workspace"])]

    manager = make_manager(third_parties=False)
    for plugin in (Supplies(), Guards()):
        manager.register(plugin)
    startup = make_startup(engine, served, runner, manager)  # type: ignore[arg-type]
    assert startup.served is served  # type: ignore[comparison-overlap]
    assert (startup.chunk_size, startup.strict, startup.backend) == (4096, True, "supplied for cpu")
    assert (startup.dummies.most_rows, startup.dummies.most_requests) == (1024, 4)
    assert startup.ranks is served.ranks

    assert probes == []  # asked when workspaces have grown
    model = served.model
    model.layers[1].derived = torch.zeros(2)  # type: ignore[assignment]
    guard = startup.guard_now(1, 2)
    ((probe,),) = (probes,)
    assert (probe.model_runner, probe.attn_backend, probe.model) == (runner, runner.attn_backend, served.model)
    assert guard.names == ("workspace", "layers.1.derived")
    captured = guard.addresses()
    guard.check(captured, bank="b", bucket=1, everything=True)
    kept = [layer.weight.data for layer in model.layers]
    for other in (0, 2):  # not of this bank's range
        model.layers[other].weight.data = torch.zeros(2, 2)
        guard.check(captured, bank="b", bucket=1, everything=True)
    served.model.layers[1].weight.data = torch.zeros(2, 2)
    with pytest.raises(MovedBufferError, match=r"buffer=layers\.1\.weight"):
        guard.check(captured, bank="b", bucket=1)
    assert kept is not None
