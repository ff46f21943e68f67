"""Operations left to PyTorch, run inside the step on the step's own memory.

The step program calls `nova_callback(k)`; operands are tensors over arena, input or constant bytes, results are copied
to where the plan wants them. A result whose size depends on data, or that only PyTorch reads, stays a live tensor: it
never enters the arena, and everything that reads it is again a call to PyTorch.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nova.errors import CompileError
from nova.runtime.dtypes import contiguous_strides, itemsize, numel, torch_dtype
from nova.runtime.step_plan import AtenCall, BucketReady, StepPlan, TensorRef

# The step's casts are already in its graph: an autocast region around the call must not add its own.
_EXCLUDED = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


class StepMemory:
    """Tensors over the bytes of a step: the arena and the constants for good, inputs and outputs call by call."""

    def __init__(self, plan: StepPlan, constants: torch.Tensor, scalars: torch.Tensor | None):
        self._plan = plan
        self.arena: torch.Tensor | None = None
        self._constants = constants
        self._scalars = scalars
        self.inputs: Sequence[torch.Tensor] = ()
        self.outputs: Sequence[torch.Tensor] = ()
        self._views: dict[TensorRef, torch.Tensor] = {}

    def release(self) -> None:
        """Forgets the tensors of one call, so that none outlives it here."""
        self.inputs = self.outputs = ()

    def view(self, tensor: TensorRef) -> torch.Tensor:
        ref, plan = tensor.ref, self._plan
        assert ref is not None
        strides = contiguous_strides(tensor.shape)
        if ref.base < plan.arena:
            count = len(plan.inputs)
            owner = self.inputs[ref.base] if ref.base < count else self.outputs[ref.base - count]
            return owner.data.as_strided(tensor.shape, strides, owner.storage_offset())
        if tensor not in self._views:
            blocks = {plan.arena: self.arena, plan.constants: self._constants, plan.scalar_block: self._scalars}
            block = blocks[ref.base]
            assert block is not None
            nbytes = numel(tensor.shape) * itemsize(tensor.dtype)
            window = block[ref.offset : ref.offset + nbytes].view(torch_dtype(tensor.dtype))
            self._views[tensor] = window.view(tensor.shape)
        return self._views[tensor]

    def move_to(self, arena: torch.Tensor | None, scalars: torch.Tensor | None = None) -> None:
        """Another arena; on a GPU it holds the block of scalars too."""
        self.arena = arena
        if scalars is not None:
            self._scalars = scalars
        self._views.clear()


def resolve_op(target: str) -> torch._ops.OpOverload:
    """The overload that a name like aten.topk.default stands for."""
    parts = target.split(".")
    namespace, name = parts[0], parts[1]
    if namespace == "nova":
        importlib.import_module("nova.capture.keep")  # which defines them, also where no step was recorded
    overload = parts[2] if len(parts) > 2 else "default"
    try:
        op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except AttributeError:
        raise CompileError(f"this PyTorch has no operation {target}") from None
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise CompileError(f"{target} draws random numbers: it cannot be left to PyTorch inside a compiled step")
    return op


class _Operand:
    """Operand i; `convert` where the op's schema wants a number instead of a tensor."""

    def __init__(self, index: int, convert: Callable[[Any], Any] | None):
        self.index, self.convert = index, convert


def _decode(value: Any, kind: str) -> Any:
    """A template leaf to what the op takes; operands stay `_Operand`s."""
    if isinstance(value, list):
        return [_decode(item, kind.removeprefix("List[").removesuffix("]")) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    match tag:
        case "t":
            return _Operand(content, None if "Tensor" in kind else _converter(kind))
        case "dtype":
            return torch_dtype(content)
        case "device":
            return torch.device(content)
        case "layout" | "memory_format":
            return getattr(torch, content)
        case "float":
            return float(content)
        case "complex":
            return complex(*content)
        case "str":
            return content
    raise CompileError(f"unknown leaf {value!r} in the arguments of an operation left to PyTorch")


def _converter(kind: str) -> Callable[[Any], Any]:
    if "bool" in kind:
        return lambda tensor: bool(tensor.item())
    if "int" in kind.lower():
        return lambda tensor: int(tensor.item())
    return lambda tensor: tensor.item()


def _fill(value: Any, operands: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, _Operand):
        tensor = operands[value.index]
        return tensor if value.convert is None else value.convert(tensor)
    if isinstance(value, list):
        return [_fill(item, operands) for item in value]
    return value


class _PreparedCall:
    """One call site: the overload and its arguments, decoded once."""

    def __init__(self, call: AtenCall):
        self.call = call
        self.op = resolve_op(call.target)
        template = json.loads(call.template) if isinstance(call.template, str) else call.template
        arguments = self.op._schema.arguments
        kinds = {argument.name: str(argument.type) for argument in arguments}
        positional = [str(argument.type) for argument in arguments if not argument.kwarg_only]
        self.args = [_decode(v, k) for v, k in zip(template.get("args", []), positional, strict=False)]
        self.kwargs = {name: _decode(v, kinds[name]) for name, v in template.get("kwargs", {}).items()}

    def run(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        kwargs = {name: _fill(value, operands) for name, value in self.kwargs.items()}
        result = self.op(*_fill(self.args, operands), **kwargs)
        flat = [result] if isinstance(result, torch.Tensor) else [r for r in _flatten(result) if r is not None]
        if len(flat) != len(self.call.results):
            raise CompileError(f"{self.call.target} gave {len(flat)} results, not {len(self.call.results)}")
        return flat


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flatten(item)]
    return [value]


class Fallback:
    """Runs the callbacks of one executable. `error` holds the exception that stopped the step."""

    def __init__(self, plan: StepPlan, memory: StepMemory):
        self.memory = memory
        self.live: dict[int, torch.Tensor] = {}
        self.error: BaseException | None = None
        self.on_bucket: Callable[[int], None] | None = None
        self._items: dict[int, _PreparedCall | BucketReady] = {}
        for number, item in enumerate(plan.items):
            if isinstance(item, AtenCall):
                self._items[number] = _PreparedCall(item)
            elif isinstance(item, BucketReady):
                self._items[number] = item
        self._kept = {output.live for output in plan.outputs if output.live is not None}

    def __bool__(self) -> bool:
        return bool(self._items)

    def callback(self, number: int) -> int:
        """Entry from native code: 0, or 1 with the exception kept for the caller."""
        try:
            item = self._items[number]
            if isinstance(item, BucketReady):
                if self.on_bucket is not None:
                    self.on_bucket(item.bucket)
            else:
                with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(_EXCLUDED):
                    self._run(item)
        except BaseException as error:  # raised again once native code has returned
            self.error = error
            return 1
        return 0

    def _run(self, prepared: _PreparedCall) -> None:
        call = prepared.call
        operands = [self._operand(ref) for ref in call.operands]
        for ref, result in zip(call.results, prepared.run(operands), strict=True):
            if ref.live is not None:
                # A result that shares an operand's bytes would change when the arena is reused.
                shared = result.layout is torch.strided and any(
                    result.untyped_storage().data_ptr() == o.untyped_storage().data_ptr()
                    for o in operands
                    if o.layout is torch.strided
                )
                self.live[ref.live] = result.clone() if shared and result.numel() else result
                continue
            if tuple(result.shape) != ref.shape or result.dtype != torch_dtype(ref.dtype):
                raise CompileError(
                    f"{call.target} gave {result.dtype} {list(result.shape)}, "
                    f"the step was compiled for {ref.dtype} {list(ref.shape)}"
                )
            self.memory.view(ref).copy_(result)
        for number in call.release:
            if number not in self._kept:
                self.live.pop(number, None)

    def _operand(self, ref: TensorRef) -> torch.Tensor:
        return self.live[ref.live] if ref.live is not None else self.memory.view(ref)

    def take_error(self) -> BaseException | None:
        error, self.error = self.error, None
        return error
