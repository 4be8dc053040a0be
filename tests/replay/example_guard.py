"""An extension of the plugin: a kernel of ours reads a buffer by address, and graphs must know.

Suppose a patched attention kernel keeps a workspace that it replaces by a larger one on a larger step. A captured graph
goes on reading the old one. So the plugin is told of it: it notes where the buffer lies when it captures, and a buffer
that has moved retires the graphs before the next replay.

A package makes this module known under the entry-point group ``sglang_dsv4_graphs``::

    [project.entry-points.sglang_dsv4_graphs]
    my_workspace = "my_package.guard"
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sglang_dsv4_graphs import GuardedBuffer, Probe, hookimpl

# What the kernel reads; None until its first step.
workspace: torch.Tensor | None = None


def grow(rows: int) -> None:
    """What the kernel does on its largest step so far."""
    global workspace
    if workspace is None or workspace.numel() < rows:
        workspace = torch.zeros(rows)


@hookimpl
def dsv4_graphs_guard(probe: Probe) -> Iterable[GuardedBuffer]:
    """Called once, after the largest step has run; ``probe`` has the model runner, its backend and the model."""
    if probe.attn_backend is None:
        return []
    # The function is called at every capture and before every replay: it gives the buffer of that moment.
    return [GuardedBuffer("my-workspace", lambda: workspace)]
