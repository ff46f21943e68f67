"""What a tensor must look like for a capture to be right: metadata, `.grad` and the hooks on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nova.capture.environment import token
from nova.capture.native import GRAD_ANY, GRAD_NONE
from nova.capture.sources import tensor_hooks
from nova.capture.views import is_leaf, strides


def gradient_hooks(tensor: torch.Tensor) -> tuple[str, ...]:
    """The identities of what `register_hook` and `register_post_accumulate_grad_hook` put on a leaf."""
    return tuple(map(token, tensor_hooks(tensor)))


def hooks_check(
    tensors: Sequence[torch.Tensor], expected: list[tuple[int, tuple[str, ...]]], windows: list[int]
) -> Callable[[], bool]:
    """A function that says whether one of the tensors at these positions has other hooks than those.

    Or a history, where it is a window: it gets that of its base only when somebody asks for it.
    """

    def hooked() -> bool:
        for position in windows:
            if tensors[position].requires_grad:
                return True
        for position, want in expected:
            tensor: Any = tensors[position]
            has = tensor._backward_hooks or tensor._post_accumulate_grad_hooks
            if (has or want) and gradient_hooks(tensor) != want:
                return True
        return False

    return hooked


@dataclass(frozen=True)
class TensorMeta:
    """What a tensor must look like. `grad`: whether `.grad` must be None, must be set, or does not matter."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    requires_grad: bool
    grad: int = GRAD_ANY
    hooks: tuple[str, ...] = ()  # identities of the hooks on its gradient: another process's never match
    leaf: bool = True  # or computed outside the step, which may hold it and not differentiate through it

    @staticmethod
    def of(tensor: torch.Tensor, grad: int = GRAD_ANY) -> TensorMeta:
        return TensorMeta(
            str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), strides(tensor), str(tensor.device),
            tensor.requires_grad, grad, gradient_hooks(tensor), is_leaf(tensor),
        )  # fmt: skip

    def difference(self, tensor: torch.Tensor) -> str | None:
        """What differs, in words; None if nothing does."""
        other = TensorMeta.of(tensor, self.grad)
        if other != self:
            if len(self.shape) == len(other.shape):
                for axis, (a, b) in enumerate(zip(self.shape, other.shape, strict=True)):
                    if a != b:
                        return f"dimension {axis} was {a}, is now {b}"
            for what in ("dtype", "shape", "stride", "device", "requires_grad"):
                a, b = getattr(self, what), getattr(other, what)
                if a != b:
                    return f"{what} was {a}, is now {b}"
            if self.hooks != other.hooks:
                return f"had {len(self.hooks)} gradient hooks, now {len(other.hooks)} or others"
            if self.leaf != other.leaf:
                return "was a leaf, is now computed outside the step" if self.leaf else "was computed, is now a leaf"
        if self.grad != GRAD_ANY and is_leaf(tensor) and (tensor.grad is None) != (self.grad == GRAD_NONE):
            return ".grad was None, is now set" if self.grad == GRAD_NONE else ".grad was set, is now None"
        return None
