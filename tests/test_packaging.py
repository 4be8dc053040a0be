"""The distributions hold what they should, and installing one leaves the engine alone."""

from __future__ import annotations

import email
import email.message
import importlib.util
import json
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import sglang_dsv4_graphs

ROOT = Path(__file__).resolve().parent.parent
NAME = "sglang-dsv4-graphs"
PACKAGE = "sglang_dsv4_graphs"
ENTRY_POINTS = {
    ("sglang.srt.plugins", "dsv4_graphs"): f"{PACKAGE}.plugin:activate",
    ("sglang_dsv4_graphs", "bench_agent"): f"{PACKAGE}.bench.agent",
    ("console_scripts", NAME): f"{PACKAGE}.cli:main",
}


def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def package_files(folder: Path) -> set[str]:
    found = (p for p in (folder / PACKAGE).rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {p.relative_to(folder).as_posix() for p in found}


def python(*arguments: object) -> str:
    """Run this interpreter; what it printed, or a failure that shows it."""
    done = subprocess.run([sys.executable, *map(str, arguments)], cwd="/", text=True, capture_output=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def left_out(_folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(".") or name == "__pycache__"]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from that sdist; nothing is downloaded."""
    for tool in ("build", "hatchling"):
        pytest.importorskip(tool, reason=f"needs {tool} (extra dev)")
    source, out = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, source, ignore=left_out)
    python("-m", "build", "--no-isolation", "--outdir", out, source)
    return out


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel_metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_wheel_holds_the_whole_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert f"{PACKAGE}/py.typed" in names
    assert {n for n in names if ".dist-info/" not in n} == package_files(ROOT)


def test_wheel_declares_the_entry_points(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt"))
        declared = metadata.EntryPoints._from_text(archive.read(name).decode())  # type: ignore[attr-defined]
    assert {(e.group, e.name): e.value for e in declared} == ENTRY_POINTS


def test_wheel_requires_neither_the_engine_nor_its_torch(wheel_metadata: email.message.Message) -> None:
    requirements = wheel_metadata.get_all("Requires-Dist") or []
    always = sorted(r for r in requirements if "extra ==" not in r)
    assert always == ["pluggy>=1.5", "wrapt>=1.16"]
    assert not [r for r in requirements if r.startswith(("torch", "triton"))]
    (engine,) = (r for r in requirements if r.startswith("sglang"))
    assert engine.replace('"', "'").endswith("extra == 'engine'")


def test_wheel_names_its_licence(wheel: Path, wheel_metadata: email.message.Message) -> None:
    assert wheel_metadata["License-Expression"] == "Apache-2.0"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/LICENSE"))
        assert archive.read(name) == (ROOT / "LICENSE").read_bytes()


def test_sdist_can_be_tested(distributions: Path) -> None:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    wanted = {"pyproject.toml", "Makefile", "LICENSE", "README.md", "CHANGELOG.md", "tests/conftest.py"}
    assert wanted | {"requirements/engine-cpu.txt", "scripts/engine_venv.py"} <= names
    assert package_files(ROOT) <= names
    assert not [n for n in names if n.startswith((".cache", ".git/"))]


def test_wheel_installs_into_a_folder_of_its_own(wheel: Path, tmp_path: Path) -> None:
    python("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", tmp_path, wheel)
    installed = {p.name for p in tmp_path.iterdir()}
    assert installed == {PACKAGE, f"{PACKAGE}-{project()['version']}.dist-info", "bin"}
    assert package_files(tmp_path) == package_files(ROOT)
    assert [p.name for p in (tmp_path / "bin").iterdir()] == [NAME]


@pytest.mark.engine
def test_installing_beside_an_engine_changes_the_plugin_alone(wheel: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    python("-m", "pip", "install", "--quiet", "--no-index", "--dry-run", "--report", report, wheel)
    changed = [item["metadata"]["name"] for item in json.loads(report.read_text())["install"]]
    assert changed == [NAME]


def installed() -> metadata.Distribution:
    try:
        return metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        pytest.skip("the project is not installed (make test installs it)")


def test_version_is_the_metadata_s() -> None:
    assert sglang_dsv4_graphs.__version__ == installed().version == project()["version"]


@pytest.mark.parametrize("group", ["sglang.srt.plugins", "sglang_dsv4_graphs", "console_scripts"])
def test_installed_entry_points_load(group: str) -> None:
    installed()
    own = [e for e in metadata.entry_points(group=group) if e.dist is not None and e.dist.name == NAME]
    expected = {name: value for (of, name), value in ENTRY_POINTS.items() if of == group}
    assert {e.name: e.value for e in own} == expected
    assert all(e.load() for e in own)


def test_importing_the_package_imports_neither_torch_nor_the_engine() -> None:
    code = f"import sys, {PACKAGE}; print([m for m in ('torch', 'triton', 'sglang') if m in sys.modules])"
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent.parent
    assert python("-c", f"import sys; sys.path.insert(0, {str(folder)!r}); {code}").strip() == "[]"
