"""The Triton kernels against plain torch, in Triton's interpreter (and on a GPU where there is one)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SELECT = """
import torch
from sglang_dsv4_graphs.breaks import kernels
from sglang_dsv4_graphs.breaks.selection import select_all
pick = torch.Generator().manual_seed(1)
for rows, extra, width, several in ((1, 0, 16, False), (5, 3, 24, True), (9, 0, 64, True), (0, 4, 16, False)):
    lens = torch.randint(0, 16, (rows,), generator=pick)
    starts = torch.arange(rows) * 16 if several else None
    slots = torch.randint(0, 9999, (16 * max(rows, 1),), generator=pick)
    raw = torch.full((rows + extra, width), 7, dtype=torch.int32)
    page = raw.clone()
    want_raw, want_page = raw.clone(), raw.clone()
    select_all(want_raw, want_page, lens, slots, starts)
    kernels.select_visible(raw, page, lens, slots, starts)
    assert torch.equal(raw, want_raw), (rows, width)
    assert torch.equal(page, want_page), (rows, width)
    alone = torch.full_like(raw, 7)
    kernels.select_visible(alone, None, lens, slots, starts)
    assert torch.equal(alone, want_raw)
print("same")
"""

DEQUANTIZE = """
import torch
from sglang_dsv4_graphs.breaks import kernels
pick = torch.Generator().manual_seed(2)
PAGE, pages = 64, 5
table = torch.randint(0, 256, (pages, PAGE * kernels.SLOT_BYTES), generator=pick, dtype=torch.uint8)
# Exponents whose results are no denormals: the interpreter flushes those.
table[:, PAGE * 64 :] = torch.randint(2, 250, (pages, PAGE * 4), generator=pick, dtype=torch.uint8)
slots = torch.randint(0, PAGE * pages, (37,), generator=pick)
e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
values = torch.cat([e2m1, -e2m1])
page, offset = slots // PAGE, slots % PAGE
payload = torch.stack([table[p, o * 64 : o * 64 + 64] for p, o in zip(page, offset)])
codes = torch.stack([payload & 15, payload >> 4], dim=-1).flatten(1).long()
scales = torch.stack([table[p, PAGE * 64 + o * 4 : PAGE * 64 + o * 4 + 4] for p, o in zip(page, offset)])
want = values[codes] * torch.exp2(scales.double() - 127).float().repeat_interleave(32, dim=1)
got = kernels.dequantize_index_keys(table, slots, 64)
assert got.shape == (64, 128)
assert torch.equal(got[:37].view(torch.int16), want.to(torch.bfloat16).view(torch.int16))
assert not got[37:].any()
print("same")
"""


@pytest.mark.parametrize("script", [SELECT, DEQUANTIZE], ids=["select", "dequantize"])
def test_kernel_equals_torch(script):
    environ = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, text=True, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "same"


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang_dsv4_graphs.breaks import kernels
TYPES = {"raw": "*i32", "page": "*i32"}
TYPES |= {"lens": "*i64", "starts": "*i64", "table": "*u8", "slots": "*i64", "out": "*bf16"}

def compiled(kernel, **constants):
    types = {n: "constexpr" if n.isupper() else TYPES.get(n, "i32") for n in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

for page in (True, False):
    for starts in (True, False):
        assert ".entry" in compiled(kernels._select_visible, HAS_PAGE=page, HAS_STARTS=starts, BLOCK=512)
assert ".entry" in compiled(kernels._dequantize_index_keys, PAGE=64, DIM=128, PAYLOAD=64, SCALES=4)
print("compiled")
"""


def test_kernels_compile_for_hopper(tmp_path):
    """The interpreter accepts Python that the compiler refuses."""
    path = os.pathsep.join(p for p in sys.path if p)
    environ = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environ, text=True, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "compiled"
