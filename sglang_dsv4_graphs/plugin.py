"""The engine's entry point: cheap in every process, installs only where the model is imported.

The engine runs plugins in each of its processes, most of which never see the model. So nothing happens here but
leaving word: when somebody imports the DeepSeek-V4 model module, install.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import wrapt

from sglang_dsv4_graphs.engine.facts import MODEL_MODULE

if TYPE_CHECKING:
    from types import ModuleType

    from sglang_dsv4_graphs.hooks.install import Installation

_lock = threading.RLock()
_watching = False
_wanted = False
# Whether this process has installed or stood down; only ``deactivate`` asks again.
_decided = False
_installation: Installation | None = None


def activate() -> None:
    """Entry point ``dsv4_graphs`` of group ``sglang.srt.plugins``. Calling it again changes nothing.

    After ``deactivate`` it installs again, at once if the model is there already.
    """
    global _watching, _wanted
    with _lock:
        _wanted = True
        if not _watching:
            _watching = True
            wrapt.register_post_import_hook(_model_imported, MODEL_MODULE)
        elif MODEL_MODULE in sys.modules:
            _model_imported(sys.modules[MODEL_MODULE])


def _model_imported(module: ModuleType) -> None:
    """Install; whatever goes wrong must not reach the importer, which would lose the model."""
    from sglang_dsv4_graphs.hooks.install import stand_down
    from sglang_dsv4_graphs.log import logger
    from sglang_dsv4_graphs.settings import strict_requested

    global _installation, _decided
    with _lock:
        if not _wanted or _decided:
            return
        _decided = True
        try:
            _installation = _install()
        except Exception as e:
            logger.debug("install failed", exc_info=True)
            stand_down(f"{type(e).__name__}: {e}", strict_requested())


def _install() -> Installation | None:
    from sglang_dsv4_graphs.hooks.install import install, stand_down
    from sglang_dsv4_graphs.log import line, logger
    from sglang_dsv4_graphs.settings import Settings, SettingsError, strict_requested, unknown_names

    for name, nearest in unknown_names().items():
        hint = f"did you mean {nearest}?" if nearest else "see docs/settings.md"
        logger.warning(line("unknown-setting", name=name, hint=hint))
    try:
        settings = Settings.read()
    except SettingsError as e:
        stand_down(str(e), strict_requested())
        return None
    if not settings.enabled:
        stand_down("SGLANG_DSV4_GRAPHS=0", strict=False)
        return None
    return install(settings)


def installation() -> Installation | None:
    """What is installed in this process, or None."""
    return _installation


def deactivate() -> None:
    """Take every patch back and stop watching imports; the engine's objects are its own again."""
    global _installation, _wanted, _decided
    with _lock:
        _wanted = _decided = False
        if _installation is not None:
            _installation.undo()
            _installation = None
