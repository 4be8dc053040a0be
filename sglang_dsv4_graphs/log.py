"""The plugin's log lines: one prefix, key=value, stable wording, rank 0 only.

People grep for these lines and tools parse them, so their wording is an interface (docs/logs.md).
"""

from __future__ import annotations

import logging

PREFIX = "dsv4-graphs:"
logger = logging.getLogger("sglang_dsv4_graphs")


def line(event: str, /, **values: object) -> str:
    """``dsv4-graphs: event key=value …``; text with spaces or quotes is quoted."""
    parts = [PREFIX, event] if event else [PREFIX]
    for key, value in values.items():
        text = f"{value:.3f}" if isinstance(value, float) else str(value)
        if isinstance(value, str):
            text = " ".join(text.split())  # one line, whatever an error message holds
        if isinstance(value, str) and (not text or any(c in text for c in ' "=')):
            text = '"' + text.replace('"', "'") + '"'
        parts.append(f"{key}={text}")
    return " ".join(parts)


class RankLog:
    """Log lines that only rank 0 writes, some of them once per key.

    ``rank`` is read when a line is written: the hooks are made before the engine knows its ranks.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._seen: set[tuple[object, ...]] = set()

    def info(self, event: str, /, **values: object) -> None:
        if self.rank == 0:
            logger.info(line(event, **values))

    def debug(self, event: str, /, **values: object) -> None:
        if self.rank == 0:
            logger.debug(line(event, **values))

    def warning(self, event: str, /, **values: object) -> None:
        if self.rank == 0:
            logger.warning(line(event, **values))

    def error(self, event: str, /, **values: object) -> None:
        """Errors are written by every rank: the rank is part of what went wrong."""
        logger.error(line(event, rank=self.rank, **values))

    def once(self, key: tuple[object, ...], event: str, /, **values: object) -> None:
        """``info`` for the first call with ``key``."""
        if key not in self._seen:
            self._seen.add(key)
            self.info(event, **values)
