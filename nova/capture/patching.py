"""Temporary changes to PyTorch's Python surface while a step is recorded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MISSING = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside the block. What a class inherits stays inherited afterwards."""
    own = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextmanager
def no_modes() -> Iterator[None]:
    """Code that must run, but not be recorded."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield
