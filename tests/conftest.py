"""What every test relies on: which engine it meets, a known environment, and a run that did run something.

Tests of three kinds share one suite: plain ones, those marked ``engine`` and those marked ``gpu``. Skipping
the latter two where they cannot run is right on somebody's laptop and wrong in the project's own checks,
where a broken installation would turn every test into a skip and the run green. ``--engine-version`` is for
those: it insists on an engine and on tests that were executed.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import pytest

# The settings of whoever runs the tests must not reach them, nor what one test sets the next.
ISOLATED_PREFIXES = ("SGLANG_DSV4_", "SGLANG_PLUGINS")
# One number for this process and its children, as sums depend on it; set before torch is imported. More threads gain
# these small models nothing, and the runs on two engine versions share two cores.
TORCH_THREADS = 1
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = str(TORCH_THREADS)

executed_key = pytest.StashKey[int]()


def isolated_names() -> list[str]:
    return [name for name in os.environ if name.startswith(ISOLATED_PREFIXES)]


def found_engine() -> str | None:
    """The version of the sglang that ``import`` would take; None if there is none."""
    if importlib.util.find_spec("sglang") is None:
        return None
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "unknown"


def has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine-version",
        metavar="VERSION",
        help="fail unless sglang VERSION is the one imported and at least one test was executed",
    )


def pytest_configure(config: pytest.Config) -> None:
    for name in isolated_names():
        del os.environ[name]
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(TORCH_THREADS)
    config.stash[executed_key] = 0
    wanted, found = config.getoption("--engine-version"), found_engine()
    if wanted is not None and wanted != found:
        raise pytest.UsageError(f"--engine-version {wanted}: the sglang here is {found or 'missing'}")


def pytest_report_header() -> str:
    return f"sglang: {found_engine() or 'none, tests marked engine are skipped'}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons: dict[str, str] = {}
    if found_engine() is None:
        reasons["engine"] = "needs an importable sglang (make test installs one)"
    # Asked only if some test wants to know: the answer imports torch.
    if any(item.get_closest_marker("gpu") for item in items) and not has_gpu():
        reasons["gpu"] = "needs a CUDA device"
    for item in items:
        for marker, reason in reasons.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    result = yield  # a skip from within the test raises here
    item.config.stash[executed_key] += 1
    return result


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Turn a green run of nothing but skips into "no tests ran" (exit 5), which pytest itself does not."""
    strict = session.config.getoption("--engine-version") is not None
    if strict and session.exitstatus == pytest.ExitCode.OK and not session.config.stash[executed_key]:
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
    return (yield)


@pytest.fixture(autouse=True)
def isolated_environment() -> Iterator[None]:
    """Drop the plugin's and the engine's plugin settings for the test, and what it sets afterwards."""
    before = {name: os.environ.pop(name) for name in isolated_names()}
    try:
        yield
    finally:
        for name in isolated_names():
            del os.environ[name]
        os.environ.update(before)


@pytest.fixture
def thawed() -> Iterator[None]:
    """No object is set aside from garbage collections; tests of whole servers set theirs aside for all after them."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()
