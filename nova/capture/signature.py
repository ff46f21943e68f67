"""What a captured step is: a functional graph, the role of each input and output, and host effects.

Level 0 of the compiler. The graph is a `torch.fx.Graph` whose nodes are functional ATen (or `nova::`)
operations; nothing in it mutates. Everything that PyTorch would mutate in place appears as an output
bound to the input it replaces. Types here are plain data, so a capture can be written to disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["param", "buffer", "grad", "opt_state", "arg", "external", "scalar", "seed", "const"]


@dataclass(frozen=True)
class TensorType:
    """Shape, element type and device of one dense, contiguous, row-major tensor.

    `dtype` is a short name: f32 f64 bf16 f16 i64 i32 i16 i8 u8 bool c64 c128.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Source:
    """Where a tensor or number lives between steps: a path from the step's own roots.

    `root` is one of "arg" (index), "kwarg" (name), "closure" (name), "global" (name), "self", "function"
    (an absolute object reached through a code object), "const" (held by the capture itself).
    `path` is a tuple of steps, listed in `sources.py`: ("attr", name), ("item", key), ("param", name), ...
    """

    root: str
    key: str | int
    path: tuple[tuple[str, str | int], ...] = ()

    def __str__(self) -> str:
        text = f"{self.root}[{self.key!r}]" if self.root in ("arg", "kwarg") else str(self.key)
        for kind, key in self.path:
            match kind:
                case "item" | "value" | "default":
                    text += f"[{key!r}]"
                case "state":
                    group, index = str(key).split(".")
                    text += f".state[param_groups[{group}]['params'][{index}]]"
                case "module" if str(key).isdigit():
                    text += f"[{key}]"
                case "call":
                    text += f".{key}()"
                case "class" | "length" | "iterator" | "inside":
                    continue
                case _:
                    text += f".{key}"
        return text


@dataclass(frozen=True)
class InputSpec:
    """One lifted input of the graph, in placeholder order.

    Scalars are 0-d f64; the seed is 0-d i64. A tensor that is not contiguous, or that shares its storage
    with another lifted tensor, is lifted as the 1-d flat span of its storage (`flat=True`), and the
    graph recovers it with `aten.as_strided`. The span starts `span_offset` elements after the first element
    of the tensor that `source` names (negative when an alias starts earlier).
    `phase` is the number of host effects that are replayed before a scalar is read.
    """

    name: str
    role: Role
    type: TensorType
    source: Source
    flat: bool = False
    span_offset: int = 0
    phase: int = 0


@dataclass(frozen=True)
class OutputSpec:
    """One output of the graph. `state` replaces the contents of input `input`; `user` and `grad` are fresh."""

    kind: Literal["user", "state", "grad"]
    type: TensorType
    input: int | None = None
    strides: tuple[int, ...] | None = None  # strides eager gives this output; None = contiguous
    counted: bool = False  # of state: eager counts the write in the tensor's version


@dataclass
class Signature:
    """The whole calling convention of a captured step."""

    inputs: list[InputSpec] = field(default_factory=list)
    outputs: list[OutputSpec] = field(default_factory=list)
    out_spec: Any = None  # JSON-able tree with {"output": i} leaves; see replay.py
    effects: list[Any] = field(default_factory=list)  # host effects to replay, in order; see replay.py
    uses_rng: bool = False


@dataclass
class CapturedStep:
    """Level 0: graph + signature + guards + what ran through PyTorch."""

    graph: Any  # torch.fx.Graph
    signature: Signature
    guards: Any = None  # guards.GuardSet
    name: str = "step"
    tf32: bool = False  # PyTorch allowed TF32 in float32 matmuls when the step was captured
