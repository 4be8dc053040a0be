"""Is this the engine we know? Every contract is compared before anything is installed.

The gate returns a reason as a value: it is logged where it is discovered, and raised only where a strict server
asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sglang_dsv4_graphs.engine.contract import Contract, describe_signature, release, resolve
from sglang_dsv4_graphs.engine.facts import (
    TESTED_VERSIONS,
    contracts_for,
)


@dataclass(frozen=True)
class Mismatch:
    """A contract that the installed engine does not keep."""

    target: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.target}: expected ({self.expected}), found {self.found}"


def check_contract(contract: Contract, lookup: Callable[[str], Any] = resolve) -> Mismatch | None:
    """Compare one contract with the installed engine."""
    expected = "…" if contract.signature is None else contract.signature
    try:
        found = lookup(contract.target)
    except (ImportError, AttributeError) as e:
        return Mismatch(contract.target, expected, f"nothing ({type(e).__name__}: {e})")
    if contract.signature is None:
        return None
    try:
        signature = describe_signature(found)
    except (TypeError, ValueError) as e:
        return Mismatch(contract.target, expected, f"no signature ({e})")
    return None if signature == contract.signature else Mismatch(contract.target, expected, f"({signature})")


def check_contracts(contracts: Iterable[Contract], lookup: Callable[[str], Any] = resolve) -> list[Mismatch]:
    """Every contract that does not hold."""
    return [m for c in contracts if (m := check_contract(c, lookup)) is not None]


def version_reason(engine_version: str | None, *, allow_untested: bool) -> str | None:
    """Why this engine version is refused, or None."""
    if engine_version is None:
        return "no engine: the distribution sglang is not installed"
    if release(engine_version) in TESTED_VERSIONS or allow_untested:
        return None
    return (
        f"engine {engine_version} is untested (tested: {', '.join(TESTED_VERSIONS)}); "
        "SGLANG_DSV4_GRAPHS_ALLOW_UNTESTED_ENGINE=1 installs if every contract holds"
    )


def install_reason(engine_version: str | None, *, allow_untested: bool) -> str | None:
    """Why nothing may be installed into this engine, or None: version first, then every contract."""
    reason = version_reason(engine_version, allow_untested=allow_untested)
    if reason is not None or engine_version is None:
        return reason
    mismatches = check_contracts(contracts_for(engine_version))
    if not mismatches:
        return None
    more = f" (and {len(mismatches) - 1} more)" if len(mismatches) > 1 else ""
    return f"engine {engine_version} differs from what is known: {mismatches[0]}{more}"
