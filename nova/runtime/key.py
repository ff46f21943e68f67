"""Structural keys: what was compiled, for what, by what. Never an address, a name or a line number.

A `Key` is a plain dict and its digest. The dict stays beside the digest, so that a miss can be explained by
comparing with the nearest entry. Serialisation is canonical: sorted keys, floats by their bits, and a TypeError for
anything whose text could depend on the process (sets are sorted, other objects are refused).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any


def canonical(value: Any) -> Any:
    """`value` as JSON with one spelling each; distinct values stay distinct (1, 1.0, True, "1", (1,))."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return {"i": str(value)}
    if isinstance(value, float):
        return {"f": struct.pack(">d", value).hex()}
    if isinstance(value, bytes):
        return {"b": hashlib.sha256(value).hexdigest()}
    if isinstance(value, (list, tuple)):
        return [canonical(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return {"s": sorted((canonical(item) for item in value), key=_dump)}
    if isinstance(value, Mapping):
        pairs = [[canonical(key), canonical(item)] for key, item in value.items()]
        return {"d": sorted(pairs, key=lambda pair: _dump(pair[0]))}
    raise TypeError(f"a cache key cannot hold a {type(value).__name__}: its text may differ between processes")


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


@dataclass(frozen=True)
class Key:
    digest: str
    parts: Mapping[str, Any]

    @staticmethod
    def of(parts: Mapping[str, Any]) -> Key:
        return Key(hashlib.sha256(_dump(canonical(parts)).encode()).hexdigest(), dict(parts))

    def difference(self, other: Mapping[str, Any]) -> list[str]:
        """Names of the parts in which the two keys differ."""
        names = sorted({*self.parts, *other})
        return [n for n in names if _dump(canonical(self.parts.get(n))) != _dump(canonical(other.get(n)))]


# ---- who compiles


@cache
def source_digest() -> str:
    """Hash of Nova's own sources: any change of the compiler is a new compiler."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


@cache
def compiler_version() -> dict[str, str]:
    """Everything that turns the same graph into other machine code, except the graph and the target."""
    packages = {name: _version(name) for name in ("torch", "llvmlite", "numba-cuda-mlir")}
    return {"nova": source_digest(), **packages}


@cache
def host_cpu() -> dict[str, str]:
    """Name and features of this CPU as LLVM sees them: object code is made for exactly these."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    return {"name": llvm.get_host_cpu_name(), "features": ",".join(sorted(n for n, on in features.items() if on))}


# ---- what is compiled

_IGNORED = frozenset({"sym_name", "nova.name", "sym_visibility"})  # names carry no meaning
_SYMBOL = re.compile(r"@(?:[\w.$-]+|\"[^\"]*\")")


def structure(op: Any) -> str:
    """An MLIR operation as text in which values are numbered in order of definition, attributes are sorted,
    symbols are numbered in order of appearance, and locations and names are absent."""
    return "\n".join(_Structure().lines(op))


class _Structure:
    def __init__(self) -> None:
        self.values: dict[Any, int] = {}
        self.symbols: dict[str, int] = {}

    def number(self, name: str) -> str:
        return f"@{self.symbols.setdefault(name, len(self.symbols))}"

    def symbol(self, match: re.Match[str]) -> str:
        return self.number(match[0])

    def value(self, value: Any) -> str:
        return f"%{self.values.setdefault(value, len(self.values))}"

    def attribute(self, name: str, attribute: Any) -> str:
        text = str(attribute)
        if name in ("arg_attrs", "res_attrs"):
            text = re.sub(r'nova\.name = "(?:[^"\\]|\\.)*"', "", text)
        is_symbol = text.startswith("@") or name == "callee"  # an "@" inside a string means nothing
        return f"{name}={_SYMBOL.sub(self.symbol, text) if is_symbol else text}"

    def lines(self, op: Any, depth: int = 0) -> Iterator[str]:
        operation = getattr(op, "operation", op)
        attributes = operation.attributes
        if "sym_name" in attributes:  # a definition claims its number where it stands
            self.number(f"@{attributes['sym_name'].value}")
        names = sorted(getattr(a, "name", a) for a in attributes)  # the bindings' maps iterate over one or the other
        text = ", ".join(self.attribute(name, attributes[name]) for name in names if name not in _IGNORED)
        operands = ", ".join(self.value(v) for v in operation.operands)
        results = ", ".join(f"{self.value(r)}: {r.type}" for r in operation.results)
        yield f"{'  ' * depth}{results} = {operation.name}({operands}) {{{text}}}"
        for region in operation.regions:
            for block in region.blocks:
                arguments = ", ".join(f"{self.value(a)}: {a.type}" for a in block.arguments)
                yield f"{'  ' * depth}^({arguments})"
                for inner in block.operations:
                    yield from self.lines(inner, depth + 1)


def module_key(op: Any, **parts: Any) -> Key:
    """Key of an MLIR module or function with the compiler's version; `parts` adds target, options, ..."""
    return Key.of({"structure": structure(op), "compiler": compiler_version(), **parts})


_STRING = r"\"(?:[^\"\\]|\\.)*\""
_FLAT = rf"(?:[^()\"]|{_STRING})*"  # text without parentheses
_LOCATION = re.compile(rf"\s*\bloc\((?:[^()\"]|{_STRING}|\({_FLAT}(?:\({_FLAT}\){_FLAT})*\))*\)")


_TOKENS = re.compile(rf"@{_STRING}|@[\w.$-]+|%[\w.$-]+|{_STRING}")


def normal_text(text: str) -> str:
    """MLIR text with values and symbols renamed in order of appearance, and without locations."""
    numbers: dict[str, str] = {}

    def rename(match: re.Match[str]) -> str:
        token = match[0]
        if token[0] == '"':  # what strings hold is no reference
            return token
        return numbers.setdefault(token, f"{token[0]}{len(numbers)}")

    plain = re.sub(r"^#loc\d*.*$", "", _LOCATION.sub("", text), flags=re.MULTILINE)
    return _TOKENS.sub(rename, plain)


def kernel_key(text: str, target: Any) -> Key:
    """Key of one kernel's MLIR text for a target."""
    parts = {"kernel": normal_text(text), "target": describe_target(target), "compiler": compiler_version()}
    if getattr(target, "is_gpu", False):
        from nova.gpu import ptxas

        parts["ptxas"] = ptxas.version()  # its machine code is kept with the kernel
    return Key.of(parts)


def describe_target(target: Any) -> Any:
    """A target's fields as plain data (dataclasses all the way down)."""
    if dataclasses.is_dataclass(target) and not isinstance(target, type):
        return {
            "class": type(target).__name__,
            **{field.name: describe_target(getattr(target, field.name)) for field in dataclasses.fields(target)},
        }
    if isinstance(target, Mapping):
        return {str(key): describe_target(item) for key, item in target.items()}
    if isinstance(target, Sequence) and not isinstance(target, (str, bytes)):
        return [describe_target(item) for item in target]
    return target
