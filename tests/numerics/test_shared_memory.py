"""Tensors over one memory, whether their storages are one or several: a step does what eager does, or says why not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from replay_case import interpreted

from nova.errors import CaptureError


def buffer():
    return np.arange(12, dtype=np.float32)


def whole(n):
    return torch.from_numpy(n)


def window(n, start, stop):
    return torch.from_numpy(n[start:stop])


def raw(n, start, stop):
    return torch.frombuffer(memoryview(n).cast("B"), dtype=torch.float32, count=stop - start, offset=4 * start)


def apart(n):
    return window(n, 0, 4), window(n, 4, 8)


def separate(n):
    return torch.arange(4.0), torch.arange(4.0)


def same(n):
    return window(n, 0, 4), window(n, 0, 4)


def same_tensor(n):
    return (window(n, 0, 4),) * 2


def one_storage(n):
    t = whole(n)
    return t[:4], t[:4]


def neighbours(n):
    t = whole(n)
    return t[:4], t[4:8]


def overlapping(n):
    return window(n, 0, 4), window(n, 2, 6)


def overlapping_raw(n):
    return raw(n, 0, 4), raw(n, 2, 6)


def with_torchs_own(n):
    t = torch.arange(12.0)
    return t[:4], torch.from_numpy(t.numpy())[:4]


def writing(a, b):
    a.add_(b)
    b.mul_(2.0)
    return a + b


def reading(a, b):
    return a * 2 + b


def calls(function, pairs, transform):
    step, found = transform(function), []
    for pair in pairs:
        n = buffer()
        a, b = pair(n)
        for _ in range(2):
            found.append((step(a, b).clone(), a.clone(), b.clone(), n.copy()))
    return found


ACCEPTED = [separate, apart, same, same_tensor, one_storage, neighbours]


@pytest.mark.parametrize("first", ACCEPTED)
@pytest.mark.parametrize("then", ACCEPTED)
def test_written_memory(first, then):
    pairs = (first, then, first)
    torch.testing.assert_close(calls(writing, pairs, interpreted), calls(writing, pairs, lambda f: f))


@pytest.mark.parametrize("pair", [overlapping, overlapping_raw, with_torchs_own])
def test_memory_that_is_only_read(pair):
    pairs = (pair, separate, same, pair)
    torch.testing.assert_close(calls(reading, pairs, interpreted), calls(reading, pairs, lambda f: f))


@pytest.mark.parametrize("pair", [overlapping, overlapping_raw])
@pytest.mark.parametrize("apart_at_first", [True, False])
def test_windows_of_several_storages_that_overlap_and_are_written(pair, apart_at_first):
    step, n = interpreted(writing), buffer()
    if apart_at_first:
        for _ in range(2):
            step(*separate(n))
    for _ in range(2):
        with pytest.raises(CaptureError, match=r"arg\[0\] and arg\[1\] share through two storages"):
            step(*pair(n))
    assert (n == buffer()).all()


def test_a_window_that_moves_onto_what_the_step_writes():
    def run(transform):
        n = np.arange(12, dtype=np.float32)
        state = window(n, 0, 4)

        def step(x):
            state.add_(1.0)
            return (state * x).sum()

        compiled, found = transform(step), []
        for view in (window(n, 4, 8), window(n, 8, 12), window(n, 0, 4), window(n, 4, 8)):
            found.append((compiled(view), n.copy()))
        return found

    torch.testing.assert_close(run(interpreted), run(lambda f: f))


@pytest.mark.parametrize("given", [True, False])
def test_a_tensor_that_the_step_itself_makes_over_a_buffer(given):
    def run(transform):
        n = np.arange(4, dtype=np.float32)
        other = np.arange(4, dtype=np.float32)

        def step(x):
            made = torch.from_numpy(n)
            if not given:
                torch.from_numpy(n).add_(1.0)
            return made * x

        compiled = transform(step)
        return [
            compiled(torch.from_numpy(found)) for found in (n if given else other, other, other, n if given else other)
        ]

    torch.testing.assert_close(run(interpreted), run(lambda f: f))


def test_parameters_over_one_buffer():
    """Made one after another from a buffer, then replaced by others of it: a stable tensor is looked at when it moves."""

    def run(transform):
        n = np.ones(16, dtype=np.float32)
        held = {"a": window(n, 0, 4), "b": window(n, 8, 12)}

        @transform
        def step(x):
            held["a"].add_(x)
            return (held["a"] * held["b"]).sum()

        found = []
        for start in (8, 4, 0, 12):
            held["b"] = window(n, start, start + 4)
            for _ in range(2):
                found.append((step(torch.ones(4)), n.copy()))
        return found

    torch.testing.assert_close(run(interpreted), run(lambda f: f))


def test_parameters_side_by_side_that_get_storages_of_their_own():
    """As far apart as before, but what the two windows lay in is one storage no more."""

    def run(transform):
        n = np.arange(8, dtype=np.float32)
        model = torch.nn.Module()
        model.a, model.b = (torch.nn.Parameter(t) for t in whole(n).split(4))

        @transform
        def step(x):
            with torch.no_grad():
                model.a.add_(x)
                model.b.mul_(2.0)
            return (model.a * model.b).sum().detach()

        found = [(step(torch.ones(4)), n.copy()) for _ in range(2)]
        for k in range(3):
            model.a.data, model.b.data = window(n, 0, 4), window(n, 4, 8)
            found += [(step(torch.ones(4)), n.copy()) for _ in range(2)]
            if k == 1:
                model.a.data, model.b.data = torch.zeros(4), torch.ones(4)
                found += [(step(torch.ones(4)), n.copy()) for _ in range(2)]
        return found

    torch.testing.assert_close(run(interpreted), run(lambda f: f))
