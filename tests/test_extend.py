"""Extensions: found by their entry points, called through the hooks, and an error if they cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sglang_dsv4_graphs
from sglang_dsv4_graphs.extend import ENTRY_POINT_GROUP, ExtensionError, Specs, hookimpl, make_manager
from tests.distributions import install_distribution

GUARD = """
import torch
from sglang_dsv4_graphs import GuardedBuffer, hookimpl

held = [torch.zeros(4)]


@hookimpl
def dsv4_graphs_guard(probe):
    yield GuardedBuffer("my-workspace", lambda: held[0])
    yield GuardedBuffer("seen-by-" + probe.model, lambda: None, cheap=False)
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install extensions: ``installed(name=source)``."""

    def install(value: str = "{}", **sources: str) -> None:
        for name, source in sources.items():
            entry = {ENTRY_POINT_GROUP: {name: value.format(name)}}
            folder = install_distribution(tmp_path / name, f"dist-{name}", entry, **{name: source})
            monkeypatch.syspath_prepend(folder)

    return install


def test_the_hooks_are_the_documented_ones() -> None:
    names = [name for name in vars(Specs) if not name.startswith("_")]
    assert names == [
        "dsv4_graphs_model_built",
        "dsv4_graphs_startup",
        "dsv4_graphs_step",
        "dsv4_graphs_guard",
        "dsv4_graphs_backend",
        "dsv4_graphs_shutdown",
    ]
    manager = make_manager(third_parties=False)
    assert manager.project_name == "sglang_dsv4_graphs"
    assert all(hasattr(manager.hook, name) for name in names)


def test_an_extension_adds_a_buffer_to_the_guard(installed: Any) -> None:
    torch = pytest.importorskip("torch")
    from sglang_dsv4_graphs.bank.guard import AddressGuard, MovedBufferError

    installed(ext_guard=GUARD)
    manager = make_manager()
    probe = sglang_dsv4_graphs.Probe(model_runner=None, attn_backend=None, model="tests")
    guard = AddressGuard([b for found in manager.hook.dsv4_graphs_guard(probe=probe) for b in found])
    assert guard.names == ("my-workspace", "seen-by-tests")
    captured = guard.addresses()
    guard.check(captured, bank="b", bucket=64)
    manager.get_plugin("ext_guard").held[0] = torch.zeros(4)
    with pytest.raises(MovedBufferError, match="buffer=my-workspace"):
        guard.check(captured, bank="b", bucket=64)


def test_extensions_are_left_out_when_not_asked_for(installed: Any) -> None:
    installed(ext_broken="import ext_dependency_that_is_missing")
    assert make_manager(third_parties=False).list_name_plugin() == []


def test_an_object_can_be_an_extension(installed: Any) -> None:
    source = (
        "from sglang_dsv4_graphs import hookimpl\n"
        "class Mine:\n"
        "    @hookimpl\n"
        "    def dsv4_graphs_backend(self, device):\n"
        "        return 'mine' if device == 'x' else None\n"
        "mine = Mine()\n"
    )
    installed("{}:mine", ext_object=source)
    manager = make_manager()
    assert manager.hook.dsv4_graphs_backend(device="x") == "mine"
    assert manager.hook.dsv4_graphs_backend(device="y") is None


def test_the_first_backend_is_the_one() -> None:
    class Supplies:
        def __init__(self, name: str) -> None:
            self.name = name

        @hookimpl
        def dsv4_graphs_backend(self, device: str) -> str:
            return self.name

    manager = make_manager(third_parties=False)
    for name in ("one", "two"):
        manager.register(Supplies(name))
    assert manager.hook.dsv4_graphs_backend(device="cpu") == "two"


BROKEN = {
    "ext_missing": ("import ext_dependency_that_is_missing", "ModuleNotFoundError.*ext_dependency_that_is_missing"),
    "ext_raises": ("raise OSError('no such device')", "OSError: no such device"),
    "ext_unknown_hook": (
        "from sglang_dsv4_graphs import hookimpl\n@hookimpl\ndef dsv4_graphs_gaurd(probe): ...",
        "unknown hook 'dsv4_graphs_gaurd'",
    ),
    "ext_wrong_argument": (
        "from sglang_dsv4_graphs import hookimpl\n@hookimpl\ndef dsv4_graphs_guard(prob): ...",
        "prob",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_extension_that_cannot_be_loaded_is_named(installed: Any, name: str) -> None:
    source, why = BROKEN[name]
    installed(ext_fine=GUARD.replace("import torch", "").replace("torch.zeros(4)", "None"))
    installed(**{name: source})
    with pytest.raises(ExtensionError, match=rf"(?s)extension '{name}' \({name}\) cannot be loaded: .*{why}"):
        make_manager()


def test_an_entry_point_without_its_object_is_named(installed: Any) -> None:
    installed("{}:absent", ext_absent="")
    with pytest.raises(ExtensionError, match=r"'ext_absent' \(ext_absent:absent\).*AttributeError"):
        make_manager()


def test_public_names() -> None:
    from sglang_dsv4_graphs import extend

    assert sorted(sglang_dsv4_graphs.__all__) == ["GuardedBuffer", "Probe", "__version__", "hookimpl"]
    assert sglang_dsv4_graphs.hookimpl is extend.hookimpl
    assert sglang_dsv4_graphs.Probe is extend.Probe
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sglang_dsv4_graphs.nothing


def test_public_guarded_buffer() -> None:
    pytest.importorskip("torch")
    from sglang_dsv4_graphs.bank import guard

    assert sglang_dsv4_graphs.GuardedBuffer is guard.GuardedBuffer
