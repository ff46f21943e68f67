"""What a step reads of modules that are not the user's: functions that someone may have replaced.

    F.relu(x)            chain ("F", "relu")      torch.nn.functional: relu
    len(items)           no such global           builtins: len
    vars(config)[name]                            config: "" (every name of it; only for modules of the user's)

What PyTorch's own code on the way reads is in `library_calls.py`; the rest of a library is taken to be as it was.
"""

from __future__ import annotations

import builtins
import types
from collections.abc import Iterable
from typing import Any

from nova.capture import bytecode
from nova.capture.sources import ObjectMap, closure_items, is_plain, kind_of

_STEADY = frozenset({"plain", "builtin", "function", "class", "pymodule"})


def is_steady(value: Any) -> bool:
    """Whether a value of a library's is something that a guard can name, and that changes by being replaced."""
    return kind_of(value) in _STEADY or (type(value) in (list, tuple) and all(map(is_plain, value)))


def library_names(
    codes: Iterable[types.CodeType],
    tables: dict[types.CodeType, dict[str, Any]],
    objects: ObjectMap,
    listed: Iterable[int],
) -> dict[int, set[str]]:
    """Names by module (its id) that the code reads. `listed`: modules on which it called `vars`."""
    found: dict[int, set[str]] = {module: {""} for module in listed}
    for code in codes:
        functions = [reached.obj for reached in objects.functions.get(code, ())]
        scopes = [(function.__globals__, dict(closure_items(function))) for function in functions]
        if code in tables:
            scopes.append((tables[code], {}))
        chains = bytecode.names(code)
        for globals_, cells in scopes:
            for chain in chains.globals:
                if chain[0] in globals_:
                    _follow(globals_[chain[0]], chain[1:], found)
                elif hasattr(builtins, chain[0]):
                    found.setdefault(id(builtins), set()).add(chain[0])
            for chain in chains.cells:
                _follow(cells.get(chain[0]), chain[1:], found)
    return found


def _follow(value: Any, names: tuple[str, ...], found: dict[int, set[str]]) -> None:
    for name in names:
        if not isinstance(value, types.ModuleType):
            return
        found.setdefault(id(value), set()).add("" if name == "__dict__" else name)
        value = value.__dict__.get(name)
