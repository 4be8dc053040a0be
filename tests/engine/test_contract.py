"""Contracts: their notation, and what they are looked up by."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from sglang_dsv4_graphs.engine.contract import Contract, describe_signature, release, resolve


@pytest.mark.parametrize(
    ("version", "of"),
    [
        ("0.5.23", "0.5.23"),
        ("0.5.23.post1", "0.5.23"),
        ("0.5.23+cu130", "0.5.23"),
        ("0.5.23.post1+cu130", "0.5.23"),
        ("0.5.23.dev7", "0.5.23"),
        ("0.6", "0.6"),
    ],
)
def test_release(version: str, of: str) -> None:
    assert release(version) == of


class Callables:
    def method(self, a: int, b: int = 1) -> None: ...

    @classmethod
    def of(cls, a: int) -> None: ...

    @staticmethod
    def keyword_only(a: int, *, b: int, c: int = 2) -> None: ...

    def __init__(self, x: int, *rest: int, y: int, **more: int) -> None: ...


@pytest.mark.parametrize(
    ("of", "signature"),
    [
        (Callables.method, "self, a, b="),
        (Callables.of, "a"),
        (Callables.keyword_only, "a, *, b, c="),
        (Callables, "x, *rest, y, **more"),
        (lambda: None, ""),
    ],
)
def test_notation(of: Any, signature: str) -> None:
    assert describe_signature(of) == signature


def test_what_is_not_callable_has_no_signature() -> None:
    with pytest.raises(ValueError, match="not callable"):
        describe_signature(3)


def test_a_contract_may_be_limited_to_versions() -> None:
    always, old = Contract("a", "m.a"), Contract("b", "m.b", versions=("0.5.22",))
    assert always.holds_for("9.9")
    assert old.holds_for("0.5.22.post1")
    assert not old.holds_for("0.5.23")


def test_resolve() -> None:
    assert resolve("collections.Counter.most_common") is Counter.most_common
    with pytest.raises(AttributeError):
        resolve("collections.Counter.least_common")
    with pytest.raises(ImportError):
        resolve("no_such_module.thing")
