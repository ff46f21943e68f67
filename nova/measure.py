"""Measures what eager PyTorch allocates in a step, to set beside a memory plan.

CPU tensors have no `max_memory_allocated`; the profiler's allocation events give the same figure exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_allocated(run: Callable[[], Any], device: torch.device | None = None) -> int:
    """Bytes: the most that PyTorch's allocator holds during `run()` above what it held before."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=False) as prof:
        run()
    changes = []
    pending = list(prof.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag.name == "Allocation":
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    live = peak = 0
    for _, size in sorted(changes, key=lambda c: c[0]):
        live += size
        peak = max(peak, live)
    return peak


def bytes_held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
