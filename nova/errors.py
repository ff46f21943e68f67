"""The errors Nova raises, and the source line every one of them names.

A user meets a compiler through its errors, so each carries four things: the operation, the line of the
user's own file, what was expected, and what came.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass


@dataclass(frozen=True)
class SourceLine:
    """A line of the user's program, and the module that was running when it was reached."""

    file: str = "<unknown>"
    line: int = 0
    function: str = ""
    module: str = ""  # qualified module name inside the model, e.g. "h.3.attn"; "" outside any module

    def text(self) -> str:
        """The source text of the line, stripped; "" if the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        text = self.text()
        return f"{self.file}, line {self.line}" + (f": {text}" if text else "")


class NovaError(RuntimeError):
    """Base of every error that Nova raises itself."""

    def __init__(self, message: str, source: SourceLine | None = None):
        self.source = source
        super().__init__(f"{message}\n  at {source}" if source else message)


class CaptureError(NovaError):
    """The step does something that cannot be replayed: it reads a value, or changes Python state."""


class UnsupportedError(NovaError):
    """An operation or dtype that Nova cannot lower, where the user asked for an error instead of PyTorch."""


class CompileError(NovaError):
    """A bug in Nova: a pass produced IR that does not verify, or LLVM refused it."""


class DeviceError(NovaError):
    """A GPU, its driver or its memory refused what a compiled step needs. What is on disk is not to blame."""


class CacheError(NovaError):
    """The artifact cache could not be read or written; never fatal, shown as a warning."""
