"""Random operators, recorded on Nova's own numbers.

    aten.bernoulli_(x, 0.9)      u = nova.uniform(%seed, stream=3, shape);  x' = (u < 0.9).to(f32)
    aten.randn([4, 5])           nova.normal(%seed, stream=4, [4, 5])

Distributions that need rejection (poisson, binomial, gamma, dirichlet) run through PyTorch with a generator
seeded from the same seed and stream.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nova.capture.rules import decomposed, rule
from nova.capture.views import aten
from nova.errors import UnsupportedError

if TYPE_CHECKING:
    from nova.capture.record import Recorder

# bits of a uniform draw that the narrow types hold below 1
_UNIFORM_STEPS = {torch.bfloat16: 2.0**8, torch.float16: 2.0**11}


def _refuse_generator(rec: Recorder, generator: Any) -> None:
    defaults = (torch.default_generator, *torch.cuda.default_generators)
    if generator is not None and all(generator is not default for default in defaults):
        raise UnsupportedError(
            "a torch.Generator of one's own inside the step; use PyTorch's default generator", rec.line
        )


def _demand(holds: bool, message: str) -> None:
    """What eager demands of a parameter; in its words, since nothing of eager's runs here."""
    if not holds:
        raise RuntimeError(message)


def _demand_all(holds: Tensor, message: str) -> None:
    """The same of a tensor's values, on every call."""
    torch.ops.aten._assert_async.msg(holds.all(), message)


def _demand_probabilities(p: Tensor) -> None:
    _demand_all((p >= 0) & (p <= 1), "Expected p_in >= 0 && p_in <= 1 to be true, but got false.")


def uniform(rec: Recorder, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draws in [0, 1) of a floating type."""
    stream = rec.next_stream()
    draws = torch.ops.nova.uniform(rec.seed_tensor(device), stream, list(shape))
    steps = _UNIFORM_STEPS.get(dtype)
    return ((draws * steps).floor() / steps).to(dtype) if steps else draws.to(dtype)


def normal(rec: Recorder, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype.is_complex:
        part = torch.float64 if dtype == torch.complex128 else torch.float32
        return torch.view_as_complex(normal(rec, [*shape, 2], part, device) * math.sqrt(0.5))
    return torch.ops.nova.normal(rec.seed_tensor(device), rec.next_stream(), list(shape)).to(dtype)


def randint(rec: Recorder, shape: Any, low: int, high: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if high <= low:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    return torch.ops.nova.randint(rec.seed_tensor(device), rec.next_stream(), low, high, list(shape)).to(dtype)


def exponential(rec: Recorder, shape: Any, dtype: torch.dtype, rate: float, device: torch.device) -> Tensor:
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    draws = torch.ops.nova.uniform(rec.seed_tensor(device), rec.next_stream(), list(shape)).to(compute)
    # half a step above the draw: neither 0 nor infinity comes out
    return (-torch.log1p(-(draws + 2.0**-25)) / rate).to(dtype)


def _place(device: Any, like: Tensor | None = None) -> torch.device:
    """Where a new tensor goes; "cuda" is PyTorch's current device."""
    if device is None:
        return like.device if like is not None else torch.device("cpu")
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


def _default(dtype: torch.dtype | None) -> torch.dtype:
    return torch.get_default_dtype() if dtype is None else dtype


# ---- draws into a tensor ---------------------------------------------------------------------------------------


@decomposed(aten.uniform_)
def uniform_(rec: Recorder, x: Tensor, low: float = 0.0, high: float = 1.0, generator: Any = None) -> Tensor:
    _refuse_generator(rec, generator)
    _demand(low <= high, f"uniform_ expects to return a [from, to) range, but found from={low:g} > to={high:g}")
    draws = uniform(rec, x.shape, x.dtype, x.device)
    return x.copy_(draws if (low, high) == (0.0, 1.0) else draws * (high - low) + low)


@decomposed(aten.normal_)
def normal_(rec: Recorder, x: Tensor, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Tensor:
    _refuse_generator(rec, generator)
    _demand(std >= 0, f"normal expects std >= 0.0, but found std {std:g}")
    draws = normal(rec, x.shape, x.dtype, x.device)
    return x.copy_(draws if (mean, std) == (0.0, 1.0) else draws * std + mean)


@decomposed(aten.bernoulli_.float)
def bernoulli_(rec: Recorder, x: Tensor, p: float = 0.5, generator: Any = None) -> Tensor:
    _refuse_generator(rec, generator)
    _demand(0 <= p <= 1, f"bernoulli_ expects p to be in [0, 1], but got p={p:g}")
    return x.copy_((uniform(rec, x.shape, torch.float32, x.device) < p).to(x.dtype))


@decomposed(aten.bernoulli_.Tensor)
def bernoulli_tensor_(rec: Recorder, x: Tensor, p: Tensor, generator: Any = None) -> Tensor:
    _refuse_generator(rec, generator)
    _demand_probabilities(p)
    return x.copy_((uniform(rec, x.shape, torch.float32, x.device) < p).to(x.dtype))


@decomposed(aten.bernoulli.default)
def bernoulli(rec: Recorder, p: Tensor, generator: Any = None) -> Tensor:
    _refuse_generator(rec, generator)
    _demand_probabilities(p)
    return (uniform(rec, p.shape, torch.float32, p.device) < p).to(p.dtype)


@decomposed(aten.bernoulli.p)
def bernoulli_p(rec: Recorder, x: Tensor, p: float, generator: Any = None) -> Tensor:
    _refuse_generator(rec, generator)
    _demand(0 <= p <= 1, f"bernoulli_ expects p to be in [0, 1], but got p={p:g}")
    return (uniform(rec, x.shape, torch.float32, x.device) < p).to(x.dtype)


@decomposed(aten.native_dropout.default)
def native_dropout(rec: Recorder, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    if not train:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = uniform(rec, x.shape, torch.float32, x.device) < 1.0 - p  # as bernoulli_ draws it: one mask on all devices
    return x * keep * (1.0 / (1.0 - p) if p < 1.0 else 0.0), keep


@decomposed(aten.exponential_)
def exponential_(rec: Recorder, x: Tensor, lambd: float = 1.0, generator: Any = None) -> Tensor:
    _refuse_generator(rec, generator)
    _demand(lambd > 0, f"exponential_ expects lambda > 0.0, but found lambda={lambd:g}")
    return x.copy_(exponential(rec, x.shape, x.dtype, lambd, x.device))


@decomposed(aten.log_normal_)
def log_normal_(rec: Recorder, x: Tensor, mean: float = 1.0, std: float = 2.0, generator: Any = None) -> Tensor:
    _refuse_generator(rec, generator)
    _demand(std > 0, f"log_normal_ expects std > 0.0, but found std={std:g}")
    return x.copy_(torch.exp(normal(rec, x.shape, torch.float32, x.device) * std + mean).to(x.dtype))


@decomposed(aten.cauchy_)
def cauchy_(rec: Recorder, x: Tensor, median: float = 0.0, sigma: float = 1.0, generator: Any = None) -> Tensor:
    _refuse_generator(rec, generator)
    _demand(sigma > 0, f"cauchy_ expects sigma > 0.0, but found sigma={sigma:g}")
    draws = uniform(rec, x.shape, torch.float32, x.device) + 2.0**-25
    return x.copy_((median + sigma * torch.tan(math.pi * (draws - 0.5))).to(x.dtype))


@decomposed(aten.geometric_)
def geometric_(rec: Recorder, x: Tensor, p: float, generator: Any = None) -> Tensor:
    _refuse_generator(rec, generator)
    _demand(0 < p < 1, f"geometric_ expects p to be in (0, 1), but got p={p:g}")
    draws = exponential(rec, x.shape, torch.float32, 1.0, x.device)
    return x.copy_(torch.ceil(draws / -math.log1p(-p)).clamp_min(1.0).to(x.dtype))


@decomposed(aten.random_.default)
def random_(rec: Recorder, x: Tensor, generator: Any = None) -> Tensor:
    _refuse_generator(rec, generator)
    high = (
        2 ** (53 if x.dtype == torch.float64 else 24) + 1
        if x.is_floating_point()
        else 2
        if x.dtype == torch.bool
        else torch.iinfo(x.dtype).max
    )
    return x.copy_(randint(rec, x.shape, 0, high, torch.int64, x.device).to(x.dtype))


@decomposed(aten.random_.to)
def random_to_(rec: Recorder, x: Tensor, to: int, generator: Any = None) -> Tensor:
    _refuse_generator(rec, generator)
    return x.copy_(randint(rec, x.shape, 0, to, torch.int64, x.device).to(x.dtype))


@decomposed(getattr(aten.random_, "from"))
def random_from_(rec: Recorder, x: Tensor, low: int, to: int | None, generator: Any = None) -> Tensor:
    _refuse_generator(rec, generator)
    return x.copy_(
        randint(rec, x.shape, low, torch.iinfo(torch.int64).max if to is None else to, torch.int64, x.device).to(
            x.dtype
        )
    )


# ---- draws that make a tensor ----------------------------------------------------------------------------------


@decomposed(aten.rand)
def rand(
    rec: Recorder, size: list[int], dtype: torch.dtype | None = None, generator: Any = None, device: Any = None,
    **_: Any,
) -> Tensor:  # fmt: skip
    _refuse_generator(rec, generator)
    return uniform(rec, size, _default(dtype), _place(device))


@decomposed(aten.randn)
def randn(
    rec: Recorder, size: list[int], dtype: torch.dtype | None = None, generator: Any = None, device: Any = None,
    **_: Any,
) -> Tensor:  # fmt: skip
    _refuse_generator(rec, generator)
    return normal(rec, size, _default(dtype), _place(device))


@decomposed(aten.rand_like)
def rand_like(rec: Recorder, x: Tensor, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return uniform(rec, x.shape, dtype or x.dtype, _place(device, x))


@decomposed(aten.randn_like)
def randn_like(rec: Recorder, x: Tensor, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Tensor:
    return normal(rec, x.shape, dtype or x.dtype, _place(device, x))


@rule(aten.randint, aten.randint_like)
def randint_(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    _refuse_generator(rec, kwargs.get("generator"))
    bound = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    like = bound.get("self")
    dtype = bound.get("dtype") or (like.dtype if like is not None else torch.int64)
    shape = like.shape if like is not None else bound["size"]
    with torch._C._AutoDispatchBelowAutograd(), rec:
        return randint(rec, shape, bound.get("low", 0), bound["high"], dtype, _place(bound.get("device"), like))


@decomposed(aten.randperm)
def randperm(
    rec: Recorder, n: int, dtype: torch.dtype | None = None, generator: Any = None, device: Any = None, **_: Any
) -> Tensor:
    _refuse_generator(rec, generator)
    return torch.argsort(randint(rec, [n], 0, 1 << 62, torch.int64, _place(device))).to(dtype or torch.int64)


@rule(aten.normal)
def normal_of(rec: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "out" in kwargs:
        raise UnsupportedError("torch.normal(out=...)", rec.line)
    _refuse_generator(rec, kwargs.get("generator"))
    bound = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    mean, std = bound.get("mean", 0.0), bound.get("std", 1.0)
    tensors = [t for t in (mean, std) if isinstance(t, Tensor)]
    with torch._C._AutoDispatchBelowAutograd(), rec:
        if isinstance(std, Tensor):
            _demand_all(std >= 0, "normal expects all elements of std >= 0.0")
        else:
            _demand(std >= 0, f"normal expects std >= 0.0, but found std {std:g}")
        if tensors:
            shape = torch.broadcast_shapes(*(t.shape for t in tensors))
            return normal(rec, shape, tensors[0].dtype, tensors[0].device) * std + mean
        return normal(rec, bound["size"], _default(bound.get("dtype")), _place(bound.get("device"))) * std + mean


@decomposed(aten.multinomial.default)
def multinomial(rec: Recorder, p: Tensor, count: int, replacement: bool = False, generator: Any = None) -> Tensor:
    """Without replacement: the largest p / exponential; with: where uniform draws fall in the cumulative sum."""
    _refuse_generator(rec, generator)
    if not replacement and count > p.shape[-1]:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    _demand_all((p >= 0) & (p < math.inf), "probability tensor contains either `inf`, `nan` or element < 0")
    _demand_all(p.sum(-1) > 0, "invalid multinomial distribution (sum of probabilities <= 0)")
    if replacement and count > 1:
        steps = p.float().cumsum(-1)
        draws = uniform(rec, [*p.shape[:-1], count], torch.float32, p.device) * steps[..., -1:]
        return torch.searchsorted(steps, draws, right=True).clamp_max(p.shape[-1] - 1)
    race = p / exponential(rec, p.shape, p.dtype, 1.0, p.device)
    return race.argmax(-1, keepdim=True) if count == 1 else race.topk(count, -1)[1]


@decomposed(aten.rrelu_with_noise.default)
def rrelu_with_noise(
    rec: Recorder, x: Tensor, noise: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False,
    generator: Any = None,
) -> Tensor:  # fmt: skip
    _refuse_generator(rec, generator)
    if not training:
        return torch.where(x >= 0, x, x * ((lower + upper) / 2))
    slope = torch.where(x <= 0, uniform(rec, x.shape, x.dtype, x.device) * (upper - lower) + lower, torch.ones_like(x))
    noise.copy_(slope)
    return x * slope


def _seeded(name: str, arguments: int) -> Any:
    def draw(rec: Recorder, *args: Any, generator: Any = None) -> Tensor:
        _refuse_generator(rec, args[arguments] if len(args) > arguments else generator)
        return getattr(torch.ops.nova, name)(*args[:arguments], rec.seed_tensor(args[0].device), rec.next_stream())

    return draw


decomposed(aten.poisson.default)(_seeded("poisson", 1))
decomposed(aten.binomial.default)(_seeded("binomial", 2))
decomposed(aten._standard_gamma.default)(_seeded("standard_gamma", 1))
decomposed(aten._sample_dirichlet.default)(_seeded("dirichlet", 1))
