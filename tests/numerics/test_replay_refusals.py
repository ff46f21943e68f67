"""Python that a replay would not run: what a captured step refuses, and in which words."""

from __future__ import annotations

import contextlib
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
