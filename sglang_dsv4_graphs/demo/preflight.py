"""Can the demo show anything here? The engine must be installed, and must be able to find the plugin."""

from __future__ import annotations

import os
from importlib.metadata import entry_points

from sglang_dsv4_graphs.engine.facts import ENTRY_POINT, PLUGIN_GROUP, TESTED_VERSIONS, installed_version

# The engine's own setting: the plugins that it loads, all if unset.
ALLOWED_PLUGINS = "SGLANG_PLUGINS"


class DemoError(RuntimeError):
    """The demo cannot run; the message says why and what to do."""


def check_installed() -> None:
    """Raise ``DemoError`` unless the engine is installed and its plugin loader finds ours."""
    if installed_version() is None:
        raise DemoError(
            f"sglang is not installed in this environment (tested: {', '.join(TESTED_VERSIONS)}). "
            "`make demo` in a checkout builds an environment with it"
        )
    if not entry_points(group=PLUGIN_GROUP, name=ENTRY_POINT):
        raise DemoError(
            f"the engine cannot find the plugin: no entry point {ENTRY_POINT!r} in group {PLUGIN_GROUP!r}. "
            "Install the plugin into this environment: `python -m pip install .` in its checkout"
        )
    allowed = [name.strip() for name in os.environ.get(ALLOWED_PLUGINS, "").split(",") if name.strip()]
    if allowed and ENTRY_POINT not in allowed:
        raise DemoError(
            f"{ALLOWED_PLUGINS}={os.environ[ALLOWED_PLUGINS]!r} keeps the engine from loading the plugin: "
            f"add {ENTRY_POINT} or unset it"
        )
