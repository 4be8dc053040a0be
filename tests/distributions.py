"""Installed distributions for tests, without installing: metadata in a folder that is put on the path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PLUGIN = {
    "sglang.srt.plugins": {"dsv4_graphs": "sglang_dsv4_graphs.plugin:activate"},
    "sglang_dsv4_graphs": {"bench_agent": "sglang_dsv4_graphs.bench.agent"},
}


def install_distribution(
    folder: Path, name: str, entry_points: Mapping[str, Mapping[str, str]], **modules: str
) -> Path:
    """Make ``folder`` a place where ``name`` is installed with these entry points and modules (sources).

    It hides a distribution of the same name that lies further back on the path.
    """
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = (
        f"[{group}]\n" + "".join(f"{entry} = {value}\n" for entry, value in entries.items())
        for group, entries in entry_points.items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    return folder
