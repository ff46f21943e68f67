"""Level-2 text of contraction kernels from an einsum-like description, and what they should compute in float64.

    Case("bmk,bnk->bmn", dict(b=4, m=17, n=33, k=65), epilogue="gelu")

Letters are kernel-wide dimensions. An index may be a sum with a stride, as convolution windows have: "(2p+q)".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

TORCH = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Epilogue:
    """`reads`: specs of further operands; `body` sees %s (the sum), %r0, %r1, ... and {T}, the accumulator's type."""

    reads: tuple[str, ...]
    body: str
    yields: tuple[str, ...]
    reference: Callable[..., Sequence[torch.Tensor]]


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x)


EPILOGUES = {
    "bias": Epilogue(("n",), "%y0 = arith.addf %s, %r0 : {T}", ("%y0",), lambda s, b: [s + b]),
    "row_bias": Epilogue(("m",), "%y0 = arith.addf %s, %r0 : {T}", ("%y0",), lambda s, b: [s + b[:, None]]),
    "scale": Epilogue(("",), "%y0 = arith.mulf %s, %r0 : {T}", ("%y0",), lambda s, b: [s * b]),
    "relu_residual": Epilogue(
        ("n", "mn"),
        """%u = arith.addf %s, %r0 : {T}
           %z = arith.constant 0.0 : {T}
           %p = arith.maximumf %u, %z : {T}
           %y0 = arith.addf %p, %r1 : {T}""",
        ("%y0",),
        lambda s, b, r: [torch.relu(s + b) + r],
    ),
    "gelu": Epilogue(
        ("n",),
        """%p = arith.addf %s, %r0 : {T}
           %h = arith.constant 0.5 : {T}
           %i = arith.constant 1.0 : {T}
           %c = arith.constant 0.70710678118654752 : {T}
           %q = arith.mulf %p, %c : {T}
           %e = math.erf %q : {T}
           %f = arith.addf %e, %i : {T}
           %g = arith.mulf %p, %h : {T}
           %y1 = arith.mulf %g, %f : {T}""",
        ("%p", "%y1"),
        lambda s, b: [s + b, _gelu(s + b)],
    ),
    "gelu_backward": Epilogue(  # the shape of dX(fc2): the saved pre-activation is read with the tile
        ("mn",),
        """%t = math.tanh %r0 : {T}
           %y0 = arith.mulf %s, %t : {T}""",
        ("%y0",),
        lambda s, x: [s * torch.tanh(x)],
    ),
    "mask": Epilogue(  # needs the place: linalg.index of m and n
        (),
        """%i = linalg.index {m} : index
           %j = linalg.index {n} : index
           %k = arith.cmpi sle, %j, %i : index
           %z = arith.constant -1.0 : {T}
           %y0 = arith.select %k, %s, %z : {T}""",
        ("%y0",),
        lambda s: [
            torch.where(torch.arange(s.shape[-1])[None] <= torch.arange(s.shape[-2])[:, None], s, -torch.ones_like(s))
        ],
    ),
}


@dataclass
class Case:
    spec: str
    sizes: dict[str, int]
    dtype: str = "f32"
    out_dtype: str = ""
    epilogue: str = ""
    beta: bool = False  # the accumulation starts from an input
    inplace: bool = False  # the last epilogue operand (or beta) may share the result's memory
    shapes: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lhs, self.rhs, self.out = re.split(",|->", self.spec)
        self.accumulate = "f64" if self.dtype == "f64" else "f32"
        self.out_dtype = self.out_dtype or self.accumulate
        self.letters = list(dict.fromkeys(re.sub(r"[^a-z]", "", self.out + self.lhs + self.rhs)))
        self.parallel = [c for c in self.letters if c in self.out]

    # --- text ----------------------------------------------------------------------------------------------------

    def _indices(self, spec: str) -> list[str]:
        return re.findall(r"\([^)]*\)|[a-z]", spec)

    def _shape(self, spec: str) -> list[int]:
        def extent(index: str) -> int:
            return sum(f * (self.sizes[c] - 1) for f, c in _terms(index)) + 1

        return [extent(index) for index in self._indices(spec)]

    def _map(self, spec: str, letters: Sequence[str]) -> str:
        def text(index: str) -> str:
            return " + ".join(f"{c} * {f}" if f != 1 else c for f, c in _terms(index))

        return f"affine_map<({', '.join(letters)}) -> ({', '.join(text(i) for i in self._indices(spec))})>"

    def _type(self, spec: str, dtype: str) -> str:
        return f"tensor<{''.join(f'{d}x' for d in self._shape(spec))}{dtype}>"

    def text(self, name: str = "k") -> str:
        acc, ids = self.accumulate, {c: i for i, c in enumerate(self.letters)}
        epilogue = EPILOGUES[self.epilogue] if self.epilogue else None
        reads = [self.out if s == "mn" else s for s in epilogue.reads] if epilogue else []
        results = len(epilogue.yields) if epilogue else 1
        operands = [f"%a: {self._type(self.lhs, self.dtype)}", f"%b: {self._type(self.rhs, self.dtype)}"]
        operands += [f"%e{i}: {self._type(s, acc)}" for i, s in enumerate(reads)]
        if self.beta:
            operands.append(f"%c0: {self._type(self.out, acc)}")
        last = len(operands) - 1
        out_type, sum_type = self._type(self.out, self.out_dtype), self._type(self.out, acc)
        operands += [f"%o{i}: {out_type} {{nova.out}}" for i in range(results)]
        inplace = f"[[{last}, {results - 1}]]" if self.inplace else "[]"
        extend = ""
        left, right = "%l", "%r"
        if self.dtype != acc:
            extend = f"%lf = arith.extf %l : {self.dtype} to {acc}\n %rf = arith.extf %r : {self.dtype} to {acc}"
            left, right = "%lf", "%rf"
        kinds = ", ".join('"parallel"' if c in self.parallel else '"reduction"' for c in self.letters)
        maps = ", ".join(self._map(s, self.letters) for s in (self.lhs, self.rhs, self.out))
        start = (
            "%init = tensor.extract_slice %c0" + self._whole() + f" : {sum_type} to {sum_type}"
            if self.beta
            else f"%zero = arith.constant 0.0 : {acc}\n %empty = tensor.empty() : {sum_type}\n"
            f"%init = linalg.fill ins(%zero : {acc}) outs(%empty : {sum_type}) -> {sum_type}"
        )
        tail, returned = self._tail(epilogue, reads, results, out_type, sum_type)
        return f"""module {{
  func.func private @{name}({", ".join(operands)}) -> ({", ".join([out_type] * results)})
      attributes {{nova.kernel = "contraction", nova.inplace = {inplace},
                  nova.dims = array<i64: {", ".join(str(self.sizes[c]) for c in self.letters)}>}} {{
    {start}
    %acc = linalg.generic {{indexing_maps = [{maps}], iterator_types = [{kinds}]}}
        ins(%a, %b : {self._type(self.lhs, self.dtype)}, {self._type(self.rhs, self.dtype)}) outs(%init : {sum_type})
        attrs = {{dims = array<i64: {", ".join(str(ids[c]) for c in self.letters)}>, nova.contraction}} {{
    ^bb0(%l: {self.dtype}, %r: {self.dtype}, %s: {acc}):
      {extend}
      %m = arith.mulf {left}, {right} : {acc}
      %t = arith.addf %s, %m : {acc}
      linalg.yield %t : {acc}
    }} -> {sum_type}
    {tail}
    return {returned} : {", ".join([out_type] * results)}
  }}
}}"""

    def _whole(self) -> str:
        shape = self._shape(self.out)
        return "".join(f"[{', '.join(map(str, x))}]" for x in ([0] * len(shape), shape, [1] * len(shape)))

    def _tail(
        self, epilogue: Epilogue | None, reads: Sequence[str], results: int, out_type: str, sum_type: str
    ) -> tuple[str, str]:
        acc = self.accumulate
        if epilogue is None and self.out_dtype == acc:
            return "", "%acc"
        epilogue = epilogue or Epilogue((), "", ("%s",), lambda s: [s])
        maps = [self._map(s, self.parallel) for s in (self.out, *reads, *[self.out] * results)]
        operands = ", ".join(["%acc", *(f"%e{i}" for i in range(len(reads)))])
        types = ", ".join([sum_type, *(self._type(s, acc) for s in reads)])
        arguments = [f"%s: {acc}", *(f"%r{i}: {acc}" for i in range(len(reads)))]
        arguments += [f"%d{i}: {self.out_dtype}" for i in range(results)]
        where = {c: self.parallel.index(c) for c in "mn" if c in self.parallel}
        body = epilogue.body.format(T=acc, m=where.get("m", 0), n=where.get("n", 0))
        yields = list(epilogue.yields)
        if self.out_dtype != acc:
            body += "".join(f"\n %n{i} = arith.truncf {y} : {acc} to {self.out_dtype}" for i, y in enumerate(yields))
            yields = [f"%n{i}" for i in range(results)]
        outs = ", ".join(f"%o{i}" for i in range(results))
        all_out = ", ".join([out_type] * results)
        suffix = f":{results}" if results > 1 else ""
        ids = ", ".join(str(self.letters.index(c)) for c in self.parallel)
        parallel = ", ".join(['"parallel"'] * len(self.parallel))
        text = f"""%res{suffix} = linalg.generic {{indexing_maps = [{", ".join(maps)}], iterator_types = [{parallel}]}}
        ins({operands} : {types}) outs({outs} : {all_out}) attrs = {{dims = array<i64: {ids}>}} {{
    ^bb0({", ".join(arguments)}):
      {body}
      linalg.yield {", ".join(yields)} : {", ".join([self.out_dtype] * results)}
    }} -> ({all_out})"""
        return text, ", ".join(f"%res#{i}" for i in range(results)) if results > 1 else "%res"

    # --- values --------------------------------------------------------------------------------------------------

    def inputs(self, seed: int = 0) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def normal(spec: str, dtype: str) -> torch.Tensor:
            return torch.randn(self._shape(spec), generator=generator, dtype=torch.float64).to(TORCH[dtype])

        found = [normal(self.lhs, self.dtype), normal(self.rhs, self.dtype)]
        if self.epilogue:
            reads = EPILOGUES[self.epilogue].reads
            found += [normal(s if s != "mn" else self.out, self.accumulate) for s in reads]
        if self.beta:
            found.append(normal(self.out, self.accumulate))
        return found

    def reference(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results in float64."""
        a, b, *rest = (x.double() for x in inputs)
        total = self._einsum(a, b)
        if self.beta:
            total = total + rest.pop()
        if not self.epilogue:
            return [total]
        return list(EPILOGUES[self.epilogue].reference(total, *rest))

    def _einsum(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        def windows(x: torch.Tensor, spec: str) -> tuple[torch.Tensor, str]:
            shape, stride, letters = [], [], ""
            for axis, index in enumerate(self._indices(spec)):
                for factor, letter in _terms(index):
                    shape.append(self.sizes[letter])
                    stride.append(x.stride(axis) * factor)
                    letters += letter
            return x.as_strided(shape, stride), letters

        (x, left), (y, right) = windows(a.contiguous(), self.lhs), windows(b.contiguous(), self.rhs)
        return torch.einsum(f"{left},{right}->{self.out}", x, y)


def _terms(index: str) -> list[tuple[int, str]]:
    """(factor, letter) of "(2p+q)" or "m"."""
    return [(int(f or 1), c) for f, c in re.findall(r"(\d*)([a-z])", index)]


def loss_head_text(rows: int, columns: int, depth: int, tile: int, logits: bool) -> str:
    """Logits with row maxima and sums of exponentials over tiles of `tile` columns; the label's logit if not stored."""
    plane, partial = f"tensor<{rows}x{columns}xf32>", f"tensor<{rows}x{-(-columns // tile)}xf32>"
    x, w, bias = f"tensor<{rows}x{depth}xf32>", f"tensor<{columns}x{depth}xf32>", f"tensor<{columns}xf32>"
    labels = f"tensor<{rows}xi64>"
    types = ([plane] if logits else []) + [partial, partial] + ([] if logits else [partial])
    names = (["logits"] if logits else []) + ["maxima", "sums"] + ([] if logits else ["picked"])
    outs = ", ".join(f"%{name}_out: {type_} {{nova.out}}" for name, type_ in zip(names, types, strict=True))
    kinds = 'iterator_types = ["parallel", "reduction"]'
    return f"""
#a = affine_map<(d0, d1, d2) -> (d0, d2)>
#b = affine_map<(d0, d1, d2) -> (d1, d2)>
#c = affine_map<(d0, d1, d2) -> (d0, d1)>
#mn = affine_map<(d0, d1) -> (d0, d1)>
#n = affine_map<(d0, d1) -> (d1)>
#m = affine_map<(d0, d1) -> (d0)>
#t = affine_map<(d0, d1) -> (d0, d1 floordiv {tile})>
module {{
  func.func private @head(%x: {x}, %w: {w}, %bias: {bias}, %labels: {labels}, {outs}) -> ({", ".join(types)})
      attributes {{nova.kernel = "contraction", nova.inplace = [],
                  nova.dims = array<i64: {rows}, {columns}, {depth}>}} {{
    %zero = arith.constant 0.0 : f32
    %ninf = arith.constant 0xFF800000 : f32
    %e = tensor.empty() : {plane}
    %et = tensor.empty() : {partial}
    %init = linalg.fill ins(%zero : f32) outs(%e : {plane}) -> {plane}
    %acc = linalg.generic {{indexing_maps = [#a, #b, #c], iterator_types = ["parallel", "parallel", "reduction"]}}
        ins(%x, %w : {x}, {w}) outs(%init : {plane}) attrs = {{dims = array<i64: 0, 1, 2>, nova.contraction}} {{
    ^bb0(%l: f32, %r: f32, %s: f32):
      %m = arith.mulf %l, %r : f32
      %t = arith.addf %s, %m : f32
      linalg.yield %t : f32
    }} -> {plane}
    %logits = linalg.generic {{indexing_maps = [#mn, #n, #mn], iterator_types = ["parallel", "parallel"]}}
        ins(%acc, %bias : {plane}, {bias}) outs({"%logits_out" if logits else "%e"} : {plane})
        attrs = {{dims = array<i64: 0, 1>}} {{
    ^bb0(%p: f32, %q: f32, %s: f32):
      %t = arith.addf %p, %q : f32
      linalg.yield %t : f32
    }} -> {plane}
    %low = linalg.fill ins(%ninf : f32) outs(%et : {partial}) -> {partial}
    %maxima = linalg.generic {{indexing_maps = [#mn, #t], {kinds}}}
        ins(%logits : {plane}) outs(%low : {partial}) attrs = {{dims = array<i64: 0, 1>}} {{
    ^bb0(%p: f32, %s: f32):
      %t = arith.maximumf %s, %p : f32
      linalg.yield %t : f32
    }} -> {partial}
    %none = linalg.fill ins(%zero : f32) outs(%et : {partial}) -> {partial}
    %sums = linalg.generic {{indexing_maps = [#mn, #t, #t], {kinds}}}
        ins(%logits, %maxima : {plane}, {partial}) outs(%none : {partial}) attrs = {{dims = array<i64: 0, 1>}} {{
    ^bb0(%p: f32, %q: f32, %s: f32):
      %d = arith.subf %p, %q : f32
      %e1 = math.exp %d : f32
      %t = arith.addf %s, %e1 : f32
      linalg.yield %t : f32
    }} -> {partial}
    %picked = linalg.generic {{indexing_maps = [#mn, #m, #t], {kinds}}}
        ins(%logits, %labels : {plane}, {labels}) outs(%none : {partial}) attrs = {{dims = array<i64: 0, 1>}} {{
    ^bb0(%p: f32, %q: i64, %s: f32):
      %i = linalg.index 1 : index
      %j = arith.index_cast %i : index to i64
      %c = arith.cmpi eq, %j, %q : i64
      %nothing = arith.constant 0.0 : f32
      %v = arith.select %c, %p, %nothing : f32
      %t = arith.addf %s, %v : f32
      linalg.yield %t : f32
    }} -> {partial}
    return {", ".join(f"%{name}" for name in names)} : {", ".join(types)}
  }}
}}"""
