"""Log lines: one line, one prefix, values that a tool can take apart again; rank 0 alone, errors apart."""

from __future__ import annotations

import logging
import shlex

import pytest

from sglang_dsv4_graphs.log import RankLog, line


def parsed(text: str) -> tuple[str, dict[str, str]]:
    prefix, event, *pairs = shlex.split(text)
    assert prefix == "dsv4-graphs:"
    return event, dict(pair.split("=", 1) for pair in pairs)


def test_wording() -> None:
    assert line("captured", bank="full-layer", graphs=34, rows="64..8192", gib=1.23456, seconds=7.0) == (
        "dsv4-graphs: captured bank=full-layer graphs=34 rows=64..8192 gib=1.235 seconds=7.000"
    )
    assert line("eager", reason="no engine") == 'dsv4-graphs: eager reason="no engine"'
    assert line("") == "dsv4-graphs:"


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("plain", "plain"),
        ("two words", "two words"),
        ("a=b", "a=b"),
        ('say "no"', "say 'no'"),
        ("", ""),
        ("first\nsecond\n\n   third", "first second third"),
        (12, "12"),
        (0.5, "0.500"),
        (True, "True"),
        (None, "None"),
    ],
)
def test_values_can_be_parsed_back(value: object, read: str) -> None:
    text = line("event", before=1, value=value, after=2)
    assert "\n" not in text
    assert parsed(text) == ("event", {"before": "1", "value": read, "after": "2"})


def test_a_value_may_be_called_event() -> None:
    assert line("x", event="y") == "dsv4-graphs: x event=y"


@pytest.fixture
def written(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="sglang_dsv4_graphs")
    return caplog


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_writes_and_errors_come_from_all(written: pytest.LogCaptureFixture, rank: int) -> None:
    log = RankLog(rank)
    for level in ("debug", "info", "warning", "error"):
        getattr(log, level)(level, value=1)
    levels = [(r.levelno, r.getMessage()) for r in written.records]
    expected = [
        (logging.DEBUG, "dsv4-graphs: debug value=1"),
        (logging.INFO, "dsv4-graphs: info value=1"),
        (logging.WARNING, "dsv4-graphs: warning value=1"),
    ]
    error = (logging.ERROR, f"dsv4-graphs: error rank={rank} value=1")
    assert levels == ([] if rank else expected) + [error]


def test_the_rank_is_read_when_a_line_is_written(written: pytest.LogCaptureFixture) -> None:
    log = RankLog()
    log.rank = 3
    log.info("silent")
    log.error("loud")
    assert written.messages == ["dsv4-graphs: loud rank=3"]


def test_once_per_key(written: pytest.LogCaptureFixture) -> None:
    log = RankLog()
    for rows in (1, 2, 3):
        log.once(("a", 1), "fallback", rows=rows)
    log.once(("a", 2), "fallback", rows=4)
    RankLog().once(("a", 1), "fallback", rows=5)
    assert written.messages == [f"dsv4-graphs: fallback rows={rows}" for rows in (1, 4, 5)]
