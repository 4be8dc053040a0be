"""The distribution's own version, from its metadata."""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "sglang-dsv4-graphs"


def _own_version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"


__version__ = _own_version()
