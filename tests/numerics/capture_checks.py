"""Compares a step that is recorded once and then replayed from its graph with the same step run eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from capture_replay import Replayed
from torch import Tensor


def leaves(tree: Any) -> Iterator[Any]:
    """Tensors and numbers of nested containers, in order."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from leaves(item)
    else:
        yield tree


def run(build: Callable, transform: Callable, seed: int) -> tuple[list[Any], list[Tensor | None], Any]:
    torch.manual_seed(seed)
    step, data, state = build()
    step, outs = transform(step), []
    for batch in data:
        if callable(batch):
            batch()
            continue
        out = step(*batch)
        outs.append([x.detach().clone() if isinstance(x, Tensor) else x for x in leaves(out)])
    return outs, [t if t is None else t.detach().clone() for t in state()], step


def agree(build: Callable, captures: int | None = 1, rtol: float = 1e-4, atol: float = 1e-6, seed: int = 0) -> Replayed:
    """Asserts that replays equal eager in outputs and final state, and that the step was recorded `captures` times."""
    eager, eager_state, _ = run(build, lambda f: f, seed)
    outs, state, step = run(build, Replayed, seed)
    for i, (a, b) in enumerate(zip(eager, outs, strict=True)):
        for j, (x, y) in enumerate(zip(a, b, strict=True)):
            where = f"step {i} output {j}: "
            if isinstance(x, Tensor):
                assert x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride(), (
                    f"{where}{x.stride()} {y.stride()}"
                )
                torch.testing.assert_close(y, x, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: where + m)
            else:
                assert type(x) is type(y) and (x == y or abs(x - y) < 1e-9), f"{where}{x!r} {y!r}"
    for j, (x, y) in enumerate(zip(eager_state, state, strict=True)):
        assert (x is None) == (y is None), f"state {j}: {x} {y}"
        if x is not None:
            torch.testing.assert_close(y, x, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"state {j}: {m}")
    if captures is not None:
        assert step.captures == captures, f"{step.captures} captures"
    return step
