"""Level 2 attention: the fused ops that attention lowers to, with the layouts of all operands absorbed.

An operand is a whole contiguous buffer; how attention reads or writes it is its access, an integer array

    [offset, strides..]        element (i, j, ..) of the logical tensor is flat(buffer)[offset + i*s0 + j*s1 ..]

So q, k and v may be slices of one packed [B, T, 3*H*D] buffer (then all three are the same operand), out may be written
head-transposed, and no repacking op is left. A broadcast dim of the mask has stride 0. An absent tensor has the empty
access, and its operand is any value. Destinations come last among the operands, one a result; a result is its
destination's new contents. Tensors written into one destination share it, and their results are equal.

`sizes` is [B, H, Hkv, T, S, D, Dv]. The meaning is that of nova.attention and nova.attention_backward; scores and
probabilities never exist as tensors.
"""

from __future__ import annotations

from nova.dialect.base import Instance, check, op
from nova.dialect.types import FLOATS, numel

# logical tensor -> its dims, as positions in `sizes`
_B, _H, _HKV, _T, _S, _D, _DV = range(7)
DIMS: dict[str, tuple[int, ...]] = {
    "q": (_B, _H, _T, _D), "k": (_B, _HKV, _S, _D), "v": (_B, _HKV, _S, _DV), "out": (_B, _H, _T, _DV),
    "lse": (_B, _H, _T), "dout": (_B, _H, _T, _DV), "mask": (_B, _H, _T, _S), "seed": (),
    "dq": (_B, _H, _T, _D), "dk": (_B, _HKV, _S, _D), "dv": (_B, _HKV, _S, _DV), "dmask": (_B, _H, _T, _S),
}  # fmt: skip

FORWARD = (("q", "k", "v", "mask", "seed"), ("out", "lse"))
_SAVED = ("dout", "q", "k", "v", "out", "lse", "mask", "seed")
BACKWARD = (_SAVED, ("dq", "dk", "dv"))
BACKWARD_QUERY = (_SAVED, ("dq",))
BACKWARD_KEY = (_SAVED, ("dk", "dv"))
BACKWARD_MASK = (_SAVED, ("dmask",))

# op name -> (tensors read, tensors written)
TENSORS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "online_attention": FORWARD,
    "online_attention_backward": BACKWARD,
    "online_attention_backward_query": BACKWARD_QUERY,
    "online_attention_backward_key": BACKWARD_KEY,
    "online_attention_backward_mask": BACKWARD_MASK,
}


def _declaration(tensors: tuple[tuple[str, ...], tuple[str, ...]]) -> tuple[str, str, str]:
    """Operands, results and attributes: a destination operand is called `into_<tensor>`."""
    reads, writes = tensors
    operands = " ".join([*reads, *(f"into_{name}" for name in writes)])
    accesses = " ".join(f"{name}_access:ints" for name in (*reads, *writes))
    return operands, " ".join(writes), f"sizes:ints {accesses} causal:bool scale:float dropout_p:float stream:int"


def _verify(it: Instance) -> None:
    reads, writes = TENSORS[it.spec.name]
    sizes = it["sizes"]
    check(len(sizes) == 7, "sizes must be [B, H, Hkv, T, S, D, Dv], got {}", list(sizes))
    check(sizes[_HKV] > 0 and sizes[_H] % sizes[_HKV] == 0, "{} key heads do not divide {}", sizes[_HKV], sizes[_H])
    check(it.ins[len(reads) :] == it.outs, "results must have the types of the destinations")
    optional = {"mask", "seed", *writes}
    for name, buffer in zip((*reads, *writes), it.ins, strict=True):
        access, dims = it[f"{name}_access"], DIMS[name]
        if not access and name in optional:
            continue
        fits = len(access) == 1 + len(dims)
        check(fits, "access {} = {} must be [offset, {} strides]", name, list(access), len(dims))
        offset, *strides = access
        shape = [sizes[d] for d in dims]
        last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        inside = numel(tuple(shape)) == 0 or (min(access) >= 0 and last < numel(buffer.shape))
        check(inside, "access {} reaches element {} of {}", name, last, buffer)
        if name not in ("mask", "seed"):
            check(buffer.dtype in FLOATS, "{} {} must be a float", name, buffer)
    check(0.0 <= it["dropout_p"] <= 1.0, "dropout_p {} is no probability", it["dropout_p"])
    check(it["dropout_p"] == 0.0 or bool(it["seed_access"]), "dropout without a seed")


@op("online_attention", *_declaration(FORWARD))
def _online_attention(it: Instance) -> None:
    """nova.attention as one pass over key tiles with a running maximum and sum."""
    _verify(it)


@op("online_attention_backward", *_declaration(BACKWARD))
def _online_attention_backward(it: Instance) -> None:
    """dq, dk and dv of nova.attention_backward in one pass that owns all query heads of a key head."""
    _verify(it)


@op("online_attention_backward_query", *_declaration(BACKWARD_QUERY))
def _online_attention_backward_query(it: Instance) -> None:
    """The half that reduces over keys: dq of nova.attention_backward."""
    _verify(it)


@op("online_attention_backward_key", *_declaration(BACKWARD_KEY))
def _online_attention_backward_key(it: Instance) -> None:
    """The half that reduces over queries: dk and dv of nova.attention_backward."""
    _verify(it)


@op("online_attention_backward_mask", *_declaration(BACKWARD_MASK))
def _online_attention_backward_mask(it: Instance) -> None:
    """The gradient of an additive mask: the scores' gradient, summed over the mask's broadcast dims (stride 0)."""
    _verify(it)
