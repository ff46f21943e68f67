"""Which line of the user's program an operation comes from.

Forward operations: the innermost frame outside PyTorch, Nova and the standard library. Backward operations run
inside `loss.backward()`, so they take the line of the forward operation whose autograd node is being evaluated
(autograd numbers its nodes in the order the forward made them); custom backward functions and hooks are the
user's own code and keep their own line.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import torch

from nova.capture.sources import is_user_file
from nova.errors import SourceLine

_PASSED_THROUGH = ("/overrides.py", "/_python_dispatch.py", "/_tensor.py", "/_contextlib.py", "/_ops.py")
_current_node = torch._C._current_autograd_node
_sequence = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class Lines:
    """Source lines of the running step, and the stack of modules being called."""

    def __init__(self) -> None:
        self._user: dict[CodeType, bool] = {}
        self._lines: dict[tuple[CodeType, int, str], SourceLine] = {}
        self._forward: dict[int, SourceLine] = {}
        self._names: dict[int, dict[int, str]] = {}  # root module -> module -> qualified name
        self.modules: list[str] = []
        self.called: dict[int, torch.nn.Module] = {}
        self._roots: list[torch.nn.Module] = []

    def enter(self, module: torch.nn.Module) -> None:
        self.called.setdefault(id(module), module)
        if not self._roots:
            self._roots.append(module)
        else:
            self._roots.append(self._roots[0])
        root = self._roots[0]
        names = self._names.get(id(root))
        if names is None:
            names = self._names[id(root)] = {id(m): name for name, m in root.named_modules()}
        self.modules.append(names.get(id(module), type(module).__name__))

    def leave(self) -> None:
        self._roots.pop()
        self.modules.pop()

    def _is_user(self, code: CodeType) -> bool:
        known = self._user.get(code)
        if known is None:
            known = self._user[code] = is_user_file(code.co_filename)
        return known

    def user_calls(self, depth: int) -> bool:
        """Whether the frame `depth` above the caller's is the user's own code."""
        return self._is_user(sys._getframe(depth + 1).f_code)

    def here(self) -> SourceLine:
        """The user's line that is running now."""
        frame: FrameType | None = sys._getframe(1)
        user = self._user
        while frame is not None:
            code = frame.f_code
            if user[code] if code in user else self._is_user(code):
                module = self.modules[-1] if self.modules else ""
                key = (code, frame.f_lineno, module)
                line = self._lines.get(key)
                if line is None:
                    line = self._lines[key] = SourceLine(code.co_filename, frame.f_lineno, code.co_name, module)
                return line
            frame = frame.f_back
        return SourceLine()

    def library_function(self) -> str:
        """Which function of a library the user's line is in, "f of torch/optim/x.py"; "" if it is in none."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not self._is_user(frame.f_code):
            file = frame.f_code.co_filename.replace("\\", "/")
            if "/torch/" in file and not file.endswith(_PASSED_THROUGH):
                return f"{frame.f_code.co_name} of torch/{file.rpartition('/torch/')[2]}"
            frame = frame.f_back
        return ""

    def in_formula(self) -> bool:
        """Whether one of PyTorch's own derivative formulas is running."""
        node: Any = _current_node()
        return node is not None and not hasattr(node, "_forward_cls")

    def formula(self) -> str:
        """Name of the derivative that is running."""
        node: Any = _current_node()
        return node.name() if node is not None else ""

    def mean_dims(self) -> tuple[int, ...] | None:
        """Dimensions of the mean whose derivative is running (none listed: all); None in any other derivative."""
        node: Any = _current_node()
        if node is None or not node.name().startswith("MeanBackward"):
            return None
        bits = 1 << 64  # a negative dimension comes back as an unsigned number
        return tuple(d - bits if d > bits // 2 else d for d in getattr(node, "_saved_dim", None) or ())

    def current(self) -> SourceLine:
        """The line to attribute the next operation to."""
        node: Any = _current_node()
        if node is None:
            line = self.here()
            self._forward.setdefault(_sequence() - 1, line)
            return line
        found = self._forward.get(node._sequence_nr())
        if found is None or hasattr(node, "_forward_cls"):  # a custom function's backward is user code
            line = self.here()
            # the backward of an nn.Module's own custom function has no line of the user's below `backward()`
            return found if found is not None and line.function != "backward" else line
        return found
