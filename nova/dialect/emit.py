"""Level 0 to level 1: one functional ATen graph becomes one `nova` function.

    %mm: f32[4,8] = aten.addmm(%b, %x, aten.t(%w))        %0 = nova.linear %x, %w, %b
    %g: f32[4,8]  = aten.gelu(%mm)                   =>   %1 = nova.gelu %0 {approximate = "none"}

Each ATen overload has one function in a registry (`emit_*.py`, by group), which receives the node's arguments with
graph nodes replaced by `Value`s. Dtype promotion is made explicit by `nova.cast`; the result dtypes are those that
capture recorded. A low-precision op rounds once, at its result: functions that need several steps compute in f32 and
cast at the end. An overload with no function, or one whose function raises `NoLowering`, becomes `nova.aten_call`.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from nova.dialect import ops  # noqa: F401  (declares the ops)
from nova.dialect.build import Builder, Value, attribute, is_number, scalar_category
from nova.dialect.types import COMPLEX, FLOATS, INTEGERS, LOW_PRECISION, Shape, tensor_type
from nova.errors import CompileError, NovaError, UnsupportedError
from nova.mlir import context, func, ir

SHORT_NAMES: dict[torch.dtype, str] = {
    torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "bool", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
TORCH_DTYPES = {short: dtype for dtype, short in SHORT_NAMES.items()}


class NoLowering(Exception):
    """These arguments of an ATen op have no nova form: the op is left to PyTorch."""


EMITTERS: dict[str, Callable[..., Any]] = {}


def emits(*names: str) -> Callable[[Callable], Callable]:
    """Registers the function that emits the overloads "add.Tensor" (aten is implied) or "nova::sce.default"."""

    def register(function: Callable) -> Callable:
        for name in names:
            full = name if "::" in name else f"aten::{name}"
            if full in EMITTERS:
                raise ValueError(f"{full} has two emitters")
            EMITTERS[full] = function
        return function

    return register


@functools.cache
def overload_name(target: Any) -> str:
    """The registry key of an OpOverload: "aten::add.Tensor"."""
    schema = target._schema
    return f"{schema.name}.{schema.overload_name or 'default'}"


@functools.cache
def _promote(a: str, b: str) -> str:
    return SHORT_NAMES[torch.promote_types(TORCH_DTYPES[a], TORCH_DTYPES[b])]


def _category(dtype: str) -> int:
    return 3 if dtype in COMPLEX else 2 if dtype in FLOATS else 1 if dtype in INTEGERS else 0


class Emitter:
    """The state of one emission: the builder, the value of every node so far, and the node at hand."""

    def __init__(self) -> None:
        self.b = Builder()
        self.values: dict[fx.Node, Any] = {}
        self.scalars: set[int] = set()  # ids of Values that came from Python numbers (they promote like numbers)
        self.dynamic: set[fx.Node] = set()  # nodes whose sizes are only known at run time
        self.node: fx.Node
        self._locations: dict[Any, ir.Location] = {}

    # -- the result ---------------------------------------------------------------------------------------------

    @property
    def outs(self) -> tuple[Any, ...]:
        """Recorded types of the node's results (None where there is none)."""
        recorded = self.node.meta["type"]
        return tuple(recorded) if isinstance(recorded, (tuple, list)) else (recorded,)

    @property
    def schema_name(self) -> str:
        """Name of the node's operator without its overload, as in "aten::amax"."""
        target: Any = self.node.target
        return target._schema.name

    @property
    def shape(self) -> Shape:
        """Recorded shape of the only result."""
        return tuple(self.node.meta["type"].shape)

    @property
    def dtype(self) -> str:
        """Recorded dtype of the only result."""
        return self.node.meta["type"].dtype

    def finish(self, value: Value, position: int | None = None) -> Value:
        """`value` cast to the recorded dtype and reshaped to the recorded shape of the result."""
        type_ = self.node.meta["type"] if position is None else self.outs[position]
        return self.b.reshape(self.b.cast(value, type_.dtype), tuple(type_.shape))

    # -- operands -----------------------------------------------------------------------------------------------

    def value(self, x: Any, dtype: str) -> Value:
        """x, a value or number, as a value of `dtype`."""
        return self.b.constant(x, dtype) if is_number(x) else self.b.cast(x, dtype)

    def promoted(self, *operands: Any) -> str:
        """The dtype that PyTorch's promotion gives: tensors with dims over 0-d tensors over numbers."""
        ranks: list[str | None] = [None, None, None]
        for x in operands:
            if is_number(x):
                level, dtype = 2, scalar_category(x)
            elif id(x) in self.scalars:
                level, dtype = 2, "f32"
            else:
                level, dtype = (0 if x.shape else 1), x.dtype
            known = ranks[level]
            ranks[level] = dtype if known is None else _promote(known, dtype)
        result: str | None = None
        for found in ranks:
            if found is not None and (result is None or _category(found) > _category(result)):
                result = found if result is None else _promote(result, found)
        assert result is not None
        return result

    def compute_dtype(self, *operands: Any) -> str:
        """The dtype to compute an arithmetic result in: the result's, or f32 where numbers meet low precision.

        PyTorch keeps a number's full precision while it computes on bf16 (its op-math type), then rounds once.
        """
        dtype = self.dtype
        if dtype in LOW_PRECISION and any(is_number(x) or x.dtype != dtype for x in operands):
            return "f32"
        return dtype

    def wide(self, x: Value | float) -> Value:
        """x in the dtype that a several-step formula for this result computes in."""
        return self.value(x, "f32" if self.dtype in LOW_PRECISION else self.dtype)

    def arith(self, name: str, *operands: Any, **attrs: Any) -> Value:
        """One elementwise op with promoted operands and the recorded result dtype."""
        dtype = self.compute_dtype(*operands)
        return self.b.cast(self.b.op(name, *(self.value(x, dtype) for x in operands), **attrs), self.dtype)

    def compare(self, name: str, a: Any, b: Any) -> Value:
        """A comparison in the promoted dtype of its operands."""
        dtype = self.promoted(a, b)
        return self.b.cast(self.b.op(name, self.value(a, dtype), self.value(b, dtype)), self.dtype)

    def dims(self, dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
        """Normalised, sorted reduction dims; None and () mean all."""
        if dims is None or (not isinstance(dims, int) and len(dims) == 0):
            return tuple(range(rank))
        listed = (dims,) if isinstance(dims, int) else dims
        return tuple(sorted({d % rank for d in listed})) if rank else ()

    # -- nodes --------------------------------------------------------------------------------------------------

    def resolve(self, arg: Any) -> Any:
        """An argument with graph nodes replaced by their values."""
        if isinstance(arg, fx.Node):
            return self.values[arg]
        if isinstance(arg, (list, tuple)):
            return [self.resolve(item) for item in arg]
        return arg

    def emit(self, node: fx.Node) -> Any:
        """Emits one call_function node; its Value, or a list for several results."""
        self.node = node
        self.b.loc = self.location(node.meta.get("src"))
        recompute = node.meta.get("recompute")  # the checkpointed region that runs again here
        self.b.extra = {} if recompute is None else {"nova.recompute": attribute("int", recompute)}
        if node.target is operator.getitem:
            source, index = node.args
            value = self.values[source][index]  # type: ignore[index]
            if source in self.dynamic:
                each = source.meta.get("dynamic")  # type: ignore[union-attr]
                if isinstance(each, tuple) and each[index] == frozenset():  # type: ignore[index]
                    return self._of_known_size(value)
                self.dynamic.add(node)
            return value
        name = overload_name(node.target)
        function = EMITTERS.get(name)
        if not self._plain() or function is None:
            return self.fallback()
        try:
            return function(
                self,
                *(self.resolve(a) for a in node.args),
                **{key: self.resolve(a) for key, a in node.kwargs.items()},
            )
        except NoLowering:
            return self.fallback()
        except NovaError:
            raise
        except Exception as error:
            types = ", ".join(str(a.meta.get("type")) for a in node.all_input_nodes)
            raise CompileError(
                f"emitting {node.target} of ({types}) failed: {type(error).__name__}: {error}", node.meta.get("src")
            ) from error

    def _plain(self) -> bool:
        """Every operand and result is real and of a size known now; what is not is PyTorch's."""
        node = self.node
        if node.meta.get("dynamic"):
            self.dynamic.add(node)
            return False
        if any(t.dtype in COMPLEX for t in _leaves(node.meta["type"])):
            return False
        for source in node.all_input_nodes:
            value = self.values[source]
            if source in self.dynamic or (isinstance(value, Value) and value.dtype in COMPLEX):
                return False
        return True

    def location(self, src: Any) -> ir.Location | None:
        """The MLIR location of a user's source line: its file and line, named by the module that was running."""
        if src is None:
            return None
        found = self._locations.get(src)
        if found is None:
            found = ir.Location.file(src.file, src.line, 0)
            if src.module:
                found = ir.Location.name(src.module, found)
            self._locations[src] = found
        return found

    def _of_known_size(self, value: Any) -> Any:
        """One of several results of PyTorch's, which as a whole depend on data: a copy that lies in the arena."""
        args = json.dumps({"args": [{"t": 0}], "kwargs": {}})
        return self.b.create("aten_call", [value], [(value.shape, value.dtype)], op="aten.clone.default", args=args)

    # -- ops left to PyTorch ------------------------------------------------------------------------------------

    def fallback(self) -> Any:
        """nova.aten_call of the node at hand."""
        node = self.node
        operands: list[Value] = []

        def template(arg: Any) -> Any:
            if isinstance(arg, fx.Node):
                operands.append(self.values[arg])
                return {"t": len(operands) - 1}
            if isinstance(arg, (list, tuple)):
                return [template(item) for item in arg]
            return encode(arg)

        args = {"args": [template(a) for a in node.args], "kwargs": {k: template(a) for k, a in node.kwargs.items()}}
        present = [(i, t) for i, t in enumerate(self.outs) if t is not None]
        types = [(tuple(t.shape), t.dtype) for _, t in present]
        if node.meta.get("dynamic"):
            self.b.extra["nova.dynamic"] = ir.UnitAttr.get()
        try:
            made = self.b.create("aten_call", operands, types, op=str(node.target), args=json.dumps(args))
        except ValueError as error:  # too many tensors of different types
            raise UnsupportedError(f"{node.target} cannot run inside the step: {error}", node.meta.get("src")) from None
        made = made if isinstance(made, list) else [made]
        results: list[Value | None] = [None] * len(self.outs)
        for (i, _), value in zip(present, made, strict=True):
            results[i] = value
        several = isinstance(node.meta["type"], (tuple, list))
        return results if several else results[0]


def _leaves(type_: Any) -> list[Any]:
    """The tensor types in a node's recorded type, nested or not."""
    if isinstance(type_, (tuple, list)):
        return [leaf for item in type_ for leaf in _leaves(item)]
    return [] if type_ is None else [type_]


def encode(arg: Any) -> Any:
    """A non-tensor ATen argument as JSON; `decode` is the inverse."""
    if arg is None or isinstance(arg, (bool, int, str)):
        return arg
    if isinstance(arg, float):
        return arg if math.isfinite(arg) else {"float": repr(arg)}
    if isinstance(arg, complex):
        return {"complex": [arg.real, arg.imag]}
    if isinstance(arg, torch.dtype):
        return {"dtype": SHORT_NAMES[arg]}
    if isinstance(arg, torch.device):
        return {"device": str(arg)}
    if isinstance(arg, torch.layout):
        return {"layout": str(arg).removeprefix("torch.")}
    if isinstance(arg, torch.memory_format):
        return {"memory_format": str(arg).removeprefix("torch.")}
    raise CompileError(f"an argument of type {type(arg).__name__} cannot be passed to PyTorch: {arg!r}")


def decode(arg: Any, tensors: Sequence[Any]) -> Any:
    """A decoded `args` template of nova.aten_call, with operands in place."""
    if isinstance(arg, list):
        return [decode(item, tensors) for item in arg]
    if not isinstance(arg, dict):
        return arg
    (kind, value) = next(iter(arg.items()))
    if kind == "t":
        return tensors[value]
    if kind in ("float", "complex"):
        return float(value) if kind == "float" else complex(*value)
    if kind == "dtype":
        return TORCH_DTYPES[value]
    if kind == "device":
        return torch.device(value)
    return getattr(torch, value)


def overload(name: str) -> Any:
    """The OpOverload named "aten.topk.default"."""
    namespace, base, variant = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), variant)


def emit_step(captured: Any) -> ir.Module:
    """The level-1 module of a `capture.signature.CapturedStep`: one `func.func @step`, verified by the caller."""
    from nova.dialect import emitters  # noqa: F401  (fills EMITTERS)

    signature, graph = captured.signature, captured.graph
    with context(), ir.Location.unknown():
        module = ir.Module.create()
        inputs = [tensor_type(tuple(i.type.shape), i.type.dtype) for i in signature.inputs]
        outputs = [tensor_type(tuple(o.type.shape), o.type.dtype) for o in signature.outputs]
        with ir.InsertionPoint(module.body):
            step = func.FuncOp(re.sub(r"\W", "_", captured.name), (inputs, outputs))  # "<lambda>" is no symbol
        step.attributes["arg_attrs"] = _argument_attributes(signature)
        step.attributes["res_attrs"] = ir.ArrayAttr.get(
            [ir.DictAttr.get({"nova.kind": attribute("str", o.kind)}) for o in signature.outputs]
        )
        block = step.add_entry_block()
        emitter = Emitter()
        with ir.InsertionPoint(block):
            for node in graph.nodes:
                _emit_node(emitter, node, block, signature)
    return module


def _emit_node(emitter: Emitter, node: fx.Node, block: ir.Block, signature: Any) -> None:
    if node.op == "placeholder":
        position = node.meta["input"]
        spec = signature.inputs[position]
        value = Value(block.arguments[position], tuple(spec.type.shape), spec.type.dtype)
        if spec.role == "scalar":
            emitter.scalars.add(id(value))
        emitter.values[node] = value
    elif node.op == "call_function":
        value = emitter.emit(node)
        emitter.values[node] = value
        if node.meta.get("scalar") and isinstance(value, Value):
            emitter.scalars.add(id(value))
    elif node.op == "output":
        emitter.b.loc = None
        results: Any = node.args[0]
        func.ReturnOp([_returned(emitter, n, o).ir for n, o in zip(results, signature.outputs, strict=True)])
    else:
        raise CompileError(f"unexpected graph node {node.op} {node.target}", node.meta.get("src"))


def _returned(emitter: Emitter, node: fx.Node, spec: Any) -> Value:
    value = emitter.values[node]
    if (value.shape, value.dtype) != (tuple(spec.type.shape), spec.type.dtype):
        raise CompileError(f"output {node} is {value}, the signature says {spec.type}", node.meta.get("src"))
    return value


def _argument_attributes(signature: Any) -> ir.ArrayAttr:
    donated = {o.input: position for position, o in enumerate(signature.outputs) if o.kind == "state"}
    attributes = []
    for position, spec in enumerate(signature.inputs):
        entries = {"nova.name": attribute("str", spec.name), "nova.role": attribute("str", spec.role)}
        if position in donated:
            entries["nova.donates"] = attribute("int", donated[position])
        attributes.append(ir.DictAttr.get(entries))
    return ir.ArrayAttr.get(attributes)
