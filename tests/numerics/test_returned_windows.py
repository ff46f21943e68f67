"""What a step returns of its inputs lies in their memory, on the recorded call and on every replay, as in eager."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import nova

WINDOWS = {
    "itself": lambda t: t,
    "detach": torch.Tensor.detach,
    "data": lambda t: t.data,
    "select": lambda t: t[1],
    "slice": lambda t: t[:, 1:3],
    "step": lambda t: t[:, ::2],
    "transpose": torch.Tensor.t,
    "view": lambda t: t.view(2, 2, 3),
    "flatten": torch.Tensor.flatten,
    "expand": lambda t: t[:1].expand(5, 3),
    "as integers": lambda t: t.detach().view(torch.int32),
    "a window of a window": lambda t: t.t()[1:].detach()[0],
    "empty": lambda t: t[4:],
    "diagonal": torch.Tensor.diagonal,
}


def place(t, base):
    """Where a tensor lies, counted from another; an empty one lies nowhere."""
    address = t.data_ptr() - base.data_ptr() if t.numel() else None
    return address, tuple(t.shape), t.stride(), t.dtype


def compare(make, transforms, calls=4):
    """`make(transform)` gives a step and the tensor that it returns windows on."""
    runs = []
    for transform in transforms:
        torch.manual_seed(0)
        step, base = make(transform)
        returned = [torch.utils._pytree.tree_leaves(step(torch.ones(2, 3))) for _ in range(calls)]
        windows = [out for outs in returned for out in outs if isinstance(out, torch.Tensor)]
        base.data.add_(1.0)  # later steps and the user's own writes are seen through all of them
        runs.append(([place(out, base) for out in windows], [out.detach().clone() for out in windows]))
    for places, values in runs[1:]:
        assert places == runs[0][0]
        torch.testing.assert_close(values, runs[0][1], rtol=1e-5, atol=1e-6)


def interpreted(f):
    return nova.jit(f, backend="interpret")


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_on_a_weight_that_is_trained(name):
    def make(transform):
        model = nn.Linear(3, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(x):
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            return WINDOWS[name](model.weight)

        return transform(step), model.weight

    compare(make, (lambda f: f, interpreted))


@pytest.mark.parametrize("name", ["detach", "slice", "view"])
def test_windows_on_what_is_compiled(name):
    def make(transform):
        state, unused = torch.ones(4, 3), torch.ones(2)

        def step(x):
            state.add_(x.sum())
            return {"window": WINDOWS[name](state), "both": (WINDOWS[name](state), unused[:1].numel())}

        return transform(step), state

    compare(make, (lambda f: f, nova.jit))


def test_an_input_that_nothing_else_reads():
    def make(transform):
        state = torch.arange(12.0).view(4, 3)
        return transform(lambda x: (state[1:], state.detach())), state

    compare(make, (lambda f: f, interpreted, nova.jit))


def test_one_object_returned_twice():
    state = torch.ones(4)

    @interpreted
    def step(x):
        window = state[1:]
        return window, window, state[1:]

    for _ in range(3):
        a, b, c = step(torch.ones(2))
        assert a is b and a is not c and c.data_ptr() == state[1:].data_ptr()


def test_windows_on_an_argument_a_buffer_and_optimizer_state():
    model = nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @interpreted
    def step(x):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return x.t(), model.running_mean.detach(), optimizer.state[model.weight]["momentum_buffer"][1:]

    for _ in range(4):
        x = torch.randn(2, 3)
        a, b, c = step(x)
        buffer = optimizer.state[model.weight]["momentum_buffer"]
        assert a.data_ptr() == x.data_ptr() and torch.equal(a, x.t())
        assert b.data_ptr() == model.running_mean.data_ptr()
        assert c.data_ptr() == buffer[1:].data_ptr() and torch.equal(c, buffer[1:])


@pytest.mark.parametrize("name", ["complex", "real", "conj", "imaginary"])
def test_windows_on_complex_numbers(name):
    make = {
        "complex": lambda t: t[1:],
        "real": torch.view_as_real,
        "conj": torch.conj,
        "imaginary": lambda t: t.conj().imag,
    }

    def run(transform):
        state = torch.complex(torch.arange(4.0), torch.ones(4))
        step = transform(lambda x: (make[name](state), x * 2))
        found = [step(torch.ones(2))[0] for _ in range(3)]
        state.add_(1j)
        return [
            (t.resolve_conj().resolve_neg(), t.is_conj(), t.is_neg(), t.data_ptr() - state.data_ptr()) for t in found
        ]

    torch.testing.assert_close(run(interpreted), run(lambda f: f))


def test_a_window_on_a_buffer_that_the_step_looks_at():
    n = np.ones(4, np.float32)
    step = interpreted(lambda x: torch.from_numpy(n)[1:])
    for _ in range(3):
        assert step(torch.ones(2)).data_ptr() == n.ctypes.data + 4


def test_what_the_step_makes_is_new_on_every_call():
    step = interpreted(lambda x: (torch.tensor([1.0, 2.0]), torch.zeros(2)[:1], x.clone()[1:]))
    calls = [step(torch.ones(2)) for _ in range(3)]
    for out in calls[0]:
        out.fill_(9.0)
    for one, two, three in calls[1:]:
        assert one.tolist() == [1.0, 2.0] and two.tolist() == [0.0] and three.tolist() == [1.0]


def _with(y, view):
    return y, view(y)


TOGETHER = {
    "a row": lambda y: (y, y[0]),
    "a row first": lambda y: (y[0], y),
    "detached": lambda y: (y, y.detach()),
    "parts that overlap": lambda y: (y[:2], y[1:]),
    "chunks": lambda y: y.chunk(2),
    "transposed": lambda y: (y.t(), y, y.t()[1]),
    "of a column-major result": lambda y: _with(y.t().clone(memory_format=torch.preserve_format), lambda z: z[1]),
    "written through": lambda y: (y, y[1].mul_(3.0)),
    "as integers": lambda y: {"y": y, "bits": y.view(torch.int32)},
    "of one number": lambda y: _with(y.sum(), torch.Tensor.detach),
}


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("transform", [nova.jit, interpreted])
def test_what_shares_new_memory_in_eager_shares_it_on_replay(name, transform):
    def function(x):
        return TOGETHER[name](x * 2.0)

    step, x = transform(function), torch.arange(12.0).view(4, 3)
    for _ in range(2):
        expected, found = (torch.utils._pytree.tree_leaves(f(x)) for f in (function, step))
        for a, b in zip(expected, found, strict=True):
            assert (a.stride(), place(a, expected[0])) == (b.stride(), place(b, found[0]))
        torch.testing.assert_close(found, expected)
    for outs in (expected, found):
        outs[0].fill_(-1.0)
    torch.testing.assert_close(found, expected)
