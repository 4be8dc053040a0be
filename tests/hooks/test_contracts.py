"""The gate: what the installed engine must be like, and the reason if it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sglang_dsv4_graphs.engine import facts
from sglang_dsv4_graphs.engine.contract import Contract
from sglang_dsv4_graphs.hooks import contracts
from sglang_dsv4_graphs.hooks.contracts import check_contract, check_contracts, install_reason, version_reason


def step(model: Any, rows: int, *, last: bool = False) -> None: ...


SIGNATURE = "model, rows, *, last="
THINGS = {"engine.step": step, "engine.LIMIT": 8, "engine.builtin": dict.fromkeys}


def lookup(target: str) -> Any:
    if target.startswith("absent."):
        raise ModuleNotFoundError("No module named 'absent'")
    if target not in THINGS:
        raise AttributeError(f"no attribute {target.rpartition('.')[2]!r}")
    return THINGS[target]


@pytest.mark.parametrize(
    ("target", "signature"), [("engine.step", SIGNATURE), ("engine.step", None), ("engine.LIMIT", None)]
)
def test_a_contract_that_holds(target: str, signature: str | None) -> None:
    assert check_contract(Contract("x", target, signature), lookup) is None


@pytest.mark.parametrize(
    ("target", "signature", "text"),
    [
        (
            "engine.step",
            "model, rows",
            "engine.step: expected (model, rows), found (model, rows, *, last=)",
        ),
        (
            "engine.step",
            "model, rows, *, last",
            "engine.step: expected (model, rows, *, last), found (model, rows, *, last=)",
        ),
        (
            "engine.gone",
            "a",
            "engine.gone: expected (a), found nothing (AttributeError: no attribute 'gone')",
        ),
        (
            "absent.step",
            None,
            "absent.step: expected (…), found nothing (ModuleNotFoundError: No module named 'absent')",
        ),
        ("engine.LIMIT", "", "engine.LIMIT: expected (), found no signature (8 is not callable)"),
    ],
)
def test_a_mismatch_names_target_and_both_signatures(target: str, signature: str | None, text: str) -> None:
    assert str(check_contract(Contract("x", target, signature), lookup)) == text


def test_every_mismatch_is_found() -> None:
    held = Contract("a", "engine.step", SIGNATURE)
    broken = [Contract("b", "engine.gone"), Contract("c", "engine.step", "")]
    assert [m.target for m in check_contracts([broken[0], held, broken[1]], lookup)] == ["engine.gone", "engine.step"]


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23", "0.5.23.post1", "0.5.22+cpu"])
def test_tested_versions_pass(version: str) -> None:
    assert version_reason(version, allow_untested=False) is None


@pytest.mark.parametrize("version", ["0.5.21", "0.5.24", "0.6.0", "0.5.230"])
def test_an_untested_version_is_refused_unless_allowed(version: str) -> None:
    reason = version_reason(version, allow_untested=False)
    assert reason == (
        f"engine {version} is untested (tested: 0.5.22, 0.5.23); "
        "SGLANG_DSV4_GRAPHS_ALLOW_UNTESTED_ENGINE=1 installs if every contract holds"
    )
    assert version_reason(version, allow_untested=True) is None


@pytest.mark.parametrize("allowed", [False, True])
def test_no_engine_is_a_reason(allowed: bool) -> None:
    assert install_reason(None, allow_untested=allowed) == "no engine: the distribution sglang is not installed"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``known(*contracts)``: hold engines to these."""

    def hold(*wanted: Contract) -> None:
        monkeypatch.setattr(contracts, "contracts_for", lambda version: wanted)

    return hold


GOOD = Contract("a", "collections.Counter.most_common", "self, n=")
BAD = Contract("b", "collections.Counter.most_common", "self")
GONE = Contract("c", "collections.Counter.least_common")


def test_an_engine_that_keeps_every_contract(known: Callable[..., None]) -> None:
    known(GOOD)
    assert install_reason("0.5.23", allow_untested=False) is None
    assert install_reason("0.5.99", allow_untested=True) is None


def test_the_version_comes_before_the_contracts(known: Callable[..., None]) -> None:
    known(BAD)
    reason = install_reason("0.5.99", allow_untested=False)
    assert reason is not None
    assert "untested" in reason


@pytest.mark.parametrize("version", ["0.5.23", "0.5.99"])
def test_the_first_mismatch_is_the_reason(known: Callable[..., None], version: str) -> None:
    known(GOOD, BAD)
    expected = (
        f"engine {version} differs from what is known: collections.Counter.most_common: "
        "expected (self), found (self, n=)"
    )
    assert install_reason(version, allow_untested=True) == expected
    known(BAD, GONE, GONE)
    assert install_reason(version, allow_untested=True) == expected + " (and 2 more)"


def _of_this_engine() -> tuple[Contract, ...]:
    version = facts.installed_version()
    return () if version is None else facts.contracts_for(version)


@pytest.mark.engine
@pytest.mark.parametrize("contract", _of_this_engine(), ids=lambda c: c.name)
def test_contract_with_this_engine(contract: Contract) -> None:
    assert check_contract(contract) is None


@pytest.mark.engine
def test_this_engine_is_accepted() -> None:
    assert install_reason(facts.installed_version(), allow_untested=False) is None
