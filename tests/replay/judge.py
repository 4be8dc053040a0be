"""Every replay of a server, repeated eagerly from the same memory on the same padded rows.

Put around ``Bank.replay``, so that the step, its decisions and its replays stay the plugin's own. A replay must leave
what the eager run leaves, to the bit: the rows that go on, everything that steps keep (KV, pending pairs, Engram's
history), and what layers publish to later layers of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Verdict:
    """One replay; ``wrong`` names what differed from the eager run."""

    bank: str
    bucket: int
    rows: int
    wrong: tuple[str, ...]


class Judge:
    """Judges the banks it is put around; ``verdicts`` grows by one per replay."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.verdicts: list[Verdict] = []
        # Replays are passed through while it is set.
        self.quiet = False
        for name in ("full-layer", "decoder-replay"):
            bank = server.bank(name)
            if bank is not None:
                self.watch(bank)

    @classmethod
    def of(cls, server: Any) -> Judge:
        """The judge of ``server``; a bank is judged once."""
        if server.judge is None:
            server.judge = cls(server)
        return server.judge

    def watch(self, bank: Any) -> None:
        replay = bank.replay

        def judged(bucket: int, live: Any, batch: Any) -> Any:
            if self.quiet:
                self.verdicts.append(Verdict(bank.name, bucket, live.rows, ()))
                return replay(bucket, live, batch)
            live = live.like([t.clone() for t in live.tensors()])
            before = self._memory(bank)
            outputs = replay(bucket, live, batch)
            kept, after = outputs.cloned(), self._memory(bank)
            self._put_back(bank, before)
            eager = bank.run_eagerly(bucket, live, batch)
            wrong = [*_outputs_that_differ(kept, eager), *_names_that_differ(after[0], self._kept())]
            self.verdicts.append(Verdict(bank.name, bucket, live.rows, tuple(wrong)))
            self._put_back(bank, after)
            return outputs

        bank.replay = judged

    def take(self) -> list[Verdict]:
        """The verdicts since this was last called."""
        taken, self.verdicts = self.verdicts, []
        return taken

    def _kept(self) -> dict[str, Any]:
        """What steps keep for later steps, and layers for later layers, by name."""
        named = self._server.kept()
        # An index source writes its selection over the one that earlier layers of the range have read.
        selections = self._server.runner.attn_backend.forward_metadata.core_attn_metadata.selection
        named |= {f"selection.{ratio}": selected for ratio, selected in selections.items()}
        return named

    def _memory(self, bank: Any) -> tuple[dict[str, Any], list[Any]]:
        return {name: t.clone() for name, t in self._kept().items()}, [t.clone() for t in bank.owned_tensors()]

    def _put_back(self, bank: Any, memory: tuple[dict[str, Any], list[Any]]) -> None:
        kept, owned = memory
        for name, tensor in self._kept().items():
            tensor.copy_(kept[name])
        for tensor, saved in zip(bank.owned_tensors(), owned, strict=True):
            tensor.copy_(saved)


def same(a: Any, b: Any) -> bool:
    """Bit for bit, and no NaN anywhere."""
    import torch

    return torch.equal(a, b)


def _outputs_that_differ(replayed: Any, eager: Any) -> list[str]:
    pairs = {name: (getattr(replayed, name), getattr(eager, name)) for name in ("residual", "pre", "aux")}
    return [
        name
        for name, (a, b) in pairs.items()
        if (a is None) != (b is None) or (a is not None and b is not None and not same(a, b))
    ]


def _names_that_differ(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name, tensor in one.items() if not same(tensor, other[name])]


def distance(a: Any, b: Any) -> float:
    """The largest difference of a row, relative to its length in ``b``; NaN if there is one."""
    a, b = a.float().flatten(1), b.float().flatten(1)
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-20)).max())
