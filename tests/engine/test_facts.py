"""Selection of facts, and that no other module states facts about the engine."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import sglang_dsv4_graphs
from sglang_dsv4_graphs.engine import facts
from sglang_dsv4_graphs.engine.contract import release
from sglang_dsv4_graphs.engine.facts import CALLS, HOOKS, contracts_for, hooks_for

PACKAGE = Path(sglang_dsv4_graphs.__file__).parent


@pytest.mark.parametrize("version", facts.TESTED_VERSIONS)
def test_names_are_unique_in_a_version(version: str) -> None:
    names = Counter(c.name for c in contracts_for(version))
    assert [name for name, count in names.items() if count > 1] == []
    # Two hooks on one target would be two wrappers, and undone in one step.
    targets = Counter(c.target for c in hooks_for(version))
    assert [target for target, count in targets.items() if count > 1] == []


def test_every_contract_belongs_to_a_tested_version() -> None:
    known = {c for version in facts.TESTED_VERSIONS for c in contracts_for(version)}
    assert known == {*HOOKS, *CALLS}


def test_an_untested_version_is_held_to_the_newest_tested_one() -> None:
    assert contracts_for("0.5.24") == contracts_for("0.5.23") != contracts_for("0.5.22")
    assert contracts_for("0.5.22.post2") == contracts_for("0.5.22")


def test_hooks_of_each_version() -> None:
    old, new = ({c.name for c in hooks_for(version)} for version in ("0.5.22", "0.5.23"))
    assert {"model_built", "layer_loop", "startup"} <= old & new
    assert old - new == {"kv_store", "low_ratio_sources", "backend_sources"}
    assert {"tail_breaks_out", "tail_run"} <= new - old
    assert all(c.signature is not None for c in HOOKS)


def test_no_other_module_spells_an_engine_path() -> None:
    spelled = re.compile(r"sglang\.(srt|kernels|jit_kernel)\b")
    files = [p for p in PACKAGE.rglob("*.py") if p.relative_to(PACKAGE).parts[0] not in ("engine", "cpu_engine")]
    assert len(files) > 20
    lines = [
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in files
        for line in path.read_text().splitlines()
        if spelled.search(line) and "entry point" not in line.lower()
    ]
    assert lines == []


def test_a_missing_engine_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "DISTRIBUTION", "a-distribution-that-nobody-has")
    assert facts.installed_version() is None


@pytest.mark.engine
class TestEngine:
    def test_it_is_a_tested_one(self) -> None:
        version = facts.installed_version()
        assert version is not None
        assert release(version) in facts.TESTED_VERSIONS

    def test_group_of_plugins(self) -> None:
        from sglang.srt import plugins

        assert facts.PLUGIN_GROUP == plugins.GENERAL_PLUGINS_GROUP

    def test_module_of_the_model(self) -> None:
        import importlib

        assert importlib.import_module(facts.MODEL_MODULE).DeepseekV4Model

    def test_the_multi_stream_setting_is_read_from_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang.srt.environ import envs

        setting = getattr(envs, facts.MULTI_STREAM_ENV)
        for text, value in (("0", False), ("1", True)):
            monkeypatch.setenv(facts.MULTI_STREAM_ENV, text)
            assert setting.get() is value
