"""Temporary changes to PyTorch's Python surface while a step is recorded."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch

from nova.capture.sources import is_of_torch

_MISSING = object()
_replaced: dict[tuple[int, str], Any] = {}


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside the block. What a class inherits stays inherited afterwards.

    A function is replaced for this thread alone: what others run meanwhile is no part of the step.
    """
    own = vars(owner).get(name, _MISSING)
    if callable(value):
        _replaced[id(owner), name] = owner
    setattr(owner, name, _here(value, getattr(owner, name)) if callable(value) else value)
    try:
        yield
    finally:
        if own is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def stand_in(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    """`replaced`, where what is there is PyTorch's own: what someone else has put there runs, and is recorded."""
    return replaced(owner, name, value) if _is_own(getattr(owner, name)) else nullcontext()


def _is_own(function: Any) -> bool:
    while function is not None:
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None and not is_of_torch(code.co_filename):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _here(value: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    this, current = threading.get_ident(), threading.get_ident

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (value if current() == this else original)(*args, **kwargs)

    run._nova_original = original  # type: ignore[attr-defined]
    return run


def original_of(value: Any) -> Any:
    """What stands for good where a recording, perhaps of another thread, has put something for the time being."""
    return getattr(value, "_nova_original", value) if isinstance(value, FunctionType) else value


def replaced_so_far() -> list[tuple[Any, str]]:
    """The functions of PyTorch's that recordings replace, by owner and name."""
    return [(owner, name) for (_, name), owner in _replaced.items()]


@contextmanager
def no_modes() -> Iterator[None]:
    """Code that must run, but not be recorded."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield
