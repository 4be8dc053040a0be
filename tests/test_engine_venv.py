"""The environment that the tests run in is rebuilt exactly when it has to be, and never taken half built."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "engine_venv.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script as a module, with a requirement list of its own."""
    spec = importlib.util.spec_from_file_location("engine_venv", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "engine_venv", module)
    spec.loader.exec_module(module)
    (tmp_path / "requirements.txt").write_text("torch==2.13.0\n")
    monkeypatch.setattr(module, "REQUIREMENTS", tmp_path / "requirements.txt")
    return module


class Builds:
    """Stands in for the minutes of pip: notes each build, writes one file, fails on request."""

    def __init__(self, script: ModuleType, monkeypatch: pytest.MonkeyPatch, link: Path) -> None:
        self.environment = script.Environment(link)
        self.done: list[Path] = []
        self.fail = False
        monkeypatch.setattr(self.environment, "build", self.build)
        monkeypatch.setattr(self.environment, "install_project", lambda tree: None)

    def build(self, tree: Path) -> None:
        tree.mkdir(parents=True)
        (tree / "half").touch()
        if self.fail:
            raise KeyboardInterrupt
        (tree / "whole").touch()
        self.done.append(tree)


@pytest.fixture
def builds(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Builds:
    return Builds(script, monkeypatch, tmp_path / "venv")


def test_built_once_and_kept(builds: Builds) -> None:
    builds.environment.make_current()
    builds.environment.make_current()
    assert len(builds.done) == 1
    assert (builds.environment.link / "whole").exists()


def test_an_interrupted_build_is_done_again(builds: Builds) -> None:
    builds.fail = True
    with pytest.raises(KeyboardInterrupt):
        builds.environment.make_current()
    assert not builds.environment.link.exists()
    builds.fail = False
    builds.environment.make_current()
    assert (builds.environment.link / "whole").exists()


def test_changed_requirements_replace_it(builds: Builds, script: ModuleType) -> None:
    builds.environment.make_current()
    script.REQUIREMENTS.write_text("torch==2.13.0\nnumpy\n")
    builds.environment.make_current()
    first, second = builds.done
    assert builds.environment.link.resolve() == second
    assert not first.exists()


def test_a_failed_rebuild_leaves_the_one_before(builds: Builds, script: ModuleType) -> None:
    builds.environment.make_current()
    script.REQUIREMENTS.write_text("torch==2.13.0\nnumpy\n")
    builds.fail = True
    with pytest.raises(KeyboardInterrupt):
        builds.environment.make_current()
    assert builds.environment.link.resolve() == builds.done[0]
    assert (builds.environment.link / "whole").exists()


def test_a_folder_of_somebody_else_s_is_refused(builds: Builds, script: ModuleType) -> None:
    builds.environment.link.mkdir()
    with pytest.raises(script.BuildError, match="DSV4_GRAPHS_VENV"):
        builds.environment.make_current()
    assert not builds.done


def test_an_interrupted_overlay_is_made_again(
    builds: Builds, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Path] = []

    def install(what: str, *command: object) -> str:
        target = Path(str(command[command.index("--target") + 1]))
        target.mkdir()
        calls.append(target)
        if len(calls) == 1:
            raise KeyboardInterrupt
        (target / "sglang").mkdir()
        return ""

    monkeypatch.setattr(script, "step", install)
    with pytest.raises(KeyboardInterrupt):
        builds.environment.overlay("0.5.22")
    folder = builds.environment.overlay("0.5.22")
    assert (folder / "sglang").is_dir()
    assert builds.environment.overlay("0.5.22") == folder
    assert len(calls) == 2


@pytest.mark.parametrize("cpu_build", [True, False])
def test_the_cpu_build_of_torch_comes_first(
    builds: Builds, script: ModuleType, monkeypatch: pytest.MonkeyPatch, cpu_build: bool
) -> None:
    asked: list[str] = []

    def attempt(*command: object) -> object:
        asked.append(str(command[-1]))
        return script.subprocess.CompletedProcess(command, 0 if cpu_build else 1, "", "")

    monkeypatch.setattr(script, "attempt", attempt)
    monkeypatch.setattr(script, "step", lambda what, *command: asked.append(str(command[-1])))
    builds.environment.install_torch(Path("python"))
    assert asked == ["torch==2.13.0+cpu", "torch==2.13.0"][: 1 if cpu_build else 2]
