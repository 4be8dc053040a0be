"""Pairs of a step's rows, against a slow reading of the rule."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.breaks.pairs import pair_rows, partners  # noqa: E402

RING = 4


@dataclass
class Halves:
    """Rows of [kv | score], as the engine wraps them."""

    kv_score: torch.Tensor


class State:
    """A pool of pending halves: a ring of positions per request, and an empty row at the end."""

    ring_size = RING

    def __init__(self, requests: int = 5) -> None:
        self.rows = torch.full((requests * RING + 1, 2), -1.0)

    def translate_from_req_position_to_state_loc(self, req, pos):
        return torch.where(pos < 0, -1, req * RING + pos % RING)

    def get_state_by_state_loc(self, at):
        return Halves(self.rows[at])

    def set_state_by_state_loc(self, at, value):
        self.rows[at] = value.kv_score
        self.rows[-1] = -1.0


def step(*requests: tuple[int, int, int], pads: int = 0):
    """Rows of (request, first position, tokens), then padding rows of request 0."""
    req = [r for r, _, n in requests for _ in range(n)] + [0] * pads
    pos = [first + i for _, first, n in requests for i in range(n)] + [0] * pads
    pad = [False] * (len(req) - pads) + [True] * pads
    return torch.tensor(req), torch.tensor(pos), torch.tensor(pad)


def padding_first():
    """Padding whose request and position would go on into the real rows."""
    return torch.tensor([0, 0, 0]), torch.tensor([2, 3, 4]), torch.tensor([True, False, False])


STEPS = {
    "padding ahead": [step((0, 0, 3)), padding_first()],
    "one row": [step((1, 0, 1))],
    "carried over": [step((1, 0, 3)), step((1, 3, 3)), step((1, 6, 1))],
    "longer than the ring": [step((1, 0, 11)), step((1, 11, 9), (2, 0, 6)), step((2, 6, 2), (1, 20, 1))],
    "padding": [step((3, 0, 5), pads=6), step((3, 5, 1), pads=1), step((3, 6, 2))],
    "padding behind a request of slot 0": [step((0, 0, 7), pads=5), step((0, 7, 2), pads=4)],
    "requests that interleave": [step((1, 0, 2), (2, 0, 3)), step((2, 3, 1), (1, 2, 1)), step((1, 3, 2), (2, 4, 2))],
}


@pytest.mark.parametrize("name", STEPS)
def test_every_row_finds_the_token_before_it(name):
    state, values = State(), {}
    for number, (req, pos, pad) in enumerate(STEPS[name]):
        own = torch.arange(2 * req.shape[0], dtype=torch.float32).view(-1, 2) + 1000 * (number + 1)
        found = partners(pair_rows(state, req, pos, pad), state, Halves(own)).kv_score
        for i, (r, p) in enumerate(zip(req.tolist(), pos.tolist(), strict=True)):
            if not pad[i]:
                values[r, p] = own[i]
        for i, (r, p) in enumerate(zip(req.tolist(), pos.tolist(), strict=True)):
            if not pad[i]:
                expected = values.get((r, p - 1), torch.tensor([-1.0, -1.0]))
                assert torch.equal(found[i], expected), (number, r, p)
    assert bool((state.rows[-1] == -1).all()), "the empty row holds nothing"


def test_padding_reads_the_empty_row():
    req, pos, pad = step((1, 0, 3), pads=2)
    pos[pad] = 9
    assert pair_rows(State(), req, pos, pad).read.tolist()[-2:] == [-1, -1]


def test_each_slot_is_written_by_one_row():
    req, pos, pad = step((1, 0, 11), (2, 3, 6), pads=7)
    write = pair_rows(State(), req, pos, pad).write
    kept = write[write >= 0]
    assert kept.unique().shape == kept.shape
    # The last rows of each request, one for each place of the ring.
    assert [(r, p) for r, p, w in zip(req.tolist(), pos.tolist(), write.tolist(), strict=True) if w >= 0] == [
        *((1, p) for p in range(7, 11)),
        *((2, p) for p in range(5, 9)),
    ]
