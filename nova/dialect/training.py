"""What training needs besides tensor algebra: the loss head, random numbers, optimizers, synchronisation, fallback.

Optimizer hyperparameters are 0-d floats (f64 inputs of the step, so changing one never recompiles). An optional
`found_inf` (0-d f32, from a gradient scaler) other than 0 turns the update into the identity.
"""

from __future__ import annotations

import json

from nova.dialect.base import Instance, check, check_like, op
from nova.dialect.types import FLOATS, Described


@op("sce", "logits target *weight", "loss lse", "has_weight:bool ignore_index:int label_smoothing:float reduction:int")
def _sce(it: Instance) -> None:
    """Softmax cross entropy of logits [N,C] with class indices target [N] (i64), and lse [N] = logsumexp(logits).

    Per row with target t != ignore_index: (1-s) * w[t] * (lse - x[t]) + s/C * sum over c of w[c] * (lse - x[c]),
    s = label_smoothing, w = weight [C] or 1; ignored rows give 0. reduction 0: loss [N]; 1 (mean): the sums of both
    terms, each over W = sum of w[t] (so that W = 0 gives NaN); 2: sum (loss 0-d). A target out of [0,C) that is not
    ignore_index is an error at run time. loss has logits' dtype; lse is f32 for low precision.
    """
    logits, target = it.ins[:2]
    loss, lse = it.outs
    check(len(logits.shape) == 2 and logits.dtype in FLOATS, "logits {} must be a float [N,C]", logits)
    check(target == Described(logits.shape[:1], "i64"), "target {} must be i64[{}]", target, logits.shape[0])
    _check_loss(it, logits, loss, lse)


def _check_loss(it: Instance, logits: Described, loss: Described, lse: Described) -> None:
    check(it["reduction"] in (0, 1, 2), "reduction {} is not 0, 1 or 2", it["reduction"])
    expected = logits.shape[:1] if it["reduction"] == 0 else ()
    check(loss.shape == expected, "loss {} must have shape {}", loss, list(expected))
    statistic = Described(logits.shape[:1], "f64" if logits.dtype == "f64" else "f32")
    check_like(lse, statistic, "lse", "expected")
    check(len(it.optional()) == it["has_weight"], "has_weight is {}, weights: {}", it["has_weight"], len(it.optional()))
    for weight in it.optional():
        check(weight.shape == logits.shape[1:], "weight {} must have shape {}", weight, list(logits.shape[1:]))


@op(
    "sce_backward",
    "dloss logits target lse *weight",
    "dlogits",
    "has_weight:bool ignore_index:int label_smoothing:float reduction:int",
)
def _sce_backward(it: Instance) -> None:
    """Gradient of sce in logits. Per row, with p = e**(x - lse):

    dx[c] = g*(1-s)*w[t] * (p[c] - [c == t]) + g*s/C * (p[c] * sum(w) - w[c]); ignored rows give 0. g is dloss[n]
    (reduction 0) or dloss; for the mean both factors, g*(1-s)*w[t] and g*s/C, are divided by W = sum of w[t].
    """
    dloss, logits, target, lse = it.ins[:4]
    check(target == Described(logits.shape[:1], "i64"), "target {} must be i64[{}]", target, logits.shape[0])
    _check_loss(it, logits, dloss, lse)
    check_like(it.outs[0], logits, "dlogits", "logits")


def _random(name: str, attrs: str, dtypes: frozenset[str], meaning: str) -> None:
    def verify(it: Instance) -> None:
        check(it.ins[0] == Described((), "i64"), "seed {} must be a 0-d i64", it.ins[0])
        check(it.outs[0].dtype in dtypes, "result {} has the wrong dtype", it.outs[0])

    verify.__doc__ = (
        f"{meaning} Philox4x32-10 with key = seed (low, high word) and counter (i//4, 0, stream, 0): element i of the "
        "row-major result uses word i % 4. Equal seed, stream and shape give equal values."
    )
    op(name, "seed", "y", f"stream:int {attrs}".strip())(verify)


_random("uniform", "", FLOATS, "Uniform on [0,1): (word >> 8) * 2**-24.")
_random("normal", "", FLOATS, "Standard normal, Box-Muller of two words.")
_random("randint", "low:int high:int", frozenset({"i64", "i32"}), "Uniform integers in [low, high).")


def _check_state(it: Instance, names: str, values: list[Described]) -> None:
    parameter = it.ins[0]
    for name, value in zip(names.split(), values, strict=False):
        check(value.shape == parameter.shape, "{} {} and parameter {} differ in shape", name, value, parameter)


def _check_scalars(it: Instance, first: int, last: int) -> None:
    for position in range(first, last):
        name, value = it.spec.operands.fixed[position], it.ins[position]
        check(value.shape == () and value.dtype in FLOATS, "{} {} must be a 0-d float", name, value)


def _check_found_inf(it: Instance) -> None:
    if it["has_found_inf"]:
        check(it.ins[-1] == Described((), "f32"), "found_inf {} must be a 0-d f32", it.ins[-1])


@op(
    "sgd",
    "p g lr momentum dampening weight_decay buf?has_buf first?has_first found_inf?has_found_inf",
    "new_p *new_buf",
    "nesterov:bool maximize:bool has_buf:bool has_first:bool has_found_inf:bool",
)
def _sgd(it: Instance) -> None:
    """torch.optim.SGD for one parameter: g = (-g if maximize) + weight_decay * p; with a buffer
    buf' = momentum * buf + (1 - dampening) * g and g = g + momentum * buf' (nesterov) or buf'; p' = p - lr * g.

    first (0-d i1 or float): where it is not 0, buf' = g instead, as on PyTorch's first step.
    """
    check_like(it.ins[1], it.ins[0], "gradient", "parameter")
    _check_scalars(it, 2, 6)
    optional = it["has_buf"] + it["has_first"] + it["has_found_inf"]
    check(len(it.optional()) == optional, "{} optional operands, flags say {}", len(it.optional()), optional)
    check(len(it.outs) == 1 + it["has_buf"], "{} results with has_buf = {}", len(it.outs), it["has_buf"])
    check(it["has_buf"] or not (it["has_first"] or it["nesterov"]), "has_first and nesterov need a buffer")
    _check_state(it, "buf", it.optional()[: it["has_buf"]])
    _check_state(it, "new_p new_buf", it.outs)
    _check_found_inf(it)


@op(
    "adam",
    "p g m v step lr beta1 beta2 eps weight_decay vmax?amsgrad found_inf?has_found_inf",
    "new_p new_m new_v new_step *new_vmax",
    "decoupled:bool amsgrad:bool maximize:bool has_found_inf:bool",
)
def _adam(it: Instance) -> None:
    """torch.optim.Adam, or AdamW with decoupled, for one parameter.

    step' = step + 1; g = -g if maximize; p = p * (1 - lr * weight_decay) if decoupled else g = g + weight_decay * p;
    m' = lerp(m, g, 1 - beta1); v' = beta2 * v + (1 - beta2) * g * g; vmax' = max(vmax, v') (amsgrad);
    p' = p - lr / (1 - beta1**step') * m' / (sqrt(vmax' or v') / sqrt(1 - beta2**step') + eps).
    """
    check_like(it.ins[1], it.ins[0], "gradient", "parameter")
    _check_state(it, "m v", it.ins[2:4])
    _check_scalars(it, 4, 10)
    optional = it["amsgrad"] + it["has_found_inf"]
    check(len(it.optional()) == optional, "{} optional operands, flags say {}", len(it.optional()), optional)
    check(len(it.outs) == 4 + it["amsgrad"], "{} results with amsgrad = {}", len(it.outs), it["amsgrad"])
    _check_state(it, "new_p new_m new_v", it.outs[:3])
    check_like(it.outs[3], it.ins[4], "new_step", "step")
    _check_found_inf(it)


@op(
    "adagrad",
    "p g sum step lr lr_decay eps weight_decay *found_inf",
    "new_p new_sum new_step",
    "maximize:bool has_found_inf:bool",
)
def _adagrad(it: Instance) -> None:
    """torch.optim.Adagrad for one parameter: step' = step + 1; g = (-g if maximize) + weight_decay * p;
    sum' = sum + g * g; p' = p - lr / (1 + (step' - 1) * lr_decay) * g / (sqrt(sum') + eps).
    """
    check_like(it.ins[1], it.ins[0], "gradient", "parameter")
    _check_state(it, "sum", it.ins[2:3])
    _check_scalars(it, 3, 8)
    check(len(it.optional()) == it["has_found_inf"], "{} optional operands", len(it.optional()))
    _check_state(it, "new_p new_sum", it.outs[:2])
    _check_found_inf(it)


@op(
    "rmsprop",
    "p g square_avg step lr alpha eps weight_decay momentum grad_avg?centered buf?has_momentum found_inf?has_found_inf",
    "new_p new_square_avg new_step *new_grad_avg_buf",
    "centered:bool has_momentum:bool maximize:bool has_found_inf:bool",
)
def _rmsprop(it: Instance) -> None:
    """torch.optim.RMSprop for one parameter: step' = step + 1; g = (-g if maximize) + weight_decay * p;
    s' = alpha * s + (1 - alpha) * g * g; with centered a' = lerp(a, g, 1 - alpha) and d = sqrt(s' - a' * a') + eps,
    else d = sqrt(s') + eps; with momentum buf' = momentum * buf + g / d and p' = p - lr * buf', else
    p' = p - lr * g / d. Optional operands and results in the order grad_avg (centered), buf (has_momentum).
    """
    check_like(it.ins[1], it.ins[0], "gradient", "parameter")
    _check_state(it, "square_avg", it.ins[2:3])
    _check_scalars(it, 3, 9)
    state = it["centered"] + it["has_momentum"]
    check(len(it.optional()) == state + it["has_found_inf"], "{} optional operands", len(it.optional()))
    check(len(it.outs) == 3 + state, "{} results, flags say {}", len(it.outs), 3 + state)
    _check_state(it, "new_p new_square_avg", it.outs[:2])
    _check_found_inf(it)


@op("foreach_norm", "*xs/1024", "norms", "ord:float")
def _foreach_norm(it: Instance) -> None:
    """norms[i] = the vector norm of order `ord` (1, 2 or inf) of xs[i]; a 1-d float of as many elements as operands."""
    check(it.outs[0].shape == (len(it.ins),), "result {} of {} norms", it.outs[0], len(it.ins))
    for x in it.ins:
        check(x.dtype in FLOATS, "operand {} must be a float", x)


@op("bucket_ready", "", "", "bucket:int", pure=False)
def _bucket_ready(it: Instance) -> None:
    """All gradients of a bucket are computed above: their reduction across ranks may start. Never moved or removed."""
    check(it["bucket"] >= 0, "bucket {} is negative", it["bucket"])


@op("aten_call", "*tensors/16", "*results/16", "op:str args:str", pure=False)
def _aten_call(it: Instance) -> None:
    """A call of the ATen overload `op` ("aten.topk.default") through PyTorch.

    args is JSON: {"args": [..], "kwargs": {..}}, where {"t": i} stands for operand i, {"dtype": ".."},
    {"device": ".."}, {"layout": ".."} and {"memory_format": ".."} for those, {"float": ".."} for inf and nan, and
    {"complex": ".."}. With a discardable attribute nova.dynamic the sizes of the results are only known at run time.
    """
    template = json.loads(it["args"])
    check(set(template) == {"args", "kwargs"}, "args must have the keys 'args' and 'kwargs', not {}", sorted(template))
    used = sorted(set(_operand_numbers(template)))
    check(used == list(range(len(it.ins))), "args uses operands {} of {}", used, len(it.ins))


def _operand_numbers(value: object) -> list[int]:
    if isinstance(value, dict):
        if set(value) == {"t"} and isinstance(value["t"], int):
            return [value["t"]]
        value = list(value.values())
    return [n for item in value for n in _operand_numbers(item)] if isinstance(value, list) else []
