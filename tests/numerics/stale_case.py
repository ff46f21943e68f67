"""A step and a change of Python state between two calls, run eagerly and compiled: shared by the stale state tests."""

from __future__ import annotations

import torch
from replay_case import interpreted

X = torch.arange(1.0, 5.0)


class Thing:
    """An object with attributes."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Cases(dict):
    """Makers of (step, change) by name."""

    def add(self, make):
        self[make.__name__] = make
        return make


def name_of(*parts):
    """A name that no constant of the step holds."""
    return "".join(parts)


def setting(obj, name, value):
    return lambda: setattr(obj, name, value)


def a_change_is_seen(make):
    """One capture until the change, and eager's results before and after it."""
    results = []
    for transform in (lambda f: f, interpreted):
        function, change = make()
        step = transform(function)
        try:
            found = [step(X).detach().clone() for _ in range(3)]
            captures = getattr(step, "captures", 1)
            change()
            found += [step(X).detach().clone() for _ in range(2)]
        finally:
            getattr(change, "undo", lambda: None)()
        results.append(torch.stack(found))
    torch.testing.assert_close(results[1], results[0])
    assert captures == 1
    assert not torch.equal(results[0][2] - results[0][1], results[0][3] - results[0][2])
