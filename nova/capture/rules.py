"""How each dispatched operation is recorded: one rule an operator, found once and remembered.

    aten.add_(x, 1)               x' = aten.add(x, 1)                        in place -> value
    aten.mul(a, b, out=c)         c' = aten.mul(a, b)
    aten._foreach_mul_(xs, s)     x' = aten.mul(x, s) for each x             lists -> one operation a tensor
    aten.detach(x), clone(x)      nothing: values have no identity
    aten.zeros_like(x)            aten.full(shape, 0)
    aten.unbind(x)                aten.select(x, 0, i), made where they are read

A rule runs the real operation (the first step is a real step) and records its functional form. Rules written as
`@decomposed` run PyTorch code under the recorder again instead, so that what is computed is what is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from nova.capture import dynamic, tensor_lists
from nova.capture.cleanup import RAISING
from nova.capture.signature import TensorType
from nova.capture.views import DTYPE_NAMES, ViewOp, aten, several_views, single_view
from nova.errors import CaptureError, UnsupportedError

if TYPE_CHECKING:
    from nova.capture.record import Recorder

Rule = Callable[["Recorder", Any, tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[Any, Rule] = {}
_INDICES = (torch.int32, torch.int64)
_DROPPED_KWARGS = ("layout", "pin_memory", "memory_format", "non_blocking", "generator")


def rule(*operators: Any) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for operator in operators:
            for overload in _overloads(operator):
                RULES[overload] = function
        return function

    return register


def _overloads(operator: Any) -> list[Any]:
    if isinstance(operator, torch._ops.OpOverload):
        return [operator]
    return [getattr(operator, name) for name in operator.overloads()]


def decomposed(*operators: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A rule written as PyTorch code that runs under the recorder."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with torch._C._AutoDispatchBelowAutograd(), rec:
                return function(rec, *args, **kwargs)

        rule(*operators)(run)
        return function

    return register


def find_rule(func: Any) -> Rule:
    """The rule of an operator that has none of its own."""
    name = func._schema.name.split("::")[1]
    if name.startswith("_foreach_"):
        return foreach
    if func.namespace == "profiler":
        return run_only
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return composite
    schema = func._schema
    if torch.Tag.inplace_view in func.tags:
        return view
    written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if written:
        return out_variant if any(a.is_out for a in written) else in_place
    if name in _VIEWS or any(r.alias_info is not None for r in schema.returns):
        return view
    return pure


_VIEWS = {
    "_unsafe_view", "_reshape_alias", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "view", "slice",
    "select",
}  # fmt: skip


# ---- general rules ---------------------------------------------------------------------------------------------


def run_only(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def composite(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator made of others; autograd takes it apart before it gets here, unless gradients are off altogether."""
    with rec:
        return func.decompose(*args, **kwargs)


def pure(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation without side effects or views."""
    node_args = rec.nodes(args)
    node_kwargs = {k: rec.nodes(v) for k, v in kwargs.items() if k not in _DROPPED_KWARGS} if kwargs else {}
    out = func(*args, **kwargs)
    if type(out) is tuple and any(isinstance(t, Tensor) and t.dtype in _INDICES for t in out):
        out = _as_replayed(func, args, kwargs, out)
    if "layout" in kwargs and kwargs["layout"] not in (None, torch.strided):
        node_kwargs["layout"] = kwargs["layout"]
    rec.results(func, node_args, node_kwargs, out)
    return out


def _as_replayed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: tuple[Any, ...]) -> tuple[Any, ...]:
    """Results of the shapes that a replay gives, whose operands are dense: an auxiliary one may depend on strides
    (`offset2bag` of `_embedding_bag` is empty where the weight is row-major), and derivatives look at it."""
    dense = [a.contiguous() if isinstance(a, Tensor) and a.layout is torch.strided else a for a in args]
    if all(a is b for a, b in zip(args, dense, strict=True)):
        return out
    again = func(*dense, **kwargs)
    return tuple(
        new if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape != new.shape else old
        for old, new in zip(out, again, strict=True)
    )


def view(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A window on its first argument."""
    x = args[0]
    if not isinstance(x, Tensor):  # a Python number in a tensor's place (the conjugate of a factor)
        out = func(*args, **kwargs)
        value = (
            x.conjugate() if func is aten._conj.default else out.item()
        )  # item() would not see the conjugate bit here
        rec.values.define(out, rec.full(out, value))
        return out
    if x.layout is not torch.strided:
        return _part_of_sparse(rec, func, args, kwargs)
    rec.note_leaf(x)
    rec.values.storage(x)
    if torch.Tag.inplace_view in func.tags:
        return inplace_view(rec, func, args, kwargs)
    out = func(*args, **kwargs)
    rest = args[1:] if not kwargs else _positional(func, args, kwargs)[1:]
    if isinstance(out, Tensor):
        if out.layout is not torch.strided:
            rec.results(func, rec.nodes(args), {}, out)
        else:
            op = single_view(func, x, out, rest)
            if rec.has_dynamic:
                op = _dynamic_view(rec, func, x, out, rest, op)
            rec.values.alias(out, x, op)
            if rec.has_dynamic:
                if op is not None and op.target is aten.expand.default:
                    _expanded(rec, x, out)
                rec.values.node(out)  # now, while it is known which derivative asks for this size
        return out
    ops: Any = several_views(func, x, out, rest) or [None] * len(out)
    for piece, op in zip(out, ops, strict=True):
        rec.values.alias(piece, x, op)
        if rec.has_dynamic:
            if op is None or op.args[0] in dynamic.dims(rec.values.node(x)):
                rec.forbid_replay("a result was split along a size that depends on the data")
            rec.remember_operands([rec.values.node(x)])
            rec.values.node(piece)
    return out


def _part_of_sparse(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indices and values of a sparse tensor that was made of them are those very tensors."""
    if func in (aten._indices.default, aten._values.default):
        out = func(*args)
        if rec.values.get(out) is not None:
            return out
    return pure(rec, func, args, kwargs)


def _dynamic_view(rec: Recorder, func: Any, x: Tensor, out: Tensor, args: tuple[Any, ...], op: Any) -> Any:
    """A view beside data-dependent sizes: bounds and shapes as the user wrote them."""
    node = rec.values.node(x)
    rec.remember_operands([node])
    name = func._schema.name
    if name == "aten::slice" and args and args[0] % x.dim() in dynamic.dims(node):
        return ViewOp(func, (args[0] % x.dim(), *args[1:], *(0, None, None, 1)[len(args) :]))
    if name.startswith("aten::squeeze") and any(x.shape[d] == 1 for d in dynamic.dims(node)):
        rec.forbid_replay("a size that depends on the data was one in this run, and squeezed out")
    if op is not None and op.target is aten.view.default and dynamic.dims(node):
        written = rec.literal_shape and _written(rec.literal_shape, x, dynamic.dims(node))
        if written and -1 in written:
            return ViewOp(op.target, (written,))
        dynamic.check_reshape(rec, node, tuple(out.shape))
        return ViewOp(op.target, (written,)) if written else op
    if name == "aten::select" and args[0] % x.dim() in dynamic.dims(node):
        return ViewOp(func, (args[0] % x.dim(), args[1]))
    return op


def _written(sizes: list[int], x: Tensor, varying: frozenset[int]) -> list[int]:
    """The sizes of a reshape as the user wrote them; x's own, if they are that in every run."""
    if len(sizes) == x.dim() and all(
        d == -1 or (d == s and i not in varying) for i, (d, s) in enumerate(zip(sizes, x.shape, strict=True))
    ):
        return list(x.shape)
    return sizes


def _expanded(rec: Recorder, x: Tensor, out: Tensor) -> None:
    """An expansion to the size of one result is not one to that of another, though they have one size in this run.

    Nor is it nothing where it happens to be none.
    """
    node, same = rec.values.node(x), out.shape == x.shape
    if same and not rec.lines.in_formula():
        if tuple(out.shape) in rec.dynamic and (rec.literal_sizes or not dynamic.dims(node)):
            rec.forbid_replay("an expansion was none in this run")
        return
    before = rec.values.present(out)
    wide = rec.emit(aten.expand.default, (node, list(out.shape)), rec.values.type_of(out))
    if same and wide.target is aten.expand.default:
        if dynamic.dims(node):
            rec.forbid_replay("an expansion was none in this run")
        return
    if before is not None and not same and dynamic.origin(before) != dynamic.origin(wide):
        rec.forbid_replay("expansions of one tensor to different sizes coincided in this run")
    rec.values.replace(out, wide)


def inplace_view(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x.t_(): the tensor itself becomes another window on its memory."""
    before = aten.detach.default(args[0])
    out = func(*args, **kwargs)
    functional = _functional_of(func)
    op = single_view(functional, before, out, args[1:]) if functional is not None else None
    rec.values.alias(out, before, op)
    return out


def _positional(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    values = list(args)
    for argument in func._schema.arguments[len(args) :]:
        if argument.name not in kwargs and not argument.has_default_value():
            break
        values.append(kwargs.get(argument.name, argument.default_value if argument.has_default_value() else None))
    return tuple(values)


_FUNCTIONAL: dict[Any, Any] = {}


def _functional_of(func: Any) -> Any:
    """The out-of-place overload of an in-place operator: the same name without `_`, the same argument types."""
    if func not in _FUNCTIONAL:
        name = func._schema.name.split("::")[1]
        packet = (
            getattr(getattr(torch.ops, func.namespace), name.removesuffix("_"), None) if name.endswith("_") else None
        )
        wanted = [str(a.type) for a in func._schema.arguments]
        overloads = _overloads(packet) if packet is not None else []
        overloads.sort(key=lambda o: o._overloadname != func._overloadname)
        _FUNCTIONAL[func] = next((o for o in overloads if [str(a.type) for a in o._schema.arguments] == wanted), None)
    return _FUNCTIONAL[func]


def in_place(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x.op_(...) as x' = x.op(...)."""
    functional, target = _functional_of(func), args[0]
    if functional is None or not isinstance(target, Tensor) or len(functional._schema.returns) != 1:
        raise UnsupportedError(f"{func} changes its arguments in a way that Nova does not know", rec.line)
    rec.values.before_write(target)
    node_args = rec.nodes(args)
    node_kwargs = {k: rec.nodes(v) for k, v in kwargs.items() if k not in _DROPPED_KWARGS}
    out = func(*args, **kwargs)
    type_ = rec.values.type_of(target)
    promoted = _promoted(functional, args, kwargs)
    if promoted is not None and promoted != target.dtype:
        wide = TensorType(type_.shape, DTYPE_NAMES[promoted], type_.device)
        node = rec.cast(rec.emit(functional, node_args, wide, node_kwargs), target.dtype, type_)
    else:
        node = rec.emit(functional, node_args, type_, node_kwargs)
    rec.values.write(target, node)
    return out


def _promoted(functional: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """Element type of the out-of-place result when operands of several types meet; None when they do not."""
    dtype = args[0].dtype
    if not any(isinstance(a, Tensor) and a.dtype != dtype for a in args):
        return None

    def meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return [meta(v) for v in value] if isinstance(value, (list, tuple)) else value

    try:
        return functional(*meta(args), **kwargs).dtype
    except Exception:  # operators with a data-dependent shape have no meta form, and none of them promotes
        return None


_OUT: dict[Any, Any] = {}


def _without_out(func: Any) -> Any:
    """The overload that returns what `func` writes into its `out` arguments."""
    if func not in _OUT:
        wanted = [(a.name, str(a.type)) for a in func._schema.arguments if not a.is_out]
        packet = func._overloadpacket
        matching = (o for o in _overloads(packet) if [(a.name, str(a.type)) for a in o._schema.arguments] == wanted)
        _OUT[func] = next(matching, None)
    return _OUT[func]


def out_variant(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """op(..., out=t) as t' = op(...)."""
    functional = _without_out(func)
    names = [a.name for a in func._schema.arguments if a.is_out]
    if functional is None:
        raise UnsupportedError(f"{func} has no form that returns its result", rec.line)
    outs = [kwargs[name] for name in names]
    for t in outs:
        if t.numel():
            rec.values.before_write(t)
    node_args = rec.nodes(args)
    node_kwargs = {k: rec.nodes(v) for k, v in kwargs.items() if k not in names and k not in _DROPPED_KWARGS}
    types = []
    result = func(*args, **kwargs)
    for t in outs:
        types.append(rec.values.type_of(t))
    if len(outs) == 1:
        natural = _natural_type(functional, args, {k: v for k, v in kwargs.items() if k not in names})
        type_ = types[0]
        if natural is not None and natural != outs[0].dtype:
            node = rec.emit(
                functional, node_args, TensorType(type_.shape, DTYPE_NAMES[natural], type_.device), node_kwargs
            )
            node = rec.cast(node, outs[0].dtype, type_)
        else:
            node = rec.emit(functional, node_args, type_, node_kwargs)
        rec.values.redefine(outs[0], node)
    else:
        whole = rec.emit(functional, node_args, tuple(types), node_kwargs)
        for i, t in enumerate(outs):
            rec.values.redefine(t, rec.item(whole, i, types[i]))
    return result


def _natural_type(functional: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    def meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return [meta(v) for v in value] if isinstance(value, (list, tuple)) else value

    try:
        return functional(*meta(args), **kwargs).dtype
    except Exception:  # no meta form: the operator does not promote
        return None


# ---- lists of tensors ------------------------------------------------------------------------------------------

_FOREACH_BINARY = {"add": "Tensor", "sub": "Tensor", "mul": "Tensor", "div": "Tensor"}


def foreach(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation a tensor: the list is PyTorch's way to launch fewer kernels, not part of the meaning."""
    full = func._schema.name.removeprefix("aten::_foreach_")
    inplace, name = full.endswith("_"), full.removesuffix("_")
    xs = args[0]
    named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
    count = tensor_lists.count(named | kwargs)
    with torch._C._AutoDispatchBelowAutograd(), rec:
        out = []
        for i in range(count):
            one = tuple(_element(a, i, count, func, j) for j, a in enumerate(args))
            kw = {k: _element(v, i, count, func, k) for k, v in kwargs.items()}
            result = _foreach_one(name, func._overloadname, one, kw)
            if inplace:
                xs[i].copy_(result)
            out.append(result)
    return None if inplace else out


def _element(value: Any, i: int, count: int, func: Any, position: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return value[i]
    schema = func._schema.arguments
    argument = schema[position] if isinstance(position, int) else next(a for a in schema if a.name == position)
    if isinstance(value, Tensor) and argument.name == "scalars":
        return value[i]
    return value


def _foreach_one(name: str, overload: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    if name in ("addcmul", "addcdiv") and (len(args) > 3 or "scalars" in kwargs or "value" in kwargs):
        x, a, b, value = args if len(args) > 3 else (*args, kwargs.get("scalars", kwargs.get("value", 1)))
        product = a * b if name == "addcmul" else a / b
        return x + product * value if isinstance(value, Tensor) else getattr(aten, name).default(x, a, b, value=value)
    if name in ("maximum", "clamp_min", "minimum", "clamp_max"):
        low = name in ("maximum", "clamp_min")
        if isinstance(args[1], Tensor):
            return (torch.maximum if low else torch.minimum)(*args)
        return (torch.clamp_min if low else torch.clamp_max)(*args)
    if name == "copy":
        return args[1].expand_as(args[0]).to(args[0].dtype)
    if name == "zero":
        return torch.zeros_like(args[0])
    if name == "norm":
        return torch.linalg.vector_norm(
            args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2), dtype=kwargs.get("dtype")
        )
    if name == "max":
        return args[0].max()
    if name in _FOREACH_BINARY and isinstance(kwargs.get("alpha", 1), Tensor):
        kwargs = {}
    return getattr(torch, name)(*args, **{k: v for k, v in kwargs.items() if k == "alpha" and v != 1})


@rule(aten._foreach_norm)
def _foreach_norm(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The norms of many tensors are one operation: it reads every gradient once."""
    bound = dict(zip(("self", "ord", "dtype"), args, strict=False)) | kwargs
    xs, order, dtype = bound["self"], bound.get("ord", 2), bound.get("dtype")
    tensor_lists.count(bound)
    narrow = {x.dtype for x in xs} <= {torch.float32, torch.bfloat16, torch.float16} and dtype in (None, torch.float32)
    if not narrow or len({x.dtype for x in xs}) != 1:
        return foreach(rec, func, args, kwargs)
    with torch._C._AutoDispatchBelowAutograd(), rec:
        norms = torch.ops.nova.foreach_norm(xs, float(order)).to(dtype or xs[0].dtype)
        return list(norms.unbind(0))


# ---- identities, copies, constants -----------------------------------------------------------------------------


@rule(aten.detach.default, aten.detach_.default, aten.alias, aten.clone, aten.lift, aten._coalesced_)
def identity(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not isinstance(args[0], Tensor):
        return view(rec, func, args, kwargs)
    node = rec.values.node(args[0])
    out = func(*args, **kwargs)
    if out.layout is not torch.strided or rec.values.get(out) is None:
        rec.values.define(out, node)
    return out


@rule(aten.lift_fresh.default)
def lift_fresh(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.tensor(...) of Python numbers: a constant."""
    t = args[0]
    if t.layout is torch.strided and rec.values.get(t) is None:
        if t.numel() == 1:
            rec.values.define(t, rec.full(t, t.item()))
        elif t.numel():
            rec.values.node(t).meta["python"] = True
    return func(*args, **kwargs)


@rule(aten._to_copy.default)
def to_copy(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    node = rec.values.node(x)
    out = func(*args, **kwargs)
    if out.layout is not torch.strided or x.layout is not torch.strided:
        rec.results(
            func,
            (node,),
            {k: v for k, v in kwargs.items() if k in ("dtype", "device", "layout") and v is not None},
            out,
        )
        return out
    if out.device != x.device:
        node = rec.emit(func, (node,), rec.values.type_of(out), {"dtype": out.dtype, "device": out.device})
    elif out.dtype != x.dtype:
        node = rec.cast(node, out.dtype, rec.values.type_of(out))
    rec.values.define(out, node)
    return out


@rule(aten.copy_.default)
def copy_(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[:2]
    rec.values.before_write(target)
    node = rec.values.node(source)
    out = func(*args, **kwargs)
    type_ = rec.values.type_of(target)
    if source.device != target.device:
        node = rec.emit(aten._to_copy.default, (node,), TensorType(tuple(source.shape), type_.dtype, type_.device),
                        {"dtype": target.dtype, "device": target.device})  # fmt: skip
    elif source.dtype != target.dtype:
        node = rec.cast(node, target.dtype, TensorType(tuple(source.shape), type_.dtype, type_.device))
    if source.shape != target.shape:
        node = _widened(rec, node, target, type_)
    rec.values.write(target, node)
    return out


def _widened(rec: Recorder, node: fx.Node, target: Tensor, type_: TensorType) -> fx.Node:
    """What is copied into all of `target`, in the target's sizes: its own, if they depend on data."""
    like = rec.values.node(target) if rec.has_dynamic else None
    if like is not None and dynamic.dims(like):
        return rec.emit(aten.expand_as.default, (node, like), type_)
    before, rec.literal_sizes = rec.literal_sizes, True
    try:
        return rec.emit(aten.expand.default, (node, list(target.shape)), type_)
    finally:
        rec.literal_sizes = before


@rule(aten.fill_, aten.zero_)
def fill_(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    rec.values.before_write(target)
    value = args[1] if len(args) > 1 else kwargs.get("value", 0)
    node = rec.values.node(value) if isinstance(value, Tensor) else None
    out = func(*args, **kwargs)
    if target.layout is not torch.strided:
        rec.values.write(
            target, rec.emit(aten.zeros_like.default, (rec.values.node(target),), rec.values.type_of(target))
        )
        return out
    if node is None:
        before = rec.values.node(target) if rec.has_dynamic else None
        if before is not None and dynamic.dims(before):
            rec.values.write(target, rec.emit(aten.full_like.default, (before, value), rec.values.type_of(target)))
        else:
            rec.values.write(target, rec.full(target, value))
        return out
    type_ = rec.values.type_of(target)
    if value.dtype != target.dtype:
        node = rec.cast(node, target.dtype, TensorType(tuple(value.shape), type_.dtype, type_.device))
    if value.shape != target.shape:
        node = _widened(rec, node, target, type_)
    rec.values.write(target, node)
    return out


_FILL = {"zeros": 0, "ones": 1, "empty": 0, "zeros_like": 0, "ones_like": 1, "empty_like": 0, "new_zeros": 0,
         "new_ones": 1, "new_empty": 0, "empty_strided": 0, "new_empty_strided": 0,
         "_efficientzerotensor": 0}  # fmt: skip


@rule(*(getattr(aten, name) for name in _FILL))
def constant(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Uninitialised memory is recorded as zeros: nothing may depend on it."""
    out = func(*args, **kwargs)
    if out.layout is not torch.strided:
        raise UnsupportedError(f"{func} of layout {out.layout}", rec.line)
    rec.values.define(out, _filled(rec, func, args, out, _FILL[func._schema.name.removeprefix("aten::")]))
    return out


def _filled(rec: Recorder, func: Any, args: tuple[Any, ...], out: Tensor, value: Any) -> fx.Node:
    """A constant; `new_zeros(x, size)` has the size it was given, however x's looks in this run."""
    like = rec.values.node(args[0]) if rec.has_dynamic and func._schema.name.endswith("_like") else None
    if like is not None and dynamic.dims(like) and tuple(out.shape) == dynamic.shape(like):
        return rec.emit(aten.full_like.default, (like, value), rec.values.type_of(out), {"dtype": out.dtype})
    return rec.full(out, value)


@rule(aten.full, aten.full_like, aten.new_full, aten.scalar_tensor)
def full(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = func(*args, **kwargs)
    value = kwargs.get("fill_value", args[-1] if len(args) > (0 if func is aten.scalar_tensor.default else 1) else None)
    rec.values.define(out, _filled(rec, func, args, out, value))
    return out


@rule(aten.resize_.default, aten.set_, aten.resize_as_)
def resize_(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten.resize_.default and list(args[0].shape) == list(args[1]):
        return args[0]
    raise UnsupportedError(f"{func} changes which memory a tensor has; make a new tensor instead", rec.line)


# ---- reads of values -------------------------------------------------------------------------------------------


@rule(aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default)
def read_value(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args and all(isinstance(a, Tensor) and _is_constant(rec.values.node(a)) for a in args):
        return func(*args, **kwargs)
    inside = rec.lines.library_function()
    how = f"in {inside}" if inside else ".item(), float(), bool(), an `if` on a tensor, print"
    raise CaptureError(
        f"the step reads a tensor's value ({how}): a compiled step cannot wait for it; return the tensor and read it "
        "outside, or use torch.where",
        rec.lines.here(),
    )


def _is_constant(node: torch.fx.Node) -> bool:
    """Whether a value was made from Python numbers alone, and is the same on every replay."""
    seen, open_nodes = {node}, [node]
    while open_nodes:
        found = open_nodes.pop()
        drawn = torch.Tag.nondeterministic_seeded in getattr(found.target, "tags", ())
        if drawn or (found.op == "placeholder" and not found.meta.get("python")):
            return False
        fresh = [n for n in _decisive(found) if n not in seen]
        seen.update(fresh)
        open_nodes += fresh
    return True


def _decisive(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The operands that a value depends on: batch sizes of a packed sequence follow from the lengths alone."""
    made: Any = node.args[0] if node.target is getitem else None
    if made is not None and made.target is aten._pack_padded_sequence.default and node.args[1] == 1:
        return [made.args[1]]
    return node.all_input_nodes


# ---- batch norm ------------------------------------------------------------------------------------------------


@rule(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def native_batch_norm(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Training changes the running statistics without saying so in its schema."""
    args = _positional(func, args, kwargs)
    x, weight, bias, mean, var, training, momentum, eps = args
    if not training:
        nodes = rec.nodes((x, weight, bias, mean, var))
        out = func(*args)
        rec.results(aten._native_batch_norm_legit_no_training.default, (*nodes, momentum, eps), {}, out)
        return out
    if mean is None:
        nodes = _of_several(rec, rec.nodes((x, weight, bias)))
        out = func(*args)
        rec.results(aten._native_batch_norm_legit.no_stats, (*nodes, training, momentum, eps), {}, out)
        return out
    for statistic in (mean, var):
        rec.values.before_write(statistic)
    nodes = _of_several(rec, rec.nodes((x, weight, bias, mean, var)))
    out = func(*args)
    types = (*(rec.values.type_of(t) for t in out), rec.values.type_of(mean), rec.values.type_of(var))
    whole = rec.emit(aten._native_batch_norm_legit_functional.default, (*nodes, training, momentum, eps), types)
    for i, t in enumerate(out):
        rec.values.define(t, rec.item(whole, i, types[i]))
    rec.values.write(mean, rec.item(whole, 3, types[3]))
    rec.values.write(var, rec.item(whole, 4, types[4]))
    return out


def _of_several(rec: Recorder, nodes: Any) -> Any:
    """A batch whose size depends on data may have a single row next time, which PyTorch's Python refuses."""
    if not dynamic.dims(nodes[0]):
        return nodes
    return (rec.emit(torch.ops.nova.of_several.default, (nodes[0],), nodes[0].meta["type"]), *nodes[1:])


@rule(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args = _positional(func, args, kwargs)
    grad, x, weight, mean, var, save_mean, save_invstd, train, eps, mask = args
    used = (None, None, save_mean, save_invstd) if train else (mean, var, None, None)
    nodes = rec.nodes((grad, x, weight, *used))
    out = func(*args)
    rec.results(func, (*nodes, train, eps, list(mask)), {}, out)
    return out


# ---- gradient scaling ------------------------------------------------------------------------------------------


@decomposed(aten._amp_foreach_non_finite_check_and_unscale_.default)
def unscale_(rec: Recorder, grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """found_inf |= any gradient is infinite or NaN; gradients are multiplied by inv_scale."""
    if not grads:
        return
    if grads[0].dtype == torch.float64:
        largest = torch.stack([g.abs().amax() if g.numel() else g.new_zeros(()) for g in grads])
    else:
        largest = torch.ops.nova.foreach_norm(grads, float("inf"))
    bad = torch.logical_or(torch.isinf(largest), torch.isnan(largest)).any()
    found_inf.copy_(torch.maximum(found_inf, bad.to(found_inf.dtype)))
    for g in grads:
        g.copy_((g * inv_scale.to(g.dtype)) if g.dtype == torch.float64 else (g.float() * inv_scale).to(g.dtype))


@decomposed(aten._amp_update_scale_.default)
def update_scale_(
    rec: Recorder,
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    growth: float,
    backoff: float,
    interval: int,
) -> Tensor:
    found = found_inf != 0
    count = growth_tracker + 1
    grow = count == interval
    larger = scale * growth
    larger = torch.where(torch.logical_or(torch.isinf(larger), torch.isnan(larger)), scale, larger)
    scale.copy_(torch.where(found, scale * backoff, torch.where(grow, larger, scale)))
    growth_tracker.copy_(torch.where(torch.logical_or(found, grow), torch.zeros_like(count), count))
    return scale


@rule(aten._index_put_impl_.default)
def index_put_impl_(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = _positional(func, args, kwargs)[:4]
    target = bound[0]
    rec.values.before_write(target)
    nodes = rec.nodes(bound)
    out = func(*args, **kwargs)
    rec.values.write(target, rec.emit(aten.index_put.default, nodes, rec.values.type_of(target)))
    return out


@rule(*RAISING)
def raising(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A check without a result: what linalg's functions found wrong, an assertion on a tensor."""
    nodes = rec.nodes(args)
    func(*args, **kwargs)
    rec.emit(func, nodes, None, kwargs)


_METADATA = {
    "aten::is_pinned",
    "aten::_has_same_storage_numel",
    "aten::is_same_size",
    "aten::dense_dim",
    "aten::sparse_dim",
    "aten::is_coalesced",
    "aten::_dimV",
    "aten::_dimI",
    "aten::_nnz",
    "aten::is_set_to",
    "prim::device",
    "aten::_debug_has_internal_overlap",
    "aten::sym_size",
    "aten::sym_numel",
    "aten::sym_stride",
}


def check_results(rec: Recorder, func: Any, out: Any) -> None:
    """An operator that returns a Python number or bool read a tensor."""
    if isinstance(out, (bool, int, float, complex)) and func._schema.name not in _METADATA:
        read_value(rec, func, (), {})
