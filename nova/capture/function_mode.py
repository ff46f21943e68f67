"""What the recorder does at the level of Python calls, before PyTorch takes them apart.

F.scaled_dot_product_attention(...)   kept whole (keep.py)
x * beta, torch.add(x, y, alpha=lr)   a traced number becomes a 0-d tensor of the graph
x.tolist(), x.numpy()                 refused: they read values without any dispatched operation
p.grad = None                         noted (grads.py)
loss.backward()                       runs with this mode on, so that recomputed forwards are seen too
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nova.capture import keep, tensor_lists
from nova.capture.scalars import TracedFloat
from nova.capture.sources import is_of_torch
from nova.errors import CaptureError

if TYPE_CHECKING:
    from nova.capture.record import Recorder

Handler = Callable[["FunctionMode", Any, tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[Any, Handler] = {}
_Tensor: Any = Tensor  # with its attributes as descriptors


def handles(*functions: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for function in functions:
            HANDLERS[function] = handler
        return handler

    return register


class FunctionMode(TorchFunctionMode):
    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder
        self._hidden = _hidden_methods()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._hidden:
            func = self._hidden.get(func, func)
        handler = HANDLERS.get(func)
        if handler is not None:
            return handler(self, func, args, kwargs or {})
        if not kwargs:
            for a in args:
                if type(a) in _PLAIN:
                    continue
                if _has_traced(a):
                    return _with_traced(self, func, args, {})
            return func(*args)
        if any(map(_has_traced, args)) or any(map(_has_traced, kwargs.values())) or _tensor_factor(kwargs):
            return _with_traced(self, func, args, kwargs)
        return func(*args, **kwargs)


# those that are written in Python, before a user's function hides one
_IN_PYTHON = {
    name: value
    for name, value in vars(Tensor).items()
    if isinstance(value, FunctionType) and is_of_torch(value.__code__.co_filename)
}


def _hidden_methods() -> dict[Any, Any]:
    """PyTorch's methods of tensors, by the user's functions that hide them. PyTorch names a method by looking it up in
    `Tensor`: it gives the user's function where that calls the one it hides."""
    methods = {**vars(torch._C.TensorBase), **_IN_PYTHON}
    return {
        value: methods[name]
        for name, value in vars(Tensor).items()
        if name in methods and isinstance(value, FunctionType) and not is_of_torch(value.__code__.co_filename)
    }


_PLAIN = {Tensor, torch.nn.Parameter, int, float, bool, type(None), str, torch.Size, torch.dtype}


def _has_traced(value: Any) -> bool:
    if isinstance(value, TracedFloat):
        return True
    return type(value) in (list, tuple) and any(map(_has_traced, value))


def _tensor_factor(kwargs: dict[str, Any]) -> bool:
    """add(x, y, alpha=<tensor>): PyTorch would read its value."""
    return isinstance(kwargs.get("alpha"), Tensor) or isinstance(kwargs.get("value"), Tensor)


# ---- kept whole ------------------------------------------------------------------------------------------------


@handles(torch._C._nn.scaled_dot_product_attention)
def _attention(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    scale = kwargs.get("scale")
    if isinstance(scale, TracedFloat):
        args = (args[0] * operand(scale, args[0]), *args[1:])
        kwargs = {**kwargs, "scale": 1.0}
    return keep.scaled_dot_product_attention(mode.recorder, func, *_concrete(args), **_concrete(kwargs))


@handles(torch._C._nn.cross_entropy_loss)
def _cross_entropy(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits, target, weight, reduction, ignore_index, smoothing = _concrete(
        (*args, *(None, 1, -100, 0.0)[len(args) - 2 :])
    )
    return keep.cross_entropy_loss(func, logits, target, weight, reduction, ignore_index, smoothing)


@handles(torch._C._nn.one_hot)
def _one_hot(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """PyTorch looks for the largest class before it makes its zeros. With the number of classes given, scattering looks
    at each."""

    def run(input: Tensor, num_classes: int = -1) -> Tensor:
        if num_classes <= 0 or input.dtype != torch.int64:
            return func(input, num_classes)
        zeros = torch.zeros((*input.shape, num_classes), dtype=torch.int64, device=input.device)
        return zeros.scatter_(-1, input.unsqueeze(-1), 1)

    return run(*_concrete(args), **_concrete(kwargs))


# ---- gradients, values, memory ---------------------------------------------------------------------------------


@handles(Tensor.backward)
def _backward(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run(self, gradient=None, retain_graph=None, create_graph=False, inputs=None):
        torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)

    with mode:
        return run(*args, **kwargs)


@handles(_Tensor.grad.__set__)
def _set_grad(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mode.recorder.leaves.assigned(args[0])
    return func(*args)


@handles(_Tensor.grad.__delete__)
def _delete_grad(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mode.recorder.leaves.assigned(args[0])
    return func(*args)


@handles(_Tensor.grad.__get__)
def _get_grad(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].is_leaf:
        mode.recorder.leaves.was_read(args[0])
    return func(*args)


@handles(_Tensor.data.__set__)
def _set_data(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mode.recorder.note_rebinding(args[0])
    return func(*args)


@handles(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)
def _read(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "this call")
    raise mode.recorder.fail(CaptureError(
        f"the step reads a tensor's value ({name}): a compiled step cannot wait for it; return the tensor and read it "
        "outside",
        mode.recorder.lines.here(),
    ))  # fmt: skip


@handles(Tensor.__repr__, Tensor.__format__)
def _print(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise mode.recorder.fail(CaptureError(
        "the step prints a tensor, which reads its value; return the tensor and print it outside the step",
        mode.recorder.lines.here(),
    ))  # fmt: skip


@handles(_Tensor.shape.__get__, Tensor.size, Tensor.__len__, Tensor.numel, Tensor.nelement)
def _size(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A size that depends on data must not become a Python number of the user's."""
    recorder = mode.recorder
    x = args[0]
    watched = recorder.has_dynamic and recorder.lines.user_calls(2) and recorder.values.known(x)
    if watched and "dynamic" in recorder.values.node(x).meta:
        raise recorder.fail(CaptureError(
            "the step reads a size that depends on data (of a masked selection, nonzero, unique); count with a "
            "tensor (mask.sum()), or keep the shape and use torch.where", recorder.lines.here(),
        ))  # fmt: skip
    return func(*args, **kwargs)


@handles(Tensor.expand, Tensor.broadcast_to, torch.broadcast_to)
def _expand(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sizes that the user wrote are constants, also where they are those of a data-dependent result of this run."""
    recorder = mode.recorder
    before, recorder.literal_sizes = recorder.literal_sizes, recorder.has_dynamic and recorder.lines.user_calls(2)
    try:
        return func(*args, **kwargs)
    finally:
        recorder.literal_sizes = before


@handles(Tensor.expand_as)
def _expand_as(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    recorder = mode.recorder
    before = recorder.size_like
    if recorder.has_dynamic and not kwargs:
        recorder.size_like = recorder.values.node(args[1])
    try:
        return func(*args, **kwargs)
    finally:
        recorder.size_like = before


@handles(Tensor.view, Tensor.reshape, torch.reshape)
def _reshape(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Which size of a reshape is inferred is the user's to say: `x.view(2, -1)` has two rows, however many x has."""
    recorder = mode.recorder
    sizes = kwargs.get("shape", args[1] if len(args) == 2 else args[1:])
    before = recorder.literal_shape
    if recorder.has_dynamic and recorder.lines.user_calls(2) and isinstance(sizes, (tuple, list, int)):
        written = [sizes] if isinstance(sizes, int) else list(sizes)
        recorder.literal_shape = written if all(type(d) is int for d in written) else None
    try:
        return func(*args, **kwargs)
    finally:
        recorder.literal_shape = before


@handles(Tensor.__deepcopy__)
def _deepcopy(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """copy.deepcopy copies memory behind the dispatcher's back."""
    x = args[0]
    with torch._C._DisableTorchDispatch():
        out = func(*args, **kwargs)
    mode.recorder.values.define(out, mode.recorder.values.node(x))
    return out


# ---- traced numbers --------------------------------------------------------------------------------------------


def operand(number: TracedFloat | Tensor, other: Tensor) -> Tensor:
    """A traced number as a 0-d tensor that promotes with `other` as a Python number would."""
    t = number if isinstance(number, Tensor) else number.tensor
    if other.dim() > 0 and (other.is_floating_point() or other.is_complex()):
        return t  # a 0-d float64 does not widen a tensor that has dimensions
    dtype = other.dtype if other.is_floating_point() else torch.get_default_dtype()
    return t.to(dtype)


def _concrete(value: Any) -> Any:
    """Traced numbers replaced by their value, which is guarded from now on."""
    if isinstance(value, TracedFloat):
        return value.concrete()
    if type(value) in (list, tuple):
        return type(value)(_concrete(v) for v in value)
    if type(value) is dict:
        return {k: _concrete(v) for k, v in value.items()}
    return value


_BINARY = {
    "add", "sub", "mul", "div", "true_divide", "multiply", "divide", "subtract", "rsub", "pow", "float_power",
    "remainder", "fmod",
    "floor_divide", "eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "atan2", "where", "__add__", "__radd__",
    "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__", "__div__", "__rdiv__", "__pow__",
    "__rpow__", "__mod__", "__rmod__", "__floordiv__", "__rfloordiv__", "__eq__", "__ne__", "__lt__", "__le__",
    "__gt__", "__ge__",
}  # fmt: skip
_BINARY |= {
    name + "_"
    for name in (
        "add",
        "sub",
        "mul",
        "div",
        "pow",
        "remainder",
        "fmod",
        "floor_divide",
        "multiply",
        "divide",
        "subtract",
    )
}
_BINARY |= {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ipow__"}


def _with_traced(mode: FunctionMode, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that has traced numbers among its arguments."""
    name = getattr(func, "__name__", "")
    if "foreach" in name:
        return _foreach(mode, name, args, kwargs)
    traced = _TRACED.get(name) or _TRACED.get(name.removesuffix("_"))
    if traced is not None:
        result = traced(name, args, kwargs)
        if result is not NotImplemented:
            if name.endswith("_") and name not in _TRACED:
                return args[0].copy_(result)
            return result
    if name in _BINARY:
        tensors = [a for a in args if isinstance(a, Tensor)]
        # the condition of `where` has no say in the type of its result
        other = next((a for a in tensors if a.is_floating_point() or a.is_complex()), tensors[0] if tensors else None)
        if other is not None:
            args, kwargs = _alpha(args, kwargs)
            return func(*(operand(a, other) if isinstance(a, TracedFloat) else a for a in args), **_concrete(kwargs))
    return func(*_concrete(args), **_concrete(kwargs))


def _alpha(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """add(x, y, alpha=s) as add(x, y * s)."""
    alpha = kwargs.get("alpha")
    if not isinstance(alpha, (TracedFloat, Tensor)):
        return args, kwargs
    y: Any = kwargs.get("other", args[1] if len(args) > 1 else None)
    scaled = y * operand(alpha, y) if isinstance(y, Tensor) else y * alpha
    rest = {k: v for k, v in kwargs.items() if k not in ("alpha", "other")}
    return (args[0], scaled), rest


def _addc(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = kwargs.get("value", args[3] if len(args) > 3 else None)
    if not isinstance(value, (TracedFloat, Tensor)):
        return NotImplemented
    x, a, b = args[:3]
    product = a * b if name.startswith("addcmul") else a / b
    return x + product * operand(value, product)


def _lerp(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
    if not isinstance(weight, TracedFloat):
        return NotImplemented
    return torch.lerp(
        args[0], args[1] if len(args) > 1 else kwargs["end"], weight.tensor.to(args[0].device, args[0].dtype)
    )


def _filled(t: Tensor, number: TracedFloat) -> Tensor:
    return number.tensor.to(t.device, t.dtype).expand(t.shape).clone()


def _fill(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _filled(args[0], args[1])


def _full(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = kwargs.pop("fill_value", None) if "fill_value" in kwargs else args[-1]
    rest = args[:-1] if args and args[-1] is value else args
    if not isinstance(value, TracedFloat):
        return NotImplemented
    if name == "full" and kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": torch.get_default_dtype()}
    requires_grad = kwargs.pop("requires_grad", False)
    makers: dict[str, Any] = {"full": torch.empty, "full_like": torch.empty_like, "new_full": Tensor.new_empty}
    empty = makers[name](*rest, **kwargs)
    return _filled(empty, value).requires_grad_(requires_grad)


def _clamp(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    low = kwargs.get("min", args[1] if len(args) > 1 else None)
    high = kwargs.get("max", args[2] if len(args) > 2 else None)
    if name.removesuffix("_") in ("clamp_min", "clamp_max"):
        low, high = (args[1], None) if name.startswith("clamp_min") else (None, args[1])
    for bound, function in ((low, torch.maximum), (high, torch.minimum)):
        if isinstance(bound, TracedFloat):
            x = function(x, operand(bound, x))
        elif bound is not None:
            x = torch.clamp(x, min=bound) if function is torch.maximum else torch.clamp(x, max=bound)
    return x


def _masked_fill(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = kwargs.get("value", args[2] if len(args) > 2 else None)
    return (
        torch.masked_fill(args[0], args[1], value.tensor.to(args[0].dtype))
        if isinstance(value, TracedFloat)
        else NotImplemented
    )


def _tensor(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch.tensor of traced numbers."""
    data: Any = args[0] if args else kwargs.get("data")
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    if isinstance(data, TracedFloat):
        t = data.tensor.to(dtype).clone()
    elif type(data) in (list, tuple) and all(isinstance(v, (int, float)) for v in data):
        t = torch.stack(
            [v.tensor if isinstance(v, TracedFloat) else torch.tensor(float(v), dtype=torch.float64) for v in data]
        ).to(dtype)
    else:
        return NotImplemented
    device = kwargs.get("device")
    t = t.to(device) if device is not None else t
    return t.requires_grad_() if kwargs.get("requires_grad") else t


def _setitem(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, index, value = args
    if not isinstance(value, TracedFloat):
        return NotImplemented
    x[_concrete(index)] = value.tensor.to(x.dtype)
    return None


_TRACED: dict[str, Callable[[str, tuple[Any, ...], dict[str, Any]], Any]] = {
    "addcmul": _addc, "addcdiv": _addc, "lerp": _lerp, "fill": _fill, "full": _full, "full_like": _full,
    "new_full": _full,
    "clamp": _clamp, "clip": _clamp, "clamp_min": _clamp, "clamp_max": _clamp, "masked_fill": _masked_fill,
    "tensor": _tensor, "as_tensor": _tensor, "scalar_tensor": _tensor, "__setitem__": _setitem,
}  # fmt: skip


def _foreach(mode: FunctionMode, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call on lists with traced numbers: one call a tensor."""
    single = name.removeprefix("_foreach_")
    inplace = single.endswith("_")
    function = getattr(Tensor, single, None) or getattr(torch, single)
    kwargs = {("value" if k == "scalar" else k): v for k, v in kwargs.items()}
    out = []
    with mode:
        for i in range(tensor_lists.count(dict(enumerate(args)) | kwargs)):
            one = [a[i] if isinstance(a, (list, tuple)) else a for a in args]
            kw = {k: v[i] if isinstance(v, (list, tuple)) else v for k, v in kwargs.items()}
            if single.rstrip("_") in ("addcmul", "addcdiv") and len(one) > 3:
                kw["value"] = one.pop()
            if single.rstrip("_") == "pow" and isinstance(one[0], float):
                out.append(one[0] ** one[1])
                continue
            out.append(function(*one, **kw))
    return None if inplace else tuple(out)
