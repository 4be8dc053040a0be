"""Copy-in: one launch leaves, to the byte, what single copies leave; in Triton's interpreter and compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from sglang_dsv4_graphs.bank import copy_in as module  # noqa: E402
from sglang_dsv4_graphs.bank.copy_in import Rows, copy_in  # noqa: E402


def made(rows: int, *, seed: int = 0) -> list[Rows]:
    """Buffers of 8 rows full of rubbish, and sources: of many types, odd rows, other strides, more than one launch."""
    pick = torch.Generator().manual_seed(seed)
    found = []
    for shape, dtype in (
        ((4, 700), torch.bfloat16),
        ((), torch.int64),
        ((3,), torch.bfloat16),  # six bytes a row
        ((2, 5), torch.float32),
        ((), torch.int32),
        ((3,), torch.uint8),
        ((2, 4), torch.bfloat16),
        ((), torch.int16),
        ((2,), torch.int64),
        ((8,), torch.uint8),
    ):
        whole = torch.randint(0, 100, (2, 16, *shape), generator=pick).to(dtype)
        found.append(Rows(whole[0, :8].clone(), whole[1, :rows].clone(), 7 if len(shape) < 2 else 0))
    strided = torch.randint(0, 100, (8, 4, 3), generator=pick).to(torch.bfloat16).transpose(1, 2)
    found.append(Rows(torch.full((8, 3, 4), 7, dtype=torch.bfloat16), strided[:rows]))
    found.append(Rows(torch.zeros(8, 4, dtype=torch.int64)[:, :3], torch.ones(rows, 3, dtype=torch.int64)))
    return found


def expected(rows: list[Rows]) -> list[torch.Tensor]:
    wanted = []
    for r in rows:
        want, count = r.buffer.clone(), r.source.shape[0]
        want[:count] = r.source
        want[count : max(count, r.zeros_to)] = 0
        wanted.append(want)
    return wanted


@pytest.mark.parametrize("rows", [8, 5, 1, 0])
def test_copies_of_torch(rows: int) -> None:
    parts, counts = made(rows), torch.full((1,), -1)
    wanted = expected(parts)
    copy_in(parts, counts, (rows, 2**31 - 1))
    assert all(torch.equal(part.buffer, want) for part, want in zip(parts, wanted, strict=True))
    assert counts.view(torch.int32).tolist() == [rows, 2**31 - 1]
    copy_in([])


def test_a_cpu_has_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ONE_LAUNCH", True)
    monkeypatch.setattr(module, "launch", None)
    test_copies_of_torch(5)


ONE_LAUNCH = """
import torch
from sglang_dsv4_graphs.bank import copy_in as module
from tests.bank.test_copy_in import expected, made
several = 0
for count in (8, 5, 1, 0):
    for some in (slice(0, None), slice(0, 1), slice(2, 3), slice(1, 5), slice(-2, None), slice(0, 0)):
        for counts in (None, torch.full((1,), -1)):
            rows = made(count, seed=count)[some]
            wanted = expected(rows)
            left = module.launch(rows, counts, (count, 2**31 - 1))
            done = [i for i, r in enumerate(rows) if not any(r is l for l in left)]
            several = max(several, len(done))
            for i in done:
                assert torch.equal(rows[i].buffer, wanted[i]), (count, some, i)
            assert not any(r.source.is_contiguous() and r.source.element_size() == 8 and r.buffer.is_contiguous()
                           for r in left[: 6 - len(done)])
            assert counts is None or counts.view(torch.int32).tolist() == [count, 2**31 - 1]
assert several == module.MOST
print("same")
"""

COMPILE = """
import itertools
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_dsv4_graphs.bank import copy_kernel
kernel = copy_kernel._copy_words
types = {n: "constexpr" if n.isupper() else "i32" for n in kernel.arg_names}
kinds = itertools.cycle(["*bf16", "*i64", "*i32", "*u8", "*fp32"])
types |= {n: next(kinds) for n in kernel.arg_names if n[0] in "sb" and n[1:].isdigit()} | {"counts": "*i64"}
for counts in (True, False):
    source = ASTSource(fn=kernel, signature=types, constexprs={"HAS_COUNTS": counts, "BLOCK": copy_kernel.BLOCK})
    assert ".entry" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
print("compiled")
"""


@pytest.mark.parametrize(("script", "says", "interpret"), [(ONE_LAUNCH, "same", "1"), (COMPILE, "compiled", "0")])
def test_one_launch(script: str, says: str, interpret: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environ = {**os.environ, "TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(tmp_path)}
    environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *(p for p in sys.path if p)])
    done = subprocess.run([sys.executable, "-c", script], env=environ, text=True, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == says
