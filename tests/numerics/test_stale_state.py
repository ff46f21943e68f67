"""What changes between two calls must be seen by the second: each case is run eagerly too, and compared call by call."""

from __future__ import annotations

import pytest
import torch
from replay_case import interpreted

X = torch.arange(1.0, 5.0)


def agree(function, calls, transform=interpreted):
    """`calls` yields the arguments of one call after another, made anew for the eager run."""
    results = []
    for wrap in (lambda f: f, transform):
        step = wrap(function)
        results.append([(step(*args), args) for args in calls()])
    torch.testing.assert_close(results[1], results[0])


# ---- memory that tensors share


@pytest.mark.parametrize("view", [torch.Tensor.detach, lambda t: t.view(4), lambda t: t[:], lambda t: t])
def test_windows_that_coincided_once(view):
    """`step(x, x.detach())` says nothing about `step(x, y)`."""

    def calls():
        a = X.clone()
        yield a, view(a)
        yield a, view(a)
        yield a, torch.ones(4)
        yield torch.ones(4), a
        yield a, view(a)

    agree(lambda a, b: a + 2 * b, calls)


def test_an_argument_that_was_a_parameters_memory():
    def run(transform):
        weight = torch.ones(4)

        def step(x):
            weight.mul_(2.0)
            return x * 1.0

        compiled = transform(step)
        return [compiled(weight.detach() if k == 1 else torch.ones(4)).clone() for k in range(4)]

    torch.testing.assert_close(run(interpreted), run(lambda f: f))


def test_windows_side_by_side_in_one_operation():
    def step(a, b):
        a.add_(b)
        b.mul_(2.0)
        return a + b

    def calls():
        yield X.clone(), torch.ones(4)
        for start in (0, 4, 6):
            base = torch.arange(12.0)
            yield base[:4], base[start : start + 4]

    agree(step, calls)
