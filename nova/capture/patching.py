"""Temporary changes to PyTorch's Python surface while a step is recorded."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_MISSING = object()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside the block. What a class inherits stays inherited afterwards.

    A function is replaced for this thread alone: what others run meanwhile is no part of the step.
    """
    own = vars(owner).get(name, _MISSING)
    setattr(owner, name, _here(value, getattr(owner, name)) if callable(value) else value)
    try:
        yield
    finally:
        if own is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _here(value: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    this, current = threading.get_ident(), threading.get_ident

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (value if current() == this else original)(*args, **kwargs)

    return run


@contextmanager
def no_modes() -> Iterator[None]:
    """Code that must run, but not be recorded."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield
