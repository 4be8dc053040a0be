"""What is asked of a server: cold prompts, bucket edges, prefix hits, batches, chunks. Pure functions of numbers.

Prompts of one case never repeat within a process: the radix cache is on, and a prompt seen before has nothing left to
prefill. Two processes get the same prompts in the same order, so that variants answer the same questions.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_dsv4_graphs.bench.errors import BenchError

COLD = (64, 128, 256, 1000, 2048, 4096, 8192)
# One token more than a bucket holds: the most padding.
EDGES = (65, 129, 257, 1025, 2049, 3073, 4097, 5121, 6145, 7169, 7937)
HITS = (1, 30, 128, 300, 600, 1000, 2000)
PREFIX = 16384
BATCHES = (2, 4, 8, 16)
BATCH_TOKENS = 200
CHUNKED = 32768
GROUPS = ("cold", "edges", "hits", "batches", "chunked")
# Token ids below this are special in the model's vocabulary, and ids are drawn below the other.
_FIRST_ID, _LAST_ID = 3, 120000

Prompt = list[int]


@dataclass(frozen=True)
class Case:
    """One kind of request: ``requests`` prompts at once, each ``tokens`` new tokens behind ``prefix`` cached ones."""

    group: str
    name: str
    tokens: int
    requests: int = 1
    prefix: int = 0

    def prompts(self, seed: object) -> list[Prompt]:
        """The prompts of one repetition; equal seeds give equal prompts, different ones share only the prefix."""
        shared = prefix_prompt(self.prefix) if self.prefix else []
        return [shared + tokens(self.tokens, (self.name, seed, i)) for i in range(self.requests)]


def tokens(count: int, seed: object) -> Prompt:
    """``count`` token ids drawn from ``seed``'s representation (``random`` takes no tuples from Python 3.11 on)."""
    draw = random.Random(repr(seed))
    return [draw.randrange(_FIRST_ID, _LAST_ID) for _ in range(count)]


def prefix_prompt(count: int) -> Prompt:
    """The prefix that every hit shares."""
    return tokens(count, ("prefix", count))


def cases_of(groups: Iterable[str]) -> list[Case]:
    """The cases of these groups, in the benchmark's order."""
    wanted = set(groups)
    made = {
        "cold": [Case("cold", f"cold {n}", n) for n in COLD],
        "edges": [Case("edges", f"edge {n}", n) for n in EDGES],
        "hits": [Case("hits", f"hit {n} on {PREFIX}", n, prefix=PREFIX) for n in HITS],
        "batches": [Case("batches", f"batch {n} x {BATCH_TOKENS}", BATCH_TOKENS, requests=n) for n in BATCHES],
        "chunked": [Case("chunked", f"chunked {CHUNKED}", CHUNKED)],
    }
    return [case for group in GROUPS if group in wanted for case in made[group]]


def parse_groups(text: str, option: str = "--cases") -> list[str]:
    """``cold,hits`` as a list.

    Raises:
        BenchError: naming the option, what is no group, and the groups there are.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in GROUPS and name != "none"]
    if unknown or not names:
        raise BenchError(
            f"{option} {text!r}: {', '.join(unknown) or 'nothing'} is no case; give {','.join(GROUPS)} or none"
        )
    return [name for name in names if name != "none"]


def parse_lengths(text: str, option: str) -> list[int]:
    """``128,1000`` as a list of positive numbers.

    Raises:
        BenchError: naming the option and its value.
    """
    try:
        lengths = [int(part) for part in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise BenchError(f"{option} {text!r}: give token counts such as 128,1000")
    return lengths


def longest(cases: Sequence[Case]) -> int:
    """Tokens of the longest prompt."""
    return max((case.prefix + case.tokens for case in cases), default=0)
