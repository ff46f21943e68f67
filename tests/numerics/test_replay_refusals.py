"""Python that a replay would not run: what a captured step refuses, and in which words."""

from __future__ import annotations

import array
import contextlib
import ctypes
import datetime
import functools
import itertools
import os
import random
import time
import types

import numpy as np
import pytest
import torch
from replay_case import Case, refused, training

import nova
from nova.capture import python_state

SCALE = 1.0
SETTINGS = types.SimpleNamespace(scale=2.0, deep=types.SimpleNamespace(shift=0.0))
HISTORY: list[float] = []


@pytest.mark.parametrize("before", [True, False])
def test_list_mutated(before):
    log: list[int] = []
    refused(lambda m, o: training(m, o, lambda: log.append(1), before), "log", "move this out of the step")
    assert log == []


def test_dict_set_and_global_list_mutated():
    counts, seen = {"n": 0}, set()
    refused(lambda m, o: training(m, o, lambda: counts.update(n=counts["n"] + 1)), "counts['n']", "was 0, is now 1")
    refused(lambda m, o: training(m, o, lambda: seen.add(3)), "seen")
    refused(lambda m, o: training(m, o, lambda: HISTORY.append(1.0)), "HISTORY")
    assert counts == {"n": 0} and not seen and not HISTORY


class Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_double)]


MEMORY_WRITES = {  # what the step writes to, how, and how the refusal names it
    "element": (lambda: np.zeros(3), lambda a: a.__setitem__(0, a[0] + 1), "found[0]", "was 0.0, is now 1.0"),
    "of two axes": (lambda: np.zeros((2, 3)), lambda a: a.__setitem__((1, 2), 5), "found[(1, 2)]", "is now 5.0"),
    "of none": (lambda: np.zeros(()), lambda a: a.__setitem__((), 5), "found[()]", "is now 5.0"),
    "copyto": (lambda: np.zeros(3), lambda a: np.copyto(a, 7), "found[0]", "is now 7.0"),
    "out=": (lambda: np.zeros(3), lambda a: np.add(a, 1, out=a), "found[0]", "is now 1.0"),
    "sort": (lambda: np.array([1, 3, 2]), lambda a: a.sort(), "found[1]", "was 3, is now 2"),
    "through a view": (lambda: np.zeros((2, 3)), lambda a: a[1:].T.fill(2), "found[(1, 0)]", "is now 2.0"),
    "a strided array": (lambda: np.zeros(6)[::2], lambda a: a.__setitem__(1, 2), "found[1]", "is now 2.0"),
    "NaN": (lambda: np.full(2, np.nan), lambda a: a.__setitem__(1, 2), "found[1]", "was nan, is now 2.0"),
    "objects": (lambda: np.array([1, "a"], object), lambda a: a.__setitem__(1, "b"), "found[1]", "'b'"),
    "resize": (lambda: np.zeros(3), lambda a: a.resize(5, refcheck=False), "found", "3 items, now 5"),
    "bytearray": (lambda: bytearray(4), lambda a: a.__setitem__(2, 3), "found[2]", "was 0, is now 3"),
    "growing bytearray": (lambda: bytearray(4), lambda a: a.extend(b"xy"), "found", "4 items, now 6"),
    "array": (lambda: array.array("d", [1.0]), lambda a: a.__setitem__(0, 7.0), "found[0]", "is now 7.0"),
    "growing array": (lambda: array.array("i", [1]), lambda a: a.append(7), "found", "1 items, now 2"),
    "memoryview": (lambda: memoryview(bytearray(4)), lambda a: a.__setitem__(1, 3), "found[1]", "is now 3"),
    "ctypes number": (lambda: ctypes.c_int(3), lambda a: setattr(a, "value", 9), "found.value", "was 3, is now 9"),
    "ctypes array": (ctypes.c_int * 3, lambda a: a.__setitem__(1, 3), "found[1]", "is now 3"),
    "structure": (Pair, lambda a: setattr(a, "b", 2.0), "found[15]"),
}  # fmt: skip


@pytest.mark.parametrize("name", MEMORY_WRITES)
def test_memory_written(name):
    make, write, *words = MEMORY_WRITES[name]
    found = make()
    refused(lambda m, o: training(m, o, lambda: write(found)), *words, "move this out of the step")
    wanted = make()
    if isinstance(found, np.ndarray):
        np.testing.assert_array_equal(found, wanted)
    else:
        assert bytes(found) == bytes(wanted)


@pytest.mark.parametrize("read", [False, True])
def test_an_array_that_a_tensor_of_the_step_writes(read):
    """No Python wrote it; but where Python may have read it, before or after, only a recording is right."""

    def run(transform):
        memory = np.zeros(4, np.float32)
        holder = types.SimpleNamespace(memory=memory, x=torch.from_numpy(memory))

        def plain(y):
            holder.x.add_(y)
            return holder.x.sum()

        def reading(y):
            holder.x.add_(y)
            return holder.x.sum() + float(holder.memory[0])

        step = transform(reading if read else plain)
        return [(step(torch.full((4,), float(k))), memory.copy()) for k in range(4)], step

    compiled, step = run(nova.jit(backend="interpret"))
    torch.testing.assert_close(compiled, run(lambda f: f)[0])
    assert step.captures == (4 if read else 1)


def test_what_is_too_large_to_copy_is_said_once(monkeypatch, capsys):
    monkeypatch.setattr(python_state, "MEMORY_LIMIT", 64)
    large = np.zeros(100)
    step = nova.jit(lambda x: x * large[0], backend="interpret")
    step(torch.ones(2))
    assert "what changes in large is not seen" in capsys.readouterr().err


def test_attributes_written():
    class Trainer:
        calls = 0

        def __init__(self, model, optimizer):
            self.model, self.optimizer, self.seen = model, optimizer, 0

        def step(self, x):
            self.seen += len(x)
            return training(self.model, self.optimizer, lambda: None)(x)

    trainers = []

    def step_of(model, optimizer):
        trainers.append(Trainer(model, optimizer))
        return trainers[0].step

    refused(step_of, "seen", "was 0, is now 3")
    assert trainers[0].seen == 0
    refused(lambda m, o: training(m, o, lambda: setattr(m, "last", 1)), "last")
    refused(lambda m, o: training(m, o, lambda: setattr(Trainer, "calls", 1)), "calls")
    assert Trainer.calls == 0


def test_nonlocal_and_global_written():
    def step_of(model, optimizer):
        calls = 0

        def count():
            nonlocal calls
            calls += 1

        return training(model, optimizer, count)

    refused(step_of, "calls")

    def count_globally():
        global SCALE
        SCALE = SCALE + 1

    refused(lambda m, o: training(m, o, count_globally), "SCALE")
    assert SCALE == 1.0


@pytest.mark.parametrize(
    ("read", "word"),
    [
        (time.time, "time.time()"),
        (time.perf_counter, "time.perf_counter()"),
        (datetime.datetime.now, "datetime.now()"),
        (random.random, "random.random()"),
        (lambda: random.randint(0, 5), "random.randint()"),
        (lambda: random.shuffle([1, 2, 3]), "random.shuffle()"),
        (lambda: np.random.rand(2), "numpy.random.rand()"),
        (lambda: np.random.default_rng(0), "numpy.random.default_rng()"),
        (lambda: os.environ["PATH"], "os.environ"),
        (lambda: os.environ.get("NOVA_NOTHING"), "os.environ"),
        (lambda: os.getenv("PATH"), "os"),
        (lambda: open(__file__).close(), "open()"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_reads_of_the_world(read, word):
    refused(lambda m, o: training(m, o, read), word)
    refused(lambda m, o: training(m, o, read, before=False), word)


def test_refusal_survives_the_users_except():
    def read():
        with contextlib.suppress(Exception):
            time.time()

    refused(lambda m, o: training(m, o, read), "time.time()")


def test_numpy_generator_reached_from_outside():
    rng = np.random.default_rng(0)
    refused(lambda m, o: training(m, o, lambda: rng.normal(size=1)), "rng")
    before = random.getstate()
    draw = random.Random.random.__get__(random._inst)
    refused(lambda m, o: training(m, o, lambda: functools.reduce(lambda a, _: draw(), [0, 1])), "random")
    assert random.getstate() == before


def test_iterators():
    loader = iter([torch.ones(3, 4)] * 8)
    refused(lambda m, o: training(m, o, lambda: next(loader)), "loader")
    assert len(list(loader)) == 8
    numbers = itertools.count()
    refused(lambda m, o: training(m, o, lambda: next(numbers)), "numbers")
    generator = (i for i in range(5))
    refused(lambda m, o: training(m, o, lambda: next(generator)), "generator")
    assert list(generator) == list(range(5))
    refused(lambda m, o: training(m, o, lambda: [i for _, i in zip(range(1), iter_of(loader_list))]), "loader_list")


loader_list = iter(list(range(5)))


def iter_of(it):
    yield from it


def test_iterator_made_in_the_step_is_fine():
    case = Case(lambda m, o: lambda x: m(x).sum().detach() * next(iter(m.parameters())).dtype.itemsize)
    case.call()
    case.call()
    assert case.captures == 1


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.item(),
        float,
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        print,
        lambda t: f"{t}",
        lambda t: 1 if t > 3 else 2,
    ],
)
def test_tensor_values_read(read):
    def step_of(model, optimizer):
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            read(loss.detach())
            return loss.detach()

        return step

    refused(step_of)


def test_grad_mode_left_changed():
    try:
        refused(lambda m, o: training(m, o, lambda: torch.set_grad_enabled(False), before=False), "grad mode")
    finally:
        torch.set_grad_enabled(True)
