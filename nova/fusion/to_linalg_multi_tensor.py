"""nova-to-linalg: multi-tensor kernels. Optimizer updates and foreach_norm, written out for one tensor of any size.

    sgd(p, g, lr, ..)   ->   %lr32 = linalg.generic dims = []   (scalars, once a tensor)
                             linalg.generic dims = [0] over %p : tensor<?xf32> {nova.list}: p - lr32 * g

Scalars (bias corrections, step sizes) are computed in f64 as PyTorch's Python code does, then rounded to the type in
which the elements are computed: f32, or f64 for f64 parameters.
"""

from __future__ import annotations

from collections.abc import Callable

from nova.fusion import scalars, whole
from nova.fusion.kernel import (
    Expr,
    Kernel,
    Linear,
    Out,
    Structured,
    Tensor,
    binary,
    compare,
    const,
    convert_float,
    load,
    select,
)
from nova.fusion.kinds import OPTIMIZERS
from nova.fusion.records import Function, Op, Value
from nova.fusion.scalars import absolute, add, div, maximum, mul, neg, sqrt, sub

ELEMENT = Linear(0, ((0, 1),))  # the element's number: the only loop
UNKNOWN = -1


class Update:
    """The kernel being made for one update chain."""

    def __init__(self, function: Function):
        self.function = function
        self.kernel = Kernel(function.name, "multi_tensor", [UNKNOWN], [], [], [], [])
        self.values: dict[Value, Expr] = {}
        for value, mark in zip(function.args, function.arg_attrs, strict=True):
            tensor = self._tensor("arg", value, mark.strip("{}"))
            self.kernel.args.append(tensor)
            self.values[value] = load(tensor, (ELEMENT if tensor.shape else Linear(0, ()),))
        for value, mark in zip(function.outputs, function.res_attrs, strict=True):
            self.kernel.outs.append(self._tensor("out", value, mark.strip("{}")))

    def _tensor(self, kind: str, value: Value, mark: str) -> Tensor:
        shape = (UNKNOWN,) if value.shape and mark == "nova.list" else ()
        return Tensor(kind, shape, scalars.element_type(value.dtype), list_=mark)

    def scalar(self, element: Expr) -> Expr:
        """A value computed once a tensor."""
        tensor = Tensor("local", (), element.type)
        self.kernel.ops.append(Structured((), frozenset(), [Out(tensor, (), element)]))
        return load(tensor, ())

    def write(self, number: int, element: Expr) -> None:
        """Result `number`, rounded to its type."""
        tensor = self.kernel.outs[number]
        out = Out(tensor, (ELEMENT,) if tensor.shape else (), convert_float(element, tensor.dtype))
        loops = (0,) if tensor.shape else ()
        if loops and self.kernel.ops and self.kernel.ops[-1].loops == loops:
            self.kernel.ops[-1].outs.append(out)  # all results of an element together, so that in-place is safe
        else:
            self.kernel.ops.append(Structured(loops, frozenset(), [out]))


class Fields:
    """The operands of an optimizer op by name, in the types to compute with."""

    def __init__(self, update: Update, op: Op, names: str, optional: list[str]):
        self.update = update
        self.raw: dict[str, Expr] = {}
        for name, value in zip([*names.split(), *optional], op.operands, strict=True):
            self.raw[name] = update.values[value]
        self.type = "f64" if op.operands[0].dtype == "f64" else "f32"

    def tensor(self, name: str) -> Expr:
        """An element of a tensor operand, in the computing type."""
        return convert_float(self.raw[name], self.type)

    def double(self, name: str) -> Expr:
        """A hyperparameter or step count in f64."""
        return convert_float(self.raw[name], "f64")

    def rounded(self, element: Expr) -> Expr:
        """A scalar formula, computed once a tensor, in the computing type."""
        return self.update.scalar(convert_float(element, self.type))

    def number(self, name: str) -> Expr:
        return self.rounded(self.double(name))


def _gradient(f: Fields, op: Op, p: Expr, decoupled: bool = False) -> Expr:
    """The gradient with the sign and the weight decay that the update wants; no decay leaves an infinite p harmless."""
    g = f.tensor("g")
    if op.attrs["maximize"]:
        g = neg(g)
    if decoupled:
        return g
    decay = f.number("weight_decay")
    return select(compare("oeq", decay, const(0, decay.type)), g, add(g, mul(p, decay)))


def _keep(f: Fields, op: Op, old: Expr, new: Expr) -> Expr:
    """`old` where the gradient scaler found an infinity."""
    if not op.attrs["has_found_inf"]:
        return new
    found = f.raw["found_inf"]
    return select(compare("une", found, const(0, found.type)), old, new)


def _lerp(a: Expr, b: Expr, weight: Expr) -> Expr:
    difference = sub(b, a)
    near = add(a, mul(weight, difference))
    far = sub(b, mul(difference, sub(const(1, a.type), weight)))
    return select(compare("olt", absolute(weight), const(0.5, a.type)), near, far)


def _one_minus(value: Expr) -> Expr:
    return sub(const(1, value.type), value)


def _step(f: Fields, op: Op) -> tuple[Expr, Expr]:
    """(new step in its own type, new step in f64)."""
    old = f.raw["step"]
    new = add(old, const(1, old.type))
    return _keep(f, op, old, new), convert_float(new, "f64")


def _sgd(u: Update, op: Op) -> None:
    optional = [
        n for n, k in (("buf", "has_buf"), ("first", "has_first"), ("found_inf", "has_found_inf")) if op.attrs[k]
    ]
    f = Fields(u, op, "p g lr momentum dampening weight_decay", optional)
    p = f.tensor("p")
    g = _gradient(f, op, p)
    results = []
    if op.attrs["has_buf"]:
        momentum = f.number("momentum")
        share = f.rounded(_one_minus(f.double("dampening")))
        old = f.tensor("buf")
        buf = add(mul(old, momentum), mul(g, share))
        if op.attrs["has_first"]:
            first = f.raw["first"]
            is_first = first if first.type == "i1" else compare("une", first, const(0, first.type))
            buf = select(is_first, g, buf)
        g = add(g, mul(buf, momentum)) if op.attrs["nesterov"] else buf
        results.append((1, _keep(f, op, old, buf)))
    results.insert(0, (0, _keep(f, op, p, sub(p, mul(f.number("lr"), g)))))
    for number, element in results:
        u.write(number, element)


def _adam(u: Update, op: Op) -> None:
    optional = [n for n, k in (("vmax", "amsgrad"), ("found_inf", "has_found_inf")) if op.attrs[k]]
    f = Fields(u, op, "p g m v step lr beta1 beta2 eps weight_decay", optional)
    p, m, v = f.tensor("p"), f.tensor("m"), f.tensor("v")
    decoupled = op.attrs["decoupled"]
    g = _gradient(f, op, p, decoupled)
    kept_step, step = _step(f, op)
    lr, beta1, beta2 = f.double("lr"), f.double("beta1"), f.double("beta2")
    correction1 = _one_minus(binary("math.powf", beta1, step))
    correction2 = _one_minus(binary("math.powf", beta2, step))
    step_size = f.rounded(div(lr, correction1))
    root = f.rounded(sqrt(correction2))
    start = p
    if decoupled:
        start = mul(p, f.rounded(_one_minus(mul(lr, f.double("weight_decay")))))
    new_m = _lerp(m, g, f.rounded(_one_minus(beta1)))
    new_v = add(mul(v, f.rounded(beta2)), mul(mul(f.rounded(_one_minus(beta2)), g), g))
    second = new_v
    if op.attrs["amsgrad"]:
        second = maximum(f.tensor("vmax"), new_v)
    denominator = add(div(sqrt(second), root), f.number("eps"))
    new_p = sub(start, mul(step_size, div(new_m, denominator)))
    u.write(3, kept_step)
    u.write(0, _keep(f, op, p, new_p))
    u.write(1, _keep(f, op, m, new_m))
    u.write(2, _keep(f, op, v, new_v))
    if op.attrs["amsgrad"]:
        u.write(4, _keep(f, op, f.tensor("vmax"), second))


def _adagrad(u: Update, op: Op) -> None:
    f = Fields(u, op, "p g sum step lr lr_decay eps weight_decay", ["found_inf"] if op.attrs["has_found_inf"] else [])
    p, total = f.tensor("p"), f.tensor("sum")
    g = _gradient(f, op, p)
    kept_step, step = _step(f, op)
    one = const(1, "f64")
    rate = f.rounded(div(f.double("lr"), add(one, mul(sub(step, one), f.double("lr_decay")))))
    new_total = add(total, mul(g, g))
    new_p = sub(p, mul(rate, div(g, add(sqrt(new_total), f.number("eps")))))
    u.write(2, kept_step)
    u.write(0, _keep(f, op, p, new_p))
    u.write(1, _keep(f, op, total, new_total))


def _rmsprop(u: Update, op: Op) -> None:
    optional = [
        n for n, k in (("grad_avg", "centered"), ("buf", "has_momentum"), ("found_inf", "has_found_inf")) if op.attrs[k]
    ]
    f = Fields(u, op, "p g square_avg step lr alpha eps weight_decay momentum", optional)
    p, average = f.tensor("p"), f.tensor("square_avg")
    g = _gradient(f, op, p)
    kept_step, _ = _step(f, op)
    rest = f.rounded(_one_minus(f.double("alpha")))
    new_average = add(mul(average, f.number("alpha")), mul(mul(rest, g), g))
    results = [(1, average, new_average)]
    spread = new_average
    number = 3
    if op.attrs["centered"]:
        mean = f.tensor("grad_avg")
        new_mean = _lerp(mean, g, rest)
        spread = sub(new_average, mul(new_mean, new_mean))
        results.append((number, mean, new_mean))
        number += 1
    update = div(g, add(sqrt(spread), f.number("eps")))
    if op.attrs["has_momentum"]:
        buf = f.tensor("buf")
        update = add(mul(buf, f.number("momentum")), update)
        results.append((number, buf, update))
    new_p = sub(p, mul(f.number("lr"), update))
    u.write(2, kept_step)
    for number, old, new in [(0, p, new_p), *results]:
        u.write(number, _keep(f, op, old, new))


def _foreach_norm(u: Update, op: Op) -> None:
    """The norm of one tensor; it becomes one element of the result."""
    x = u.values[op.operands[0]]
    x = convert_float(x, "f32") if x.type in ("bf16", "f16") else x
    order = op.attrs["ord"]
    element, combine, init = absolute(x), "arith.addf", 0.0
    if order == float("inf"):
        combine = "arith.maximumf"
    elif order == 2.0:
        element = mul(x, x)
    elif order != 1.0:
        element = binary("math.powf", element, const(order, x.type))
    tensor = Tensor("local", (), x.type)
    u.kernel.ops.append(Structured((0,), frozenset({0}), [Out(tensor, (), element, combine, init)]))
    total = load(tensor, ())
    if order == 2.0:
        total = sqrt(total)
    elif order not in (1.0, float("inf")):
        total = binary("math.powf", total, const(1.0 / order, x.type))
    u.write(0, total)


def _cast(u: Update, op: Op) -> None:
    u.write(0, scalars.emit(op, [u.values[op.operands[0]]]))


UPDATES: dict[str, Callable[[Update, Op], None]] = {
    "sgd": _sgd, "adam": _adam, "adagrad": _adagrad, "rmsprop": _rmsprop, "foreach_norm": _foreach_norm,
    "cast": _cast,
}  # fmt: skip


def lower(function: Function) -> Kernel:
    """The kernel of one tensor's update; its indices need no shapes, there is only one dimension."""
    update = Update(function)
    for value, node in list(update.values.items()):
        tensor, index = node.attr
        update.values[value] = load(tensor, index if tensor.shape else ())
    for op in function.ops:
        if op.name in UPDATES:
            UPDATES[op.name](update, op)
        else:
            args = [update.values[value] for value in op.operands]
            update.values[op.results[0]] = scalars.emit(op, args)
    update.kernel.inplace = whole.inplace_pairs(function)
    assert function.ops[-1].name in (*OPTIMIZERS, "foreach_norm", "cast")
    return update.kernel
