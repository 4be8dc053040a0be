"""What the demo's steps came to: the table, what is wrong, and the last line. Plain values and text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Largest relative difference of a row between the whole step with the plugin and without. Padding changes the
# shapes of matrix products and so their rounding; in float32 that is some 1e-6, a wrong row is some 1.
WHOLE_STEP_LIMIT = 1e-3


@dataclass(frozen=True)
class BankPart:
    """A bank's part in a step: the bucket it replayed, and the largest difference to eager if it was compared."""

    bucket: int
    difference: float | None


@dataclass(frozen=True)
class StepReport:
    """One step. ``parts`` has the banks that replayed; ``reasons`` why others did not."""

    number: int
    what: str
    requests: str
    rows: int
    tail_rows: int
    parts: dict[str, BankPart] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    calls_with: int = 0
    calls_without: int = 0
    whole: float = 0.0


def cells(report: StepReport, banks: Sequence[str]) -> list[str]:
    """One line of the table."""
    line = [str(report.number), report.what, report.requests, str(report.rows), str(report.tail_rows)]
    for name in banks:
        part = report.parts.get(name)
        line.append("eager" if part is None else f"replay {part.bucket}")
        line.append("-" if part is None or part.difference is None else f"{part.difference:g}")
    saved = report.calls_without - report.calls_with
    return [*line, f"{saved} of {report.calls_without}", f"{report.whole:.1e}", "; ".join(report.reasons)]


def table(reports: Sequence[StepReport], banks: Sequence[str]) -> str:
    """The whole table; numbers to the right, text to the left."""
    per_bank = [title for name in banks for title in (name, "diff.")]
    titles = ["step", "what", "requests", "rows", "tail", *per_bank, "calls saved", "on/off", "why eager"]
    lines = [titles, *(cells(r, banks) for r in reports)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(titles))]
    left = {"what", "requests", *banks, "why eager"}

    def text(line: list[str]) -> str:
        padded = [c.ljust(w) if t in left else c.rjust(w) for t, c, w in zip(titles, line, widths, strict=True)]
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * w for w in widths)
    return "\n".join([text(titles), rule, *map(text, lines[1:])])


LEGEND = (
    "requests: 40+21 = two of 40 and 21 tokens, 42@63 = 42 tokens behind 63 cached ones; tail: rows of the late layers",
    "diff.: replayed rows and KV pool against an eager run on the same padded rows, largest difference; must be 0",
    "calls saved: decoder-layer calls in Python, counted, without the plugin minus with it",
    "on/off: largest relative difference of a tail row, the whole step with the plugin against without; rounding only",
)


def problems(reports: Sequence[StepReport], banks: Sequence[str]) -> list[str]:
    """Everything that does not hold; empty is a pass."""
    found = []
    for r in reports:
        for name, part in r.parts.items():
            if part.difference is None:
                found.append(f"step {r.number}: {name} replayed and was not compared")
            elif part.difference != 0:
                found.append(f"step {r.number}: {name} differs from eager by {part.difference:g}")
        if not r.whole <= WHOLE_STEP_LIMIT:
            found.append(f"step {r.number}: the whole step differs by {r.whole:g} with the plugin on and off")
    silent = [name for name in banks if not any(name in r.parts for r in reports)]
    found += [f"{name} never replayed" for name in silent]
    return found if banks else [*found, "no bank was captured"]


def summary(reports: Sequence[StepReport], banks: Sequence[str], found: Sequence[str]) -> str:
    """The last line."""
    if found:
        return f"demo: FAILED: {'; '.join(found)}"
    replays = sum(len(r.parts) for r in reports)
    fallbacks = sum(1 for r in reports if r.reasons)
    without = sum(r.calls_without for r in reports)
    saved = without - sum(r.calls_with for r in reports)
    differences = [p.difference for r in reports for p in r.parts.values() if p.difference is not None]
    return (
        f"demo: passed: {len(reports)} steps, {replays} replays of {len(banks)} bank(s), largest difference to eager "
        f"{max(differences):g}, {fallbacks} steps with a fallback, {saved} of {without} layer calls saved, "
        f"on/off at most {max(r.whole for r in reports):.1e}"
    )
