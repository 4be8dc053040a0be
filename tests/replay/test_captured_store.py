"""A K store inside a graph writes, to the bit, what the eager store writes to the slots of each step.

A capture stores the rows of a dummy step into the padding slot 0: whatever of it stayed in the graph, rows or slots,
shows in the next step's cache. Eager stores are watched in ``Bank.run_eagerly``, which runs the same padded rows and
stores the real ones alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.replay.judge import Judge, same
from tests.replay.server import DECODER_REPLAY, DECODER_REPLAY_CAP, FULL_LAYER, FULL_LAYER_CAP, Server, Servers
from tests.replay.story import Story

pytestmark = pytest.mark.engine

ONE_BUCKET = {FULL_LAYER_CAP: "64", DECODER_REPLAY_CAP: "128"}
# Of each store: layer, slots, and the rows that it left there.
Stored = tuple[int, Any, Any]


@contextmanager
def stores(pool: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Stored]]:
    """Stores that Python calls within the block."""
    seen: list[Stored] = []
    store = pool.set_swa_key_buffer_radix_fused_norm_rope

    def noted(*, layer_id: int, swa_loc: Any, **kwargs: Any) -> None:
        store(layer_id=layer_id, swa_loc=swa_loc, **kwargs)
        slots = swa_loc.long()
        seen.append((layer_id, slots.clone(), pool.swa[layer_id][slots].clone()))

    with monkeypatch.context() as patch:
        patch.setattr(pool, "set_swa_key_buffer_radix_fused_norm_rope", noted)
        yield seen


class StoreJudge:
    """Put around a bank's replays: each store against the eager one from the same memory."""

    def __init__(self, server: Server, bank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pool, self._bank, self._replay = server.runner.token_to_kv_pool, bank, bank.replay
        self._judge, self._patch = Judge.of(server), monkeypatch
        self._judge.quiet = True
        # Of each replay: the slots of the step.
        self.slots: list[list[int]] = []
        monkeypatch.setattr(bank, "replay", self.replay)

    def replay(self, bucket: int, live: Any, batch: Any) -> Any:
        bank, pool, judge = self._bank, self._pool, self._judge
        live = live.like([t.clone() for t in live.tensors()])
        before, memory = [swa.clone() for swa in pool.swa], judge._memory(bank)
        with stores(pool, self._patch) as called:
            outputs = self._replay(bucket, live, batch)
        assert called == []  # graphs alone have stored
        after, left = [swa.clone() for swa in pool.swa], judge._memory(bank)
        judge._put_back(bank, memory)
        with stores(pool, self._patch) as eager:
            bank.run_eagerly(bucket, live, batch)
        judge._put_back(bank, left)
        assert [layer for layer, _, _ in eager] == list(range(bank.layers.first, bank.layers.last))
        for layer, slots, rows in eager:
            assert slots.shape[0] == live.rows
            assert (slots > 0).all()
            assert rows.abs().sum(1).all()
            assert same(after[layer][slots], rows), layer
            changed = (after[layer] != before[layer]).any(1).nonzero().flatten().tolist()
            assert set(changed) <= {*([0] if live.rows < bucket else []), *slots.tolist()}, layer
        self.slots.append(eager[0][1].tolist())
        return outputs


@pytest.mark.parametrize("lean", ["0", "1"])
def test_a_captured_store_writes_what_the_eager_store_writes(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, lean: str
) -> None:
    server = servers.own(ONE_BUCKET | {"SGLANG_DSV4_EAGER_GRAPH_LEAN_BREAKS": lean})
    story = Story(server, Judge.of(server))
    judges = {name: StoreJudge(server, server.bank(name), monkeypatch) for name in (FULL_LAYER, DECODER_REPLAY)}
    # Fewer rows, more requests, the whole bucket, one row; the same request at other positions.
    steps = [{"a": 61}, {"a": 17, "b": 9}, {"c": 64}, {"b": 1}, {"a": 30, "c": 33}]
    for step in steps:
        server.runner.forward(story.batch(step))
    for judge in judges.values():
        assert [len(slots) for slots in judge.slots] == [sum(step.values()) for step in steps]
        # No step stores where another did: a slot that stayed from one would show.
        assert len({slot for slots in judge.slots for slot in slots}) == sum(map(len, judge.slots))


def test_the_tails_store_goes_to_the_slots_of_the_tail(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows than the step's, in the middle of it: each request's last ones."""
    server = servers.own({FULL_LAYER_CAP: "256", DECODER_REPLAY_CAP: "256"})
    story = Story(server, Judge.of(server))
    judges = {name: StoreJudge(server, server.bank(name), monkeypatch) for name in (FULL_LAYER, DECODER_REPLAY)}
    batch = story.batch({"a": 150, "b": 40})
    server.runner.forward(batch)
    ((full,), (late,)) = (judge.slots for judge in judges.values())
    assert full == server.runner.token_to_kv_pool.translate_loc_from_full_to_swa(batch.out_cache_loc).tolist()
    assert late == full[22:]
