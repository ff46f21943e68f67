"""`.grad` of the step's leaves: what it was, whether that mattered, and what a replay must leave there.

opt.zero_grad(); loss.backward()    p.grad is overwritten before it is read: no guard; a fresh tensor afterwards
loss.backward()  (accumulating)     the gradient is read: guarded to be None, or lifted and updated in place
loss.backward(); p.grad = None      None afterwards; the gradient itself never leaves the graph
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nova.capture.views import is_leaf


@dataclass(slots=True)
class Leaf:
    tensor: Tensor
    initial: Tensor | None
    overwritten: bool = False  # Python assigned `.grad` before anything read it
    read: bool = False  # Python read `.grad` before anything assigned it


class Leaves:
    """Every leaf tensor whose `.grad` the step can have touched."""

    def __init__(self) -> None:
        self.leaves: dict[int, Leaf] = {}
        self.by_grad: dict[int, Leaf] = {}

    def note(self, t: Tensor) -> Leaf:
        leaf = self.leaves.get(id(t))
        if leaf is None:
            with torch._C.DisableTorchFunction():
                initial = t.grad if is_leaf(t) else None
            leaf = self.leaves[id(t)] = Leaf(t, initial)
            if initial is not None:
                self.by_grad[id(initial)] = leaf
        return leaf

    def assigned(self, t: Tensor) -> None:
        leaf = self.note(t)
        if not leaf.read:
            leaf.overwritten = True

    def was_read(self, t: Tensor) -> None:
        leaf = self.note(t)
        if not leaf.overwritten:
            leaf.read = True

    def final(self, leaf: Leaf) -> Tensor | None:
        with torch._C.DisableTorchFunction():
            try:
                return leaf.tensor.grad if leaf.tensor.is_leaf else None
            except RuntimeError:  # a temporary window (the backward makes some) whose base has changed since
                return leaf.initial

    def restore(self) -> None:
        with torch._C.DisableTorchFunction():
            for leaf in self.leaves.values():
                if self.final(leaf) is not leaf.initial:
                    leaf.tensor.grad = leaf.initial
