"""Runs a training step eagerly and compiled from the same seed, and compares outputs, dtypes and final state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import nova


def leaves(tree) -> Iterator[Tensor]:
    """The tensors of nested dicts, tuples and lists, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from leaves(list(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from leaves(item)


def run(build: Callable, transform: Callable, seed: int):
    """`build()` returns (step, data, state). Entries of `data` are argument tuples, or callables run between steps."""
    torch.manual_seed(seed)
    step, data, state = build()
    step, outputs = transform(step), []
    for batch in data:
        if callable(batch):
            batch()
            continue
        try:
            outputs.append(step(*batch))
        except Exception as error:  # the compiled step must raise the same type
            outputs.append(error)
    return outputs, [t.detach().clone() for t in state()], step


def check(build: Callable, rtol: float = 1e-4, atol: float = 1e-5, seed: int = 0, **options) -> Callable:
    """Asserts that compiled equals eager, step by step, and returns the compiled step."""
    eager, eager_state, _ = run(build, lambda f: f, seed)
    compiled, state, step = run(build, lambda f: nova.jit(f, **options), seed)
    for i, (e, c) in enumerate(zip(eager, compiled, strict=True)):
        if isinstance(e, Exception) or isinstance(c, Exception):
            if type(e) is not type(c) and isinstance(c, Exception):
                raise AssertionError(f"step {i}: eager gave {e!r}, compiled raised {c!r}") from c
            assert type(e) is type(c), f"step {i}: eager gave {e!r}, compiled {c!r}"
            continue
        for j, (a, b) in enumerate(zip(leaves(e), leaves(c), strict=True)):
            assert a.dtype == b.dtype and a.shape == b.shape, f"step {i} output {j}"
            torch.testing.assert_close(
                b, a, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"step {i} output {j}: {m}"
            )
    for j, (a, b) in enumerate(zip(eager_state, state, strict=True)):
        torch.testing.assert_close(b, a, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"state {j}: {m}")
    return step


def unchanged(build: Callable, error: type[Exception], *words: str) -> None:
    """Asserts that the first call raises `error`, names a line and `words`, and leaves the state as it was."""
    torch.manual_seed(0)
    step, data, state = build()
    before = copy.deepcopy([t.detach() for t in state()])
    try:
        nova.jit(step)(*data[0])
    except error as e:
        text = str(e)
        assert "line" in text, text
        assert all(w in text for w in words), text
    else:
        raise AssertionError(f"no {error.__name__}")
    after = [t.detach() for t in state()]
    assert len(before) == len(after)
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)
