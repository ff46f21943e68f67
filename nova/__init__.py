"""Nova: compiles a whole PyTorch training step into one executable.

    import nova

    @nova.jit
    def train_step(x, y):
        loss = model(x, y)
        loss.backward()
        optimizer.step(); optimizer.zero_grad()
        return loss

Everything is imported when it is first used, so that `import nova` costs nothing.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nova.config import Options
    from nova.errors import CacheError, CaptureError, CompileError, DeviceError, NovaError, UnsupportedError
    from nova.inspect import capture, explain
    from nova.jit import disable, jit, synchronize
    from nova.verify import verify

_HOME = {
    "jit": "nova.jit", "disable": "nova.jit", "synchronize": "nova.jit",
    "capture": "nova.inspect", "explain": "nova.inspect", "verify": "nova.verify",
    "Options": "nova.config", "NovaError": "nova.errors", "CaptureError": "nova.errors",
    "UnsupportedError": "nova.errors", "CompileError": "nova.errors", "CacheError": "nova.errors",
    "DeviceError": "nova.errors",
}  # fmt: skip

__all__ = [
    "CacheError", "CaptureError", "CompileError", "DeviceError", "NovaError", "Options", "UnsupportedError",
    "__version__", "capture", "disable", "explain", "jit", "synchronize", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'nova' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """`nova.jit`, `nova.verify` and `nova.capture` are functions, though modules of these names exist.

    Importing a submodule sets it as an attribute of the package; for these names the function stays the attribute.
    Inside Nova, write `from nova.capture import guards`, which does not look at the attribute.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
