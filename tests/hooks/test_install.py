"""Installing into the engine of this process: everything or nothing, with a reason; strict stops the process."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from sglang_dsv4_graphs.engine import facts
from sglang_dsv4_graphs.engine.api import speaks_for_server
from sglang_dsv4_graphs.engine.contract import release
from sglang_dsv4_graphs.extend import ENTRY_POINT_GROUP, hookimpl
from sglang_dsv4_graphs.hooks.install import Installation, StrictError, install, stand_down
from sglang_dsv4_graphs.hooks.ledger import hook_in_chain, owner_of, raw_attribute
from sglang_dsv4_graphs.settings import Settings
from tests.distributions import install_distribution
from tests.fresh import in_fresh_process
from tests.replay.server import IMPORT_THE_ENGINE

pytestmark = pytest.mark.engine

LOOP = "DeepseekV4Model._forward_layers_hc_pre_from_prev"


def engine_state() -> dict[str, Any]:
    """Every hook target of every version (None where it is missing), and the hook registry's contents."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    state: dict[str, Any] = {
        "registered": {target: list(hooks) for target, hooks in HookRegistry._hooks.items() if hooks},
        "patched": set(HookRegistry._patched),
    }
    for contract in facts.HOOKS:
        try:
            state[contract.target] = raw_attribute(*owner_of(contract.target))
        except (ImportError, AttributeError):
            state[contract.target] = None
    return state


@pytest.fixture
def installed() -> Iterator[Callable[..., Installation | None]]:
    """``install``; whatever it did is undone after the test."""
    done: list[Installation] = []

    def run(settings: Settings | None = None, *, third_parties: bool = False) -> Installation | None:
        installation = install(settings or Settings(), third_parties=third_parties)
        if installation is not None:
            done.append(installation)
        return installation

    yield run
    for installation in done:
        installation.undo()


def test_every_hook_is_in_place(installed: Any) -> None:
    before = engine_state()
    installation = installed()
    version = facts.installed_version()
    assert version is not None
    hooks = facts.hooks_for(version)
    assert [p.target for p in installation.ledger.patches] == [c.target for c in hooks]
    for patch in installation.ledger.patches:
        assert patch.old is before[patch.target]
        assert raw_attribute(*owner_of(patch.target)) is patch.new is not patch.old
        assert hook_in_chain(patch.new, patch.hook)
    # Only targets of this version's contracts were touched.
    for target, value in before.items():
        if target.startswith("sglang.") and target not in [c.target for c in hooks]:
            assert engine_state()[target] is value


def test_nobody_else_has_a_patched_function_by_name(installed: Any) -> None:
    """So tests of servers may let the registry look for importers among these packages alone."""
    new = {id(patch.new) for patch in installed().ledger.patches}
    named = {name for name, module in sys.modules.items() for value in vars(module).values() if id(value) in new}
    assert named, "the targets that are functions of a module"
    assert {name.partition(".")[0] for name in named} <= set(IMPORT_THE_ENGINE)


def test_what_is_registered(installed: Any) -> None:
    names = {name for name, _ in installed().manager.list_name_plugin()}
    assert {"known-buffers", "full-layer", "decoder-replay"} <= names


def test_the_full_layer_bank_captures_first(installed: Any) -> None:
    implementations = installed().manager.hook.dsv4_graphs_startup.get_hookimpls()
    assert [i.plugin_name for i in reversed(implementations)] == ["full-layer", "decoder-replay"]


def test_the_engine_logs_our_hooks_under_our_name(installed: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sglang.srt.plugins.hook_registry")
    installed()
    applied = [m for m in caplog.messages if m.startswith("Applied 1 hook(s) to sglang.")]
    assert len(applied) == len(facts.hooks_for(str(facts.installed_version())))
    assert all(m.endswith("(from: plugin=dsv4_graphs, dist=sglang-dsv4-graphs)") for m in applied)


def test_undo_gives_everything_back_once(installed: Any) -> None:
    class Counts:
        shutdowns = 0

        @hookimpl
        def dsv4_graphs_shutdown(self) -> None:
            self.shutdowns += 1
            assert engine_state() == before  # the engine is its own again before anything is released

    before, counts = engine_state(), Counts()
    installation = installed()
    installation.manager.register(counts)
    for _ in range(2):
        installation.undo()
        assert engine_state() == before
    assert counts.shutdowns == 1


def test_install_undo_install(installed: Any) -> None:
    before = engine_state()
    for _ in range(2):
        installation = installed()
        assert engine_state() != before
        installation.undo()
        assert engine_state() == before


def changed_signature(monkeypatch: pytest.MonkeyPatch) -> str:
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup

    monkeypatch.setattr(cuda_graph_setup, "finalize_cuda_graph_capture", lambda runner, more: None)
    return r"finalize_cuda_graph_capture: expected \(model_runner\), found \(runner, more\)$"


def missing_hook_target(monkeypatch: pytest.MonkeyPatch) -> str:
    from sglang.srt.models.deepseek_v4 import DeepseekV4Model

    monkeypatch.delattr(DeepseekV4Model, LOOP.rpartition(".")[2])
    return rf"{LOOP}: expected \(self, positions, .*\), found nothing \(AttributeError"


def missing_call(monkeypatch: pytest.MonkeyPatch) -> str:
    from sglang.srt.model_executor.runner_utils import pool

    monkeypatch.delattr(pool, "graph_pool_replay_scope")
    return r"graph_pool_replay_scope: expected \(…\), found nothing \(AttributeError"


def missing_module(monkeypatch: pytest.MonkeyPatch) -> str:
    from sglang.srt import eplb

    monkeypatch.setitem(sys.modules, "sglang.srt.eplb.expert_distribution", None)
    monkeypatch.delattr(eplb, "expert_distribution", raising=False)
    return r"get_global_expert_distribution_recorder: expected \(\), found nothing \("


def unknown_version(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(facts, "version", lambda name: "0.5.99")
    return r"^engine 0\.5\.99 is untested \(tested: 0\.5\.22, 0\.5\.23\); SGLANG_DSV4_GRAPHS_ALLOW_UNTESTED_ENGINE=1"


def missing_engine(monkeypatch: pytest.MonkeyPatch) -> str:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(facts, "version", version)
    return "^no engine: the distribution sglang is not installed$"


def hooks_not_applied(monkeypatch: pytest.MonkeyPatch) -> str:
    from sglang.srt.plugins.hook_registry import HookRegistry

    real = HookRegistry._apply_target

    def apply_target(target: str, hooks: list[Any]) -> None:
        if target.endswith("DeepseekV4Model.__init__"):
            raise RuntimeError("the registry logs this and goes on")
        real(target, hooks)

    monkeypatch.setattr(HookRegistry, "_apply_target", apply_target)
    return r"DeepseekV4Model\.__init__: the engine's hook registry did not apply our hook"


BREAKAGES = [
    changed_signature,
    missing_hook_target,
    missing_call,
    missing_module,
    unknown_version,
    missing_engine,
    hooks_not_applied,
]


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_stand_down_with_the_reason(
    installed: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    breakage: Callable[[pytest.MonkeyPatch], str],
) -> None:
    import sglang.srt.models.deepseek_v4

    assert sglang.srt.models.deepseek_v4
    reason = breakage(monkeypatch)
    before = engine_state()
    caplog.set_level(logging.INFO, logger="sglang_dsv4_graphs")

    assert installed() is None
    assert engine_state() == before
    (line,) = [r.getMessage() for r in caplog.records if r.name == "sglang_dsv4_graphs"]
    logged = re.fullmatch('dsv4-graphs: eager reason="([^"]*)"', line)
    assert logged is not None
    assert re.search(reason, logged[1])

    with pytest.raises(StrictError) as caught:
        installed(Settings(strict=True))
    assert engine_state() == before
    assert re.search(reason, caught.value.reason)
    assert caught.value.code == f"dsv4-graphs: SGLANG_DSV4_GRAPHS_STRICT=1 refuses to start: {caught.value.reason}"


def test_strict_is_no_exception_that_the_engine_swallows() -> None:
    assert issubclass(StrictError, SystemExit)
    assert not issubclass(StrictError, Exception)


def test_an_untested_version_that_is_allowed(
    installed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is held to the newest tested version's contracts, which 0.5.22 does not keep."""
    newest = release(str(facts.installed_version())) == facts.TESTED_VERSIONS[-1]
    caplog.set_level(logging.INFO, logger="sglang_dsv4_graphs")
    unknown_version(monkeypatch)
    installation = installed(Settings(allow_untested_engine=True))
    assert (installation is not None) is newest
    if newest:
        assert installation.runtime.engine.version == "0.5.99"
    else:
        assert "engine 0.5.99 differs from what is known" in caplog.text


def test_an_extension_that_does_not_import(
    installed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    entry = {ENTRY_POINT_GROUP: {"my_guard": "ext_install_broken"}}
    monkeypatch.syspath_prepend(
        install_distribution(tmp_path, "dist-broken", entry, ext_install_broken="import no_such_dependency")
    )
    caplog.set_level(logging.INFO, logger="sglang_dsv4_graphs")
    before = engine_state()
    assert installed(third_parties=True) is None
    assert "extension 'my_guard' (ext_install_broken) cannot be loaded" in caplog.text
    with pytest.raises(StrictError, match="my_guard"):
        installed(Settings(strict=True), third_parties=True)
    assert engine_state() == before
    assert installed(third_parties=False) is not None


def test_extensions_come_before_ours(installed: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = "from sglang_dsv4_graphs import hookimpl\n@hookimpl\ndef dsv4_graphs_backend(device): return 'mine'"
    entry = {ENTRY_POINT_GROUP: {"my_backend": "ext_install_backend"}}
    folder = install_distribution(tmp_path, "dist-backend", entry, ext_install_backend=source)
    monkeypatch.syspath_prepend(folder)
    manager = installed(third_parties=True).manager
    assert "my_backend" in [name for name, _ in manager.list_name_plugin()]
    assert manager.hook.dsv4_graphs_backend(device="cpu") == "mine"


def test_standing_down_is_logged_or_raised(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="sglang_dsv4_graphs")
    stand_down("because of that", strict=False)
    assert caplog.messages == ['dsv4-graphs: eager reason="because of that"']
    with pytest.raises(StrictError, match="refuses to start: because of that"):
        stand_down("because of that", strict=True)
    assert len(caplog.messages) == 1


def in_a_process_that_stands_down(role: str | None, ranks: dict[str, int]) -> None:
    """A process that the engine told ``role`` and ``ranks`` (None: nothing yet), and that stands down."""
    import tempfile

    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    from sglang_dsv4_graphs.cpu_engine.config import ModelShape, write_config

    if role is not None:
        with tempfile.TemporaryDirectory() as folder:
            model = str(write_config(Path(folder), ModelShape()))
            args = ServerArgs(model_path=model, device="cpu", tp_size=2)
            publish(args, role=role, ranks=SpawnRanks(**ranks) if ranks else None)
    stand_down("because of that", strict=False)


@pytest.mark.parametrize(
    ("role", "ranks", "lines"),
    [
        (None, {}, 1),
        ("scheduler", {"world_rank": 0}, 1),
        ("scheduler", {"world_rank": 1}, 0),
        ("scheduler", {"world_rank": 0, "dp_rank": 1}, 0),
        ("tokenizer", {}, 0),
    ],
)
def test_one_process_of_a_server_says_that_it_stands_down(role: str | None, ranks: dict[str, int], lines: int) -> None:
    finished = in_fresh_process(in_a_process_that_stands_down, role, ranks)
    assert finished.lines == ['dsv4-graphs: eager reason="because of that"'] * lines


def test_an_engine_that_knows_no_ranks_keeps_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for context in (None, SimpleNamespace(), SimpleNamespace(get_parallel=SimpleNamespace)):
        monkeypatch.setitem(sys.modules, facts.RUNTIME_CONTEXT, context)
        assert speaks_for_server()


def test_a_third_party_that_fails_at_shutdown_stops_nobody(
    installed: Callable[..., Installation | None], caplog: pytest.LogCaptureFixture
) -> None:
    """Extensions are told first, and our banks hold the memory of their graphs."""

    class Fails:
        @hookimpl
        def dsv4_graphs_shutdown(self) -> None:
            raise OSError("already closed")

    installation = installed()
    assert installation is not None
    told: list[str] = []
    for name in ("full-layer", "decoder-replay"):
        bank = installation.manager.get_plugin(name)
        bank._banks = {object(): SimpleNamespace(retire=lambda reason, name=name: told.append(name))}
    installation.manager.register(Fails(), name="theirs")
    installation.undo()
    assert sorted(told) == ["decoder-replay", "full-layer"]
    assert "dsv4-graphs: shutdown-failed extension=theirs" in caplog.messages
