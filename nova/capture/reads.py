"""Which attributes of an object the user's code may have read, and which it looked for in vain.

    class Block(nn.Module):                block.scale     not the instance's own: setting it later hides the class's
        scale = 2.0
        def forward(self, x):
            if hasattr(self, "gate"): ...  block.gate      does not exist: it may come to

The bytecode of the code that ran names attributes; names that are computed (`getattr(cfg, f"w{i}")`) were noted when
they were asked for.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from nova.capture import bytecode
from nova.capture.sources import declared_state, is_user_class, slot_names

MISSING = object()
_WHOLE_READS = frozenset({"vars", "asdict", "astuple", "__dict__", "locals"})  # read every attribute of something
_NOT_READS = frozenset({
    "__init__", "__new__", "__repr__", "__str__", "__eq__", "__hash__", "__del__", "__reduce__", "__reduce_ex__",
    "__setattr__", "__delattr__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__", "__init_subclass__",
})  # fmt: skip


class Reads:
    """What code that ran may have read by name."""

    def __init__(self, codes: Iterable[types.CodeType], asked: Iterable[tuple[type, str]] = ()):
        found = [bytecode.names(code) for code in codes]
        self.constants = frozenset(c for code in codes for c in code.co_consts if isinstance(c, str))
        self.asked = frozenset(name for _, name in asked)
        self.asked_of_tensors = frozenset(name for cls, name in asked if issubclass(cls, torch.Tensor))
        self.attributes = frozenset().union(*(names.attributes for names in found)) | self.asked
        # `setattr(config, "width", ...)` names its attribute in a constant.
        self.attributes |= {text for text in self.constants if text.isidentifier()}
        self.whole = bool(self.attributes & _WHOLE_READS) or any(
            chain[0] in _WHOLE_READS for names in found for chain in names.globals
        )

    @property
    def optimizer_state(self) -> bool:
        """Whether the code may have looked at which state an optimizer has: `if not opt.state: ...`."""
        return not self.attributes.isdisjoint(("state", "state_dict"))

    def of(self, obj: Any) -> Callable[[str], bool]:
        """Whether an attribute of an object may have been read."""
        table = getattr(obj, "__dict__", {})
        own = declared_state(obj)
        if own is not None:
            return frozenset(own).__contains__
        if isinstance(obj, torch.optim.lr_scheduler.LRScheduler):
            read = set(self.attributes) - {"optimizer", "_step_count"}
            return (read | {"_last_lr"} if "get_last_lr" in read else read).__contains__
        if isinstance(obj, torch.amp.GradScaler):  # its tensors are inputs, and its bookkeeping starts anew each step
            return {"_enabled", "_growth_factor", "_backoff_factor", "_growth_interval"}.__contains__
        if (self.whole and len(table) <= 64) or hasattr(type(obj), "__dataclass_fields__"):
            return lambda name: True
        if is_user_class(type(obj)):
            return self.attributes.__contains__
        return (self.attributes | self._of_library(type(obj))).__contains__

    def _of_library(self, cls: type) -> frozenset[str]:
        """What the methods that the user calls, by name or by an operator, read of a library's object."""
        read: set[str] = set()
        for base in cls.__mro__[:-1]:
            for name, method in vars(base).items():
                special = name.startswith("__") and name.endswith("__") and name not in _NOT_READS
                if isinstance(method, types.FunctionType) and (special or name in self.attributes):
                    read |= bytecode.names(method.__code__).attributes
        return frozenset(read)

    def absent(self, obj: Any) -> Iterator[str]:
        """Names that were read or asked for, and that an object's own attributes do not hold."""
        table = getattr(obj, "__dict__", None)
        if (
            table is None
            or declared_state(obj) is not None
            or isinstance(obj, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler))
        ):
            return
        names = set(self.asked)
        for cls in type(obj).__mro__[:-1]:
            if is_user_class(cls):
                names |= self.attributes & vars(cls).keys()
        taken = {*table, *slot_names(type(obj))}
        for name in sorted(names):
            if name not in taken and not hasattr(getattr(type(obj), name, None), "__set__"):
                yield name

    def absent_in_class(self, cls: type) -> Iterator[str]:
        """Names that a class inherits, or that nobody has: it may come to have them itself."""
        inherited = {name for base in cls.__mro__[1:-1] if is_user_class(base) for name in vars(base)}
        yield from sorted((self.asked | (self.attributes & inherited)) - vars(cls).keys())


def attribute_items(obj: Any, wanted: Callable[[str], bool]) -> list[tuple[str, Any]]:
    """(name, value) of an object's own attributes; unset slots as missing."""
    found = [(name, value) for name, value in getattr(obj, "__dict__", {}).items() if wanted(name)]
    found += [(name, getattr(obj, name, MISSING)) for name in slot_names(type(obj)) if wanted(name)]
    return found
