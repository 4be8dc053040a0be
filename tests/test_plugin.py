"""The entry point in fresh processes: found by the engine's own loader, cheap, patient, and gone without a trace.

Functions named ``in_…`` run in a process that has imported the engine's plugin loader and nothing of ours.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.distributions import PLUGIN, install_distribution
from tests.fresh import ROOT, in_fresh_process

NAME = "sglang-dsv4-graphs"
MODEL = "sglang.srt.models.deepseek_v4"
LOOP = f"{MODEL}.DeepseekV4Model._forward_layers_hc_pre_from_prev"
STARTUP = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.finalize_cuda_graph_capture"
BUDGET_S = 0.050

pytestmark = pytest.mark.engine


# What runs in a fresh process


def load_plugins() -> None:
    """The engine's loader, also if it ran before in this process."""
    from sglang.srt import plugins

    plugins._plugins_loaded = False
    plugins.load_plugins()


def import_model() -> None:
    import importlib

    importlib.import_module(MODEL)


def raw(target: str) -> Any:
    """What is at a dotted target, found without any code of ours."""
    import pkgutil

    path, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(path)
    return vars(owner)[name]


def chain(target: str) -> list[str]:
    """The hooks at a target, outermost first: "ours", or the name of another plugin's function."""
    link, found = raw(target), []
    while (inner := getattr(link, "__wrapped__", None)) is not None:
        code = getattr(link, "__code__", None)
        if code is not None and code.co_filename.endswith("hook_registry.py"):
            (hook,) = (c.cell_contents for c in link.__closure__ if c.cell_contents is not inner)
            found.append("ours" if hook.__module__.startswith("sglang_dsv4_graphs.") else hook.__qualname__)
        link = inner
    return found


def hook_targets() -> list[str]:
    from sglang_dsv4_graphs.engine.facts import hooks_for, installed_version

    version = installed_version()
    assert version is not None
    return [c.target for c in hooks_for(version)]


def assert_untouched() -> None:
    from sglang_dsv4_graphs.engine.facts import HOOKS

    for contract in HOOKS:
        try:
            assert chain(contract.target) == []
        except (ImportError, AttributeError, KeyError):
            continue  # the other version's
    assert chain(LOOP) == chain(STARTUP) == []


def assert_installed_once() -> None:
    found = {target: chain(target) for target in hook_targets()}
    assert found == {target: ["ours"] for target in found}


def in_the_order_of_a_server() -> None:
    from sglang.srt.model_executor.model_runner_components import cuda_graph_setup

    importer = sys.modules["an_importer"] = ModuleType("an_importer")
    importer.by_name = own = cuda_graph_setup.finalize_cuda_graph_capture  # type: ignore[attr-defined]

    load_plugins()
    from sglang_dsv4_graphs import plugin

    assert MODEL not in sys.modules
    assert "sglang_dsv4_graphs.hooks.install" not in sys.modules
    assert plugin.installation() is None

    import_model()
    assert_installed_once()
    first = plugin.installation()
    assert first is not None
    assert importer.by_name is cuda_graph_setup.finalize_cuda_graph_capture is not own

    load_plugins()
    plugin.activate()
    assert plugin.installation() is first
    assert_installed_once()

    from sglang.srt.plugins.hook_registry import HookRegistry

    for _ in range(2):
        plugin.deactivate()
        assert plugin.installation() is None
        HookRegistry.apply_hooks()
        assert_untouched()
        assert importer.by_name is cuda_graph_setup.finalize_cuda_graph_capture is own

    for again in (plugin.activate, load_plugins):
        again()
        assert_installed_once()
        assert plugin.installation() not in (None, first)
        plugin.deactivate()
        assert_untouched()


def in_a_process_that_has_the_model() -> None:
    import_model()
    own = {target: raw(target) for target in (LOOP, STARTUP)}
    load_plugins()
    assert_installed_once()
    from sglang_dsv4_graphs import plugin

    plugin.deactivate()
    assert all(raw(target) is value for target, value in own.items())


def in_a_process_that_deactivates_before_the_import() -> None:
    load_plugins()
    from sglang_dsv4_graphs import plugin

    plugin.deactivate()
    import_model()
    assert_untouched()
    plugin.activate()
    assert_installed_once()


def in_a_process_without_us() -> None:
    load_plugins()
    import_model()
    assert not [name for name in sys.modules if name.startswith("sglang_dsv4_graphs")]
    assert chain(LOOP) == chain(STARTUP) == []


def in_a_process_that_stands_down() -> None:
    load_plugins()
    import_model()
    from sglang_dsv4_graphs import plugin

    assert plugin.installation() is None
    assert_untouched()
    # Whoever else uses the registry later does not bring ours in.
    load_plugins()
    assert_untouched()


def in_a_strict_process(breakage: str) -> None:
    import_model()
    if breakage == "changed signature":
        from sglang.srt.model_executor.model_runner_components import cuda_graph_setup

        cuda_graph_setup.finalize_cuda_graph_capture = lambda runner, more: None
    elif breakage == "missing target":
        from sglang.srt.models.deepseek_v4 import DeepseekV4Model

        del DeepseekV4Model._forward_layers_hc_pre_from_prev
    elif breakage in ("unknown version", "missing engine"):
        import sglang_dsv4_graphs.engine.facts as facts

        def version(name: str) -> str:
            if breakage == "unknown version":
                return "0.5.99"
            raise facts.PackageNotFoundError(name)

        facts.version = version
    load_plugins()


def in_a_process_that_imports_every_model() -> None:
    load_plugins()
    import sglang.srt.models.registry  # noqa: F401


def in_a_process_with_another_plugin() -> dict[str, Any]:
    """Chains of hooks, and who acts in a call of the loop before and after deactivation."""
    load_plugins()
    import_model()
    from sglang_dsv4_graphs import plugin

    another = sys.modules["another_plugin"]
    installation = plugin.installation()
    assert installation is not None
    model = ModuleType("a model that is known to us")
    installation.runtime._served[model] = SimpleNamespace(run_loop=lambda *args: "ours")  # type: ignore[assignment]

    def call() -> list[str]:
        another.calls.clear()
        try:
            return [*another.calls, raw(LOOP)(model, *range(7)), *another.calls]
        except AttributeError:  # the engine's own loop wants more of a model
            return [*another.calls, "the engine's"]

    found = {"loop": chain(LOOP), "startup": chain(STARTUP), "acting": call()}
    plugin.deactivate()
    return {**found, "acting after": call()}


def in_a_process_like_the_engines() -> float:
    """CPU seconds of loading and running the entry point where the engine does it."""
    start = time.process_time()
    from sglang_dsv4_graphs.plugin import activate

    activate()
    return time.process_time() - start


# Tests


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder in which this plugin is installed."""
    return install_distribution(tmp_path / "ours", NAME, PLUGIN)


def test_life_of_an_installation(installed: Path) -> None:
    finished = in_fresh_process(in_the_order_of_a_server, path=[installed])
    assert finished.lines == []


def test_installing_where_the_model_is_already_imported(installed: Path) -> None:
    in_fresh_process(in_a_process_that_has_the_model, path=[installed])


def test_deactivating_before_the_model_is_imported(installed: Path) -> None:
    in_fresh_process(in_a_process_that_deactivates_before_the_import, path=[installed])


def test_uninstalled(tmp_path: Path) -> None:
    # The same distribution without entry points hides one that is really installed here.
    in_fresh_process(in_a_process_without_us, path=[install_distribution(tmp_path, NAME, {})])


def test_not_among_the_wanted_plugins(installed: Path) -> None:
    finished = in_fresh_process(in_a_process_without_us, path=[installed], env={"SGLANG_PLUGINS": "one,two"})
    assert "Skipping plugin dsv4_graphs (not in SGLANG_PLUGINS)" in finished.output


def test_among_the_wanted_plugins(installed: Path) -> None:
    in_fresh_process(in_a_process_that_has_the_model, path=[installed], env={"SGLANG_PLUGINS": "one, dsv4_graphs"})


def test_switched_off(installed: Path) -> None:
    env = {"SGLANG_DSV4_GRAPHS": "0", "SGLANG_DSV4_GRAPHS_STRICT": "1"}
    finished = in_fresh_process(in_a_process_that_stands_down, path=[installed], env=env)
    assert finished.lines == ['dsv4-graphs: eager reason="SGLANG_DSV4_GRAPHS=0"']


def test_a_bad_setting_and_an_unknown_one(installed: Path) -> None:
    env = {"SGLANG_DSV4_GRAPHS_SHADOW": "few", "SGLANG_DSV4_GRAPHS_STRIKT": "1", "SGLANG_DSV4_GRAPHS_" + "Q" * 60: "1"}
    finished = in_fresh_process(in_a_process_that_stands_down, path=[installed], env=env)
    assert finished.lines == [
        f'dsv4-graphs: unknown-setting name=SGLANG_DSV4_GRAPHS_{"Q" * 60} hint="see docs/settings.md"',
        'dsv4-graphs: unknown-setting name=SGLANG_DSV4_GRAPHS_STRIKT hint="did you mean SGLANG_DSV4_GRAPHS_STRICT?"',
        "dsv4-graphs: eager reason=\"SGLANG_DSV4_GRAPHS_SHADOW='few' is not allowed: "
        'give 0 (off) or a number of replayed steps"',
    ]


def test_a_broken_extension(installed: Path, tmp_path: Path) -> None:
    entry = {"sglang_dsv4_graphs": {"my_guard": "ext_plugin_broken"}}
    extension = install_distribution(tmp_path / "theirs", "ext", entry, ext_plugin_broken="import no_such_module")
    finished = in_fresh_process(in_a_process_that_stands_down, path=[installed, extension])
    (line,) = finished.lines
    assert "extension 'my_guard' (ext_plugin_broken) cannot be loaded: ModuleNotFoundError" in line


STRICT = {
    "changed signature": r"finalize_cuda_graph_capture: expected \(model_runner\), found \(runner, more\)",
    "missing target": r"_forward_layers_hc_pre_from_prev: expected \(self, .*\), found nothing \(AttributeError",
    "unknown version": r"engine 0\.5\.99 is untested",
    "missing engine": "no engine: the distribution sglang is not installed",
    "bad setting": "SGLANG_DSV4_GRAPHS_SHADOW='few' is not allowed",
    "broken extension": r"extension 'my_guard' \(ext_plugin_broken\) cannot be loaded",
}


@pytest.mark.parametrize("breakage", STRICT)
def test_strict_ends_the_process_through_the_engines_loader(installed: Path, tmp_path: Path, breakage: str) -> None:
    env, path = {"SGLANG_DSV4_GRAPHS_STRICT": "1"}, [installed]
    if breakage == "bad setting":
        env["SGLANG_DSV4_GRAPHS_SHADOW"] = "few"
    if breakage == "broken extension":
        entry = {"sglang_dsv4_graphs": {"my_guard": "ext_plugin_broken"}}
        path.append(install_distribution(tmp_path / "theirs", "ext", entry, ext_plugin_broken="import no_such"))
    finished = in_fresh_process(in_a_strict_process, breakage, path=path, env=env, code=1)
    last = finished.output.splitlines()[-1]
    assert last.startswith("dsv4-graphs: SGLANG_DSV4_GRAPHS_STRICT=1 refuses to start: ")
    assert re.search(STRICT[breakage], last)


def test_strict_ends_the_process_through_the_engines_model_registry(installed: Path) -> None:
    """The registry goes on to the next model after an ``Exception``; the server would start without this one."""
    env = {"SGLANG_DSV4_GRAPHS_STRICT": "1", "SGLANG_DSV4_GRAPHS_SHADOW": "few"}
    finished = in_fresh_process(in_a_process_that_imports_every_model, path=[installed], env=env, code=1)
    assert "refuses to start: SGLANG_DSV4_GRAPHS_SHADOW='few' is not allowed" in finished.output.splitlines()[-1]


OTHER = f"""
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

calls = []

def their_loop(original, *args, **kwargs):
    calls.append("theirs")
    return original(*args, **kwargs)

def their_startup(runner):
    pass

def load():
    HookRegistry.register("{LOOP}", their_loop, HookType.AROUND)
    HookRegistry.register("{STARTUP}", their_startup, HookType.BEFORE)
"""


@pytest.mark.parametrize("first", ["theirs", "ours"])
def test_beside_another_plugin_on_the_same_targets(installed: Path, tmp_path: Path, first: str) -> None:
    """Applying its hook to the loop imports the model, so ours are installed in the midst of that."""
    entry = {"sglang.srt.plugins": {"another": "another_plugin:load"}}
    other = install_distribution(tmp_path / "theirs", "another", entry, another_plugin=OTHER)
    path = [other, installed] if first == "theirs" else [installed, other]
    finished = in_fresh_process(in_a_process_with_another_plugin, path=path)
    assert {k: sorted(v) for k, v in finished.value.items()} == {
        "loop": ["ours", "their_loop"],
        "startup": ["ours", "their_startup"],
        "acting": ["ours", "theirs"],
        "acting after": ["the engine's", "theirs"],
    }
    assert finished.lines == []


def test_a_process_without_the_model_pays_little(installed: Path, record_property: Any) -> None:
    seconds = [in_fresh_process(in_a_process_like_the_engines, path=[installed]).value for _ in range(7)]
    record_property("median_ms", 1000 * statistics.median(seconds))
    assert statistics.median(seconds) < BUDGET_S, seconds


def test_the_entry_point_imports_neither_torch_nor_the_engine() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from sglang_dsv4_graphs.plugin import activate\n"
        "activate(); activate()\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'triton', 'sglang', 'pluggy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "[]"
