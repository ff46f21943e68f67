"""Temporary changes to PyTorch's Python surface while a step is recorded."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch

from nova.capture.sources import is_of_torch, is_user_code

_MISSING = object()
_DEPTH = 4  # of decorators that are looked through
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
    """`replaced`, where what is there, and what that calls, is PyTorch's own: what someone else has put there runs,
    and is recorded."""
    current = getattr(owner, name)
    own = _is_own(current) and not any(map(_is_foreign, _called(current)))
    return replaced(owner, name, value) if own else nullcontext()


def _is_own(value: Any) -> bool:
    """Whether a function is PyTorch's, through all decorators."""
    return not _is_foreign(value) and all(is_of_torch(layer.__code__.co_filename) for layer in _layers(value))


def _is_foreign(value: Any) -> bool:
    """Whether something that is called is a user's: a function, or an object such as a mock."""
    layers = [*_layers(value)]
    if layers:
        return any(is_user_code(layer.__code__, layer.__globals__) for layer in layers)
    callable_object = callable(value) and not isinstance(value, type)
    return callable_object and type(value).__module__.partition(".")[0] not in ("builtins", "torch", "typing")


def _layers(value: Any) -> Iterator[FunctionType]:
    """A function and those that it decorates."""
    for _ in range(_DEPTH):
        function = getattr(value, "__func__", value)
        if isinstance(function, FunctionType):
            yield function
        value = getattr(value, "__wrapped__", None)


def _called(function: Any) -> list[Any]:
    """What a function names of its module's globals."""
    named = [(name, layer.__globals__) for layer in _layers(function) for name in layer.__code__.co_names]
    return [original_of(table[name]) for name, table in named if name in table]


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
