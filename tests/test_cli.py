"""The command line: what it lists, what it answers, and that asking for help costs nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from sglang_dsv4_graphs import cli
from sglang_dsv4_graphs.demo import command, preflight

ROOT = Path(__file__).resolve().parent.parent


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglang_dsv4_graphs", *arguments], cwd=ROOT, text=True, capture_output=True, timeout=120
    )


def entry_point(name: str) -> metadata.EntryPoints:
    return metadata.EntryPoints([metadata.EntryPoint(name, "sglang_dsv4_graphs.plugin:activate", "sglang.srt.plugins")])


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which engine and plugin are installed; the caller spoils it."""
    monkeypatch.setattr(preflight, "installed_version", lambda: "0.5.23")
    monkeypatch.setattr(preflight, "entry_points", lambda **of: entry_point("dsv4_graphs").select(**of))
    return monkeypatch


def test_help_lists_every_command_and_no_other() -> None:
    done = ask("--help")
    assert done.returncode == 0
    listed = re.findall(r"^ {4}(\w+)", done.stdout.partition("commands:")[2], flags=re.MULTILINE)
    assert listed == [c.NAME for c in cli.COMMANDS]


def test_version_names_plugin_and_engine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "installed_version", lambda: "7.8.9")
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"sglang-dsv4-graphs {cli.__version__}, sglang 7.8.9\n"


@pytest.mark.parametrize(
    "arguments",
    [[], ["dmo"], ["demo", "--device", "tpu"], ["demo", "--repeats", "some"], ["demo", "--repeats", "0"]],
)
def test_a_wrong_command_line_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert "usage: sglang-dsv4-graphs" in capsys.readouterr().err


def test_the_command_line_imports_neither_torch_nor_the_engine() -> None:
    code = (
        "import sys; from sglang_dsv4_graphs import cli; cli.make_parser();"
        "print([m for m in ('torch', 'triton', 'sglang', 'pluggy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_status_is_the_command_s(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(options: object) -> int:
        seen.append(options)
        return 7

    monkeypatch.setattr(command, "run", run)
    assert cli.main(["demo", "--device", "cpu"]) == 7
    assert seen[0].device == "cpu"


def test_an_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", run)
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_demo_without_an_engine_says_so(installed: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    installed.setattr(preflight, "installed_version", lambda: None)
    assert cli.main(["demo", "--device", "cpu"]) == 2
    assert "sglang is not installed" in capsys.readouterr().err


def test_demo_without_the_entry_point_says_how_to_install(
    installed: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.setattr(preflight, "entry_points", lambda **of: entry_point("another").select(**of))
    assert cli.main(["demo", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "no entry point 'dsv4_graphs' in group 'sglang.srt.plugins'" in error
    assert "pip install" in error


@pytest.mark.parametrize(("allowed", "listed"), [("another", False), ("another, dsv4_graphs", True), (" ", True)])
def test_demo_obeys_the_engine_s_list_of_plugins(installed: pytest.MonkeyPatch, allowed: str, listed: bool) -> None:
    installed.setenv("SGLANG_PLUGINS", allowed)
    if listed:
        preflight.check_installed()
    else:
        with pytest.raises(preflight.DemoError, match="keeps the engine from loading the plugin: add dsv4_graphs"):
            preflight.check_installed()


def test_device_decides_which_demo_runs(installed: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from sglang_dsv4_graphs.demo import cpu, gpu

    installed.setattr(cpu, "run", lambda: 11)
    installed.setattr(gpu, "run", lambda repeats: 20 + repeats)
    for gpu_there, device, status in (
        (False, "auto", 11),
        (True, "auto", 23),
        (True, "cpu", 11),
        (False, "cuda", 23),
    ):
        installed.setattr(command, "_has_gpu", lambda there=gpu_there: there)
        assert cli.main(["demo", "--device", device, "--repeats", "3"]) == status, (gpu_there, device)
