"""Containers with thousands of entries, and keys and elements that are objects: what changes in them must be seen."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
from replay_case import interpreted

import nova
from nova.capture import guard_builder, sources

COUNT = 2500  # more than a container of numbers has slots for


class Item:
    def __init__(self, value):
        self.value, self.inner = float(value), [float(value)]

    def factor(self):
        return 2.0


class OtherItem(Item):
    def factor(self):
        return 3.0


class Many(list):
    """A list of the user's, which may come to have attributes."""


def _set(position, value):
    return lambda c, s: c.__setitem__(position, value() if callable(value) else value)


def _items(n=COUNT):
    return [Item(i) for i in range(n)]


def _rekeyed(c, s):
    entries = list(c.values())
    c.clear()
    c.update((Item(0), value) for value in entries)


CASES = {  # the container (and an object that the step holds), what the step computes, what changes
    "attribute of an object": (_items, lambda x, c, s: x * c[7].value, lambda c, s: setattr(c[7], "value", 5.0)),
    "another object": (_items, lambda x, c, s: x * c[7].value, _set(7, lambda: Item(9))),
    "within an object": (_items, lambda x, c, s: x * c[7].inner[0], lambda c, s: c[7].inner.__setitem__(0, 5.0)),
    "class of an object": (_items, lambda x, c, s: x * c[7].factor(), lambda c, s: setattr(c[7], "__class__", OtherItem)),
    "attribute of a list": (lambda: Many(_items()), lambda x, c, s: x * getattr(c, "scale", 2.0),
                            lambda c, s: setattr(c, "scale", 3.0)),
    "number among objects": (lambda: [*_items(), 1.0], lambda x, c, s: x * c[-1], _set(-1, 3.0)),
    "in a deque": (lambda: collections.deque(_items()), lambda x, c, s: x * c[7].value, _set(7, lambda: Item(9))),
    "in a tuple": (lambda: tuple(_items()), lambda x, c, s: x * c[7].value, lambda c, s: setattr(c[7], "value", 5.0)),
    "lists": (lambda: [[float(i)] for i in range(COUNT)], lambda x, c, s: x * c[7][0], _set(7, lambda: [5.0])),
    "within lists": (lambda: [[float(i)] for i in range(COUNT)], lambda x, c, s: x * c[7][0],
                     lambda c, s: c[7].__setitem__(0, 5.0)),
    "dictionaries": (lambda: {f"k{i}": {"a": float(i)} for i in range(COUNT)}, lambda x, c, s: x * c["k7"]["a"],
                     lambda c, s: c["k7"].update(a=5.0)),
    "entry of a dictionary": (lambda: {i: Item(i) for i in range(COUNT)}, lambda x, c, s: x * c[7].value,
                              lambda c, s: c.__setitem__(7, Item(9))),
    "tensor": (lambda: [torch.full((4,), float(i)) for i in range(COUNT)], lambda x, c, s: x * c[7],
               _set(7, lambda: torch.ones(4))),
    "shape of a tensor": (lambda: [torch.ones(4) for i in range(COUNT)], lambda x, c, s: x * len(c[7]),
                          _set(7, lambda: torch.ones(3))),
    "arrays": (lambda: [np.full(2, float(i)) for i in range(COUNT)], lambda x, c, s: x * float(c[7][0]),
               _set(7, lambda: np.ones(2))),
    "functions": (lambda: [lambda x, i=i: x * i for i in range(COUNT)], lambda x, c, s: c[7](x),
                  _set(7, lambda: lambda x: x * 50)),
    "set": (lambda: set(range(COUNT)), lambda x, c, s: x * (2.0 if 7 in c else 3.0),
            lambda c, s: (c.discard(7), c.add(-1))),
    "equal number in a set": (lambda: {1, 2}, lambda x, c, s: x * (2.0 if any(i is True for i in c) else 3.0),
                              lambda c, s: (c.discard(1), c.add(True))),
    "set of objects": (lambda: set(_items(5)), lambda x, c, s: x * (2.0 if s[0] in c else 3.0),
                       lambda c, s: (c.pop(), c.add(s[0]))),
    "set of many objects": (lambda: set(_items()), lambda x, c, s: x * (2.0 if s[0] in c else 3.0),
                            lambda c, s: (c.pop(), c.add(s[0]))),
    "within a set of many": (lambda: set(_items()), lambda x, c, s: x * min(item.value for item in c),
                             lambda c, s: setattr(s[1], "value", -1.0)),
    "number in a set of objects": (lambda: {0.5, *_items(5)}, lambda x, c, s: x * (2.0 if 0.5 in c else 3.0),
                                   lambda c, s: (c.discard(0.5), c.add(1.5))),
    "values of objects": (lambda: dict.fromkeys(_items(), 2.0), lambda x, c, s: x * list(c.values())[7],
                          lambda c, s: c.__setitem__(list(c)[7], 3.0)),
    "keys of many": (lambda: dict.fromkeys(_items(), 2.0), lambda x, c, s: x * c.get(s[1], 5.0), _rekeyed),
    "another key": (lambda: dict.fromkeys(_items(5), 2.0), lambda x, c, s: x * c.get(s[0], 5.0),
                    lambda c, s: s.__setitem__(0, list(c)[3])),
    "keys of few": (lambda: dict.fromkeys(_items(5), 2.0), lambda x, c, s: x * c.get(s[1], 5.0), _rekeyed),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_changes_is_seen(name):
    make, function, change = CASES[name]
    results = []
    for transform in (lambda f: f, interpreted):
        container = make()
        held = [Item(0), next(iter(container))]
        step = transform(lambda x, c=container, s=held: function(x, c, s))
        x = torch.arange(4.0)
        found = [step(x), step(x)]
        change(container, held)
        results.append(torch.stack([*found, step(x), step(x)]))
    torch.testing.assert_close(results[1], results[0])
    assert not torch.equal(results[0][0], results[0][2])
    assert step.captures == (1 if name == "tensor" else 2)


def test_more_entries_than_are_looked_into(monkeypatch, capsys):
    """Each is the same object still; what is beneath them is not seen, and that is said."""
    monkeypatch.setattr(guard_builder, "NODE_LIMIT", 2000)
    monkeypatch.setattr(sources.ObjectMap.__init__, "__defaults__", (2000,))
    items = _items()
    step = interpreted(lambda x: x * items[7].value)
    for expected in (7.0, 7.0):
        assert float(step(torch.ones(()))) == expected
    items[7] = Item(9)
    assert [float(step(torch.ones(()))) for _ in range(2)] == [9.0, 9.0]
    assert "changes beyond them are not seen" in capsys.readouterr().err


LARGE_MEMORY = {
    "array": (np.ones(1 << 18), 5),
    "array with gaps": (np.ones((512, 1024))[:, ::2], (3, 4)),
    "bytes": (bytearray(b"\1" * (2 << 20)), 9),
    "array of many": ([np.ones(3) for _ in range(2500)], 7),
}


@pytest.mark.parametrize("name", LARGE_MEMORY)
def test_what_changes_in_large_memory_is_seen(name):
    """More than is digested on every call: compared with a copy."""
    memory, at = LARGE_MEMORY[name]
    read = (lambda: float(memory[at][1])) if isinstance(memory, list) else (lambda: float(memory[at]))
    step = nova.jit(lambda x: x * read())
    x = torch.ones(3)
    assert [float(step(x)[0]) for _ in range(2)] == [1.0, 1.0] and step.captures == 1
    if isinstance(memory, list):
        memory[at][1] = 3
    else:
        memory[at] = 3
    assert [float(step(x)[0]) for _ in range(2)] == [3.0, 3.0] and step.captures == 2


def test_none_is_not_what_has_died(monkeypatch):
    """A container holds its entries weakly: what was collected in the meantime is not the None that stands there now."""
    from nova.capture.contents import Entries

    class Thing:
        pass

    kept, gone = Thing(), Thing()
    entries = Entries([kept, gone, None])
    assert entries.are([kept, gone, None])
    del gone
    assert not entries.are([kept, None, None])
