"""The ledger on the engine's real hook registry: all or nothing, undone to the last reference, others left alone."""

from __future__ import annotations

import sys
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from sglang_dsv4_graphs.engine import Engine, facts
from sglang_dsv4_graphs.engine.contract import Contract
from sglang_dsv4_graphs.hooks.ledger import Ledger, PatchError, hook_in_chain, owner_of, raw_attribute

pytestmark = pytest.mark.engine

SOURCE = """
class Model:
    def forward(self, x):
        return [f"forward {x}"]

    @staticmethod
    def static(x):
        return [f"static {x}"]


def finalize(x):
    return [f"finalize {x}"]
"""
NAMES = ("Model.forward", "Model.static", "finalize")


class Target:
    """A module to patch, one that imported from it by name, and a ledger on an empty registry of the engine's."""

    def __init__(self, engine: Engine) -> None:
        self.module, self.importer = sys.modules["ledger_target"], sys.modules["ledger_importer"]
        self.engine = engine
        self.registry = engine.hook_registry
        self.ledger = Ledger(engine)
        self.own = self.now()

    def now(self) -> dict[str, Any]:
        return {name: raw_attribute(*owner_of(f"ledger_target.{name}")) for name in NAMES}

    def call(self, name: str) -> list[str]:
        owner, attribute = owner_of(f"ledger_target.{name}")
        function = getattr(owner() if name == "Model.forward" else owner, attribute)
        return function("x")  # type: ignore[no-any-return]

    def other_plugin(self, name: str, word: str = "theirs") -> None:
        self.registry.register(f"ledger_target.{name}", saying(word), self.engine.HookType("around"))

    def apply(self, *names: str) -> None:
        self.ledger.apply([(Contract(n, f"ledger_target.{n}"), "around", saying("ours")) for n in names])


def saying(word: str) -> Callable[..., Any]:
    """An AROUND hook that puts ``word`` in front of what comes back."""

    def hook(original: Callable[..., Any], *args: Any) -> Any:
        return [word, *original(*args)]

    return hook


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Target:
    version = facts.installed_version()
    assert version is not None
    engine = Engine(version)
    monkeypatch.setattr(engine.hook_registry, "_hooks", defaultdict(list))
    monkeypatch.setattr(engine.hook_registry, "_patched", set())
    for name in ("ledger_target", "ledger_importer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    exec(SOURCE, vars(sys.modules["ledger_target"]))
    sys.modules["ledger_importer"].by_name = sys.modules["ledger_target"].finalize  # type: ignore[attr-defined]
    return Target(engine)


def test_apply_and_undo(target: Target) -> None:
    target.apply(*NAMES)
    assert [p.target for p in target.ledger.patches] == [f"ledger_target.{n}" for n in NAMES]
    for name in NAMES:
        assert target.call(name) == ["ours", f"{name.rpartition('.')[2]} x"]
    assert {p.attribute: p.old for p in target.ledger.patches} == {
        n.rpartition(".")[2]: own for n, own in target.own.items()
    }
    target.ledger.undo()
    assert target.ledger.patches == ()
    assert target.now() == target.own
    target.ledger.undo()
    assert target.now() == target.own


def test_undo_is_complete_in_the_registry_too(target: Target) -> None:
    target.apply(*NAMES)
    target.ledger.undo()
    target.registry.apply_hooks()
    assert target.now() == target.own
    assert not any(target.registry._hooks.values())


def test_apply_again_after_undo(target: Target) -> None:
    for _ in range(2):
        target.apply("finalize")
        assert target.call("finalize") == ["ours", "finalize x"]
        target.ledger.undo()
    assert target.now() == target.own


def test_modules_that_imported_a_function_by_name(target: Target) -> None:
    target.apply("finalize")
    assert target.importer.by_name is target.module.finalize is not target.own["finalize"]
    target.importer.later = target.module.finalize  # type: ignore[attr-defined]
    target.ledger.undo()
    assert target.importer.by_name is target.importer.later is target.own["finalize"]


def test_two_patches_of_one_function_come_off_together(target: Target) -> None:
    """The older one's function is what the newer puts back, and is nobody's any more."""
    target.apply("finalize", "finalize")
    assert target.call("finalize") == ["ours", "ours", "finalize x"]
    target.ledger.undo()
    assert target.now() == target.own
    assert target.importer.by_name is target.own["finalize"]


def test_a_hook_that_is_not_applied_undoes_the_others(target: Target) -> None:
    # The engine refuses to wrap a class: it logs that, and applies the rest.
    with pytest.raises(PatchError, match=r"^ledger_target\.Model: the engine's hook registry did not apply our hook"):
        target.apply("finalize", "Model", "Model.static")
    target.registry.apply_hooks()
    assert target.now() == target.own
    assert target.importer.by_name is target.own["finalize"]
    assert target.ledger.patches == ()


def test_a_registry_that_silently_does_nothing_is_found_out(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    real = target.registry._apply_target

    def apply_target(name: str, hooks: list[Any]) -> None:
        if not name.endswith("finalize"):
            real(name, hooks)

    monkeypatch.setattr(target.registry, "_apply_target", apply_target)
    with pytest.raises(PatchError, match=r"^ledger_target\.finalize: "):
        target.apply(*NAMES)
    assert target.now() == target.own


def test_an_error_while_applying_leaves_nothing(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    real = target.registry._apply_target

    def interrupted(name: str, hooks: list[Any]) -> None:
        if name.endswith("finalize"):
            raise KeyboardInterrupt
        real(name, hooks)

    monkeypatch.setattr(target.registry, "_apply_target", interrupted)
    with pytest.raises(KeyboardInterrupt):
        target.apply(*NAMES)
    monkeypatch.setattr(target.registry, "_apply_target", real)
    target.registry.apply_hooks()
    assert target.now() == target.own


def test_a_target_that_does_not_exist_leaves_nothing(target: Target) -> None:
    with pytest.raises(AttributeError):
        target.apply("finalize", "Model.absent")
    target.registry.apply_hooks()
    assert target.now() == target.own


@pytest.mark.parametrize("name", NAMES)
def test_beside_a_plugin_that_came_before(target: Target, name: str) -> None:
    target.other_plugin(name)
    target.registry.apply_hooks()
    theirs = target.now()
    target.apply(*NAMES)
    assert sorted(target.call(name)[:2]) == ["ours", "theirs"]
    target.ledger.undo()
    assert target.now() == theirs
    assert target.call(name)[:-1] == ["theirs"]


@pytest.mark.parametrize("name", NAMES)
def test_beside_a_plugin_that_is_registered_and_not_applied(target: Target, name: str) -> None:
    target.other_plugin(name)
    target.apply(*NAMES)
    target.registry.apply_hooks()
    assert sorted(target.call(name)[:-1]) == ["ours", "theirs"]
    target.ledger.undo()
    target.registry.apply_hooks()
    assert target.call(name)[:-1] == ["theirs"]
    assert all(target.now()[n] is target.own[n] for n in NAMES if n != name)


@pytest.mark.parametrize("name", NAMES)
def test_beside_a_plugin_that_comes_after(target: Target, name: str) -> None:
    target.apply(*NAMES)
    target.other_plugin(name)
    target.registry.apply_hooks()
    assert sorted(target.call(name)[:-1]) == ["ours", "theirs"]
    target.ledger.undo()
    assert target.call(name)[:-1] == ["theirs"]


def test_while_the_engine_is_applying_another_plugins_hook(target: Target) -> None:
    """Resolving that plugin's target imports the model module, which is when we are installed."""
    package = types.ModuleType("ledger_package")

    def importing(attribute: str) -> Any:
        if attribute != "Model":
            raise AttributeError(attribute)
        del package.__getattr__
        package.Model = target.module.Model  # type: ignore[attr-defined]
        target.apply(*NAMES)
        return target.module.Model

    package.__getattr__ = importing  # type: ignore[method-assign]
    sys.modules["ledger_package"] = package
    try:
        target.registry.register("ledger_package.Model.forward", saying("theirs"), target.engine.HookType("around"))
        target.registry.apply_hooks()
    finally:
        del sys.modules["ledger_package"]
    assert sorted(target.call("Model.forward")[:-1]) == ["ours", "theirs"]
    target.ledger.undo()
    assert target.call("Model.forward")[:-1] == ["theirs"]


def test_a_chain_is_searched_to_its_end() -> None:
    def wrap(inner: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper() -> Any:
            return hook(inner, unset)

        wrapper.__wrapped__ = inner  # type: ignore[attr-defined]
        if inner is None:
            unset = None  # an empty cell otherwise, as a recursive closure may have
        return wrapper

    def plain() -> None: ...

    one, two, never = saying("1"), saying("2"), saying("3")
    chain = wrap(wrap(plain, one), two)
    assert hook_in_chain(chain, one)
    assert hook_in_chain(chain, two)
    assert not hook_in_chain(chain, never)
    assert not hook_in_chain(plain, one)
