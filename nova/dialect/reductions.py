"""Reductions over dimensions, and the row-wise ops kept whole: softmax, layer norm, batch norm.

bf16 and f16 inputs accumulate in f32 and round once, at the result. Statistics of low-precision inputs are f32.
"""

from __future__ import annotations

from nova.dialect.base import Instance, check, check_axis, check_like, op
from nova.dialect.types import FLOATS, INTEGERS, LOW_PRECISION, Described, Shape


def reduced_shape(shape: Shape, dims: tuple[int, ...], keepdim: bool) -> Shape:
    """Shape of a reduction of `shape` over `dims`."""
    if keepdim:
        return tuple(1 if axis in dims else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in dims)


def statistics_dtype(dtype: str) -> str:
    """Dtype in which mean and standard deviation of a tensor of `dtype` are kept."""
    return "f32" if dtype in LOW_PRECISION else dtype


def _verify_reduction(it: Instance, dims: tuple[int, ...], dtype: str) -> None:
    (x,), (y,) = it.ins, it.outs
    for axis in dims:
        check_axis(axis, len(x.shape), "reduced dim")
    check(tuple(sorted(set(dims))) == dims, "dims {} must be sorted and distinct", list(dims))
    shape = reduced_shape(x.shape, dims, it["keepdim"])
    check(y.shape == shape, "result {} of reducing {} over {} must have shape {}", y, x, list(dims), list(shape))
    check(y.dtype == dtype, "result {} must be {}", y, dtype)


def _reduction(name: str, allowed: frozenset[str], meaning: str) -> None:
    def verify(it: Instance) -> None:
        x = it.ins[0]
        check(x.dtype in allowed, "operand {} has a dtype that {} does not take", x, name)
        _verify_reduction(it, it["dims"], x.dtype)

    verify.__doc__ = f"{meaning} over dims (sorted i64 array); they stay as size 1 with keepdim. Same dtype as x."
    op(name, "x", "y", "dims:ints keepdim:bool")(verify)


_reduction("reduce_sum", FLOATS | INTEGERS, "Sum (0 of nothing)")
_reduction("reduce_prod", FLOATS | INTEGERS, "Product (1 of nothing)")
_reduction("reduce_max", FLOATS | INTEGERS | {"bool"}, "Maximum, NaN if any element is")
_reduction("reduce_min", FLOATS | INTEGERS | {"bool"}, "Minimum, NaN if any element is")
_reduction("reduce_any", frozenset({"bool"}), "Disjunction (false of nothing)")
_reduction("reduce_all", frozenset({"bool"}), "Conjunction (true of nothing)")


def _arg(name: str, meaning: str) -> None:
    def verify(it: Instance) -> None:
        _verify_reduction(it, (it["dim"],), "i64")

    verify.__doc__ = f"Index (i64) of the first {meaning} along dim; a NaN counts as the {meaning}."
    op(name, "x", "y", "dim:int keepdim:bool")(verify)


_arg("argmax", "maximum")
_arg("argmin", "minimum")


def _softmax(name: str, operands: str, meaning: str) -> None:
    def verify(it: Instance) -> None:
        x, y = it.ins[0], it.outs[0]
        check_axis(it["dim"], len(x.shape))
        check(x.dtype in FLOATS, "operand {} must be a float", x)
        for other in (*it.ins[1:], y):
            check_like(other, x, "operand or result", "first operand")

    verify.__doc__ = f"{meaning} All tensors: one float shape and dtype; dim: i64."
    op(name, operands, "y" if operands == "x" else "dx", "dim:int")(verify)


_softmax("softmax", "x", "e**(x - max) / sum(e**(x - max)) along dim.")
_softmax("log_softmax", "x", "x - max - log(sum(e**(x - max))) along dim.")
_softmax("softmax_backward", "dy y", "(dy - sum(dy * y)) * y along dim; y is the forward result.")
_softmax("log_softmax_backward", "dy y", "dy - e**y * sum(dy) along dim; y is the forward result.")


def _check_affine(params: list[Described], shape: Shape, x: Described, what: str) -> None:
    for param in params:
        check(param.shape == shape, "{} {} of input {} must have shape {}", what, param, x, list(shape))
        check(param.dtype in FLOATS, "{} {} must be a float", what, param)


@op("layer_norm", "x *params", "y mean rstd", "axes:int eps:float")
def _layer_norm(it: Instance) -> None:
    """Normalises over the `axes` trailing dims: y = (x - mean) * rstd * weight + bias, rstd = 1 / sqrt(var + eps).

    x, y: [.., *normalised]. params: none, (weight) or (weight, bias), each [*normalised]. mean, rstd: x's shape with
    the trailing dims 1, f32 for low-precision x. var is the biased variance.
    """
    x, (y, mean, rstd) = it.ins[0], it.outs
    axes = it["axes"]
    check(0 < axes <= len(x.shape), "axes {} is out of range for {}", axes, x)
    check(len(it.optional()) <= 2, "at most weight and bias, got {} parameters", len(it.optional()))
    _check_affine(it.optional(), x.shape[-axes:], x, "parameter")
    check_like(y, x, "result", "input")
    statistic = Described(x.shape[:-axes] + (1,) * axes, statistics_dtype(x.dtype))
    check_like(mean, statistic, "mean", "expected")
    check_like(rstd, statistic, "rstd", "expected")


@op("layer_norm_backward", "dy x mean rstd *weight", "dx *dparams", "axes:int")
def _layer_norm_backward(it: Instance) -> None:
    """Gradients of layer_norm from dy and the saved x, mean and rstd.

    With h = (x - mean) * rstd and g = dy * weight: dx = rstd * (g - avg(g) - h * avg(g * h)), averages over the
    normalised dims; with a weight also dweight = sum(dy * h) and dbias = sum(dy) over the leading dims.
    Results: (dx), or (dx, dweight, dbias) if there is a weight.
    """
    dy, x, mean, rstd = it.ins[:4]
    axes = it["axes"]
    check_like(dy, x, "dy", "x")
    check_like(it.outs[0], x, "dx", "x")
    statistic = Described(x.shape[:-axes] + (1,) * axes, statistics_dtype(x.dtype))
    check_like(mean, statistic, "mean", "expected")
    check_like(rstd, statistic, "rstd", "expected")
    weight = it.optional()
    check(len(weight) <= 1, "at most one weight, got {}", len(weight))
    check(len(it.outs) == 1 + 2 * len(weight), "{} results with {} weights", len(it.outs), len(weight))
    _check_affine([*weight, *it.outs[1:]], x.shape[-axes:], x, "weight or its gradient")


@op("batch_norm", "x *params", "y mean var rstd", "eps:float")
def _batch_norm(it: Instance) -> None:
    """Training-mode batch norm over every dim but 1: y = (x - mean) * rstd * weight + bias.

    x, y: [N,C,..]. params: none, (weight) or (weight, bias), each [C]. mean, var (biased), rstd = 1/sqrt(var + eps):
    [C], f32 for low-precision x. Running statistics are ordinary arithmetic on mean and var around this op; with
    fixed statistics the whole op is.
    """
    x = it.ins[0]
    check(len(x.shape) >= 2, "input {} needs a channel dim", x)
    check(len(it.optional()) <= 2, "at most weight and bias, got {} parameters", len(it.optional()))
    _check_affine(it.optional(), x.shape[1:2], x, "parameter")
    check_like(it.outs[0], x, "result", "input")
    for statistic in it.outs[1:]:
        check_like(statistic, Described(x.shape[1:2], statistics_dtype(x.dtype)), "statistic", "expected")


@op("batch_norm_backward", "dy x mean rstd *weight", "dx dweight dbias")
def _batch_norm_backward(it: Instance) -> None:
    """Gradients of training-mode batch_norm from dy [N,C,..] and the saved x, mean [C], rstd [C].

    With h = (x - mean) * rstd: dbias = sum(dy), dweight = sum(dy * h) over all dims but 1, and
    dx = rstd * weight * (dy - dbias/n - h * dweight/n), n elements a channel (weight 1 if absent).
    """
    dy, x, mean, rstd = it.ins[:4]
    check_like(dy, x, "dy", "x")
    check_like(it.outs[0], x, "dx", "x")
    check(len(it.optional()) <= 1, "at most one weight, got {}", len(it.optional()))
    _check_affine([mean, rstd, *it.optional(), *it.outs[1:]], x.shape[1:2], x, "per-channel tensor")
