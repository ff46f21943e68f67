"""Which names a function's bytecode reads: what a replayed step depends on outside its arguments.

A captured step is replayed without running its Python, so every global, closure variable and attribute that
the Python would have read must be guarded. The bytecode of a function names them all:

    def step(x):                       globals:    model, cfg, F
        return F.relu(model(x)) * cfg.scale
                                       chains:     ("F", "relu"), ("model",), ("cfg", "scale")
                                       attributes: {"relu", "scale"}

Attribute names are also collected by themselves: an object that is reached through a local variable is
guarded on every attribute whose name the code mentions.
"""

from __future__ import annotations

import dis
import hashlib
from dataclasses import dataclass
from functools import cache
from types import CodeType

_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME"}
_CELL = {"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"}
_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"}
_IMPORT = {"IMPORT_FROM"}
_WRITE = {"STORE_GLOBAL", "DELETE_GLOBAL"}


@dataclass(frozen=True)
class CodeNames:
    """Names read by a code object and by the functions nested in it."""

    globals: tuple[tuple[str, ...], ...]  # chains that start at a global: ("cfg", "model", "width")
    cells: tuple[tuple[str, ...], ...]  # chains that start at a closure variable
    attributes: frozenset[str]  # every attribute name, whatever it is read from
    written: frozenset[str]  # globals assigned or deleted
    imports: tuple[tuple[int, str], ...]  # what it imports when it runs: (level, name)
    subscripts: bool  # the code indexes something with a constant or a variable


@cache
def names(code: CodeType) -> CodeNames:
    """Names that `code` and the code objects nested in it mention."""
    roots: dict[str, dict[tuple[str, ...], None]] = {"global": {}, "cell": {}}
    attributes: set[str] = set()
    written: set[str] = set()
    imports: dict[tuple[int, str], None] = {}
    constants: list[object] = [0, None]  # the last two: the level and the names of an import
    subscripts = False
    chain: tuple[str, ...] = ()
    kind = ""
    for instruction in dis.get_instructions(code):
        op, argument = instruction.opname, instruction.argval
        if op in _GLOBAL or op in _CELL:
            if chain:
                roots[kind][chain] = None
            kind, chain = ("global" if op in _GLOBAL else "cell"), (argument,)
            continue
        if op in _ATTRIBUTE:
            attributes.add(argument)
            if chain:
                chain = (*chain, argument)
            continue
        if op in ("PRECALL", "CACHE", "NOP", "EXTENDED_ARG", "PUSH_NULL"):
            continue
        if chain:
            roots[kind][chain] = None
            chain = ()
        if op in _WRITE:
            written.add(argument)
        elif op in _IMPORT:
            attributes.add(argument)
        elif op == "LOAD_CONST":
            constants = [constants[1], argument]
        elif op == "IMPORT_NAME":
            imports[constants[0] if isinstance(constants[0], int) else 0, argument] = None
        elif op.startswith("BINARY_SUBSCR") or op == "BINARY_OP":
            subscripts = True
    if chain:
        roots[kind][chain] = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = names(constant)
            roots["global"].update(dict.fromkeys(inner.globals))
            own = {*constant.co_cellvars}
            roots["cell"].update((c, None) for c in inner.cells if c[0] not in own)
            attributes |= inner.attributes
            written |= inner.written
            imports.update(dict.fromkeys(inner.imports))
            subscripts = subscripts or inner.subscripts
    return CodeNames(
        tuple(roots["global"]),
        tuple(roots["cell"]),
        frozenset(attributes),
        frozenset(written),
        tuple(imports),
        subscripts,
    )


@cache
def fingerprint(code: CodeType) -> str:
    """A hash of what `code` does, equal in another process; line numbers and file names do not enter."""
    digest = hashlib.sha256()

    def feed(value: object) -> None:
        if isinstance(value, CodeType):
            feed(value.co_code)
            feed((value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars, value.co_flags))
            feed((value.co_argcount, value.co_kwonlyargcount, value.co_posonlyargcount))
            feed(value.co_consts)
        elif isinstance(value, tuple):
            digest.update(b"(")
            for item in value:
                feed(item)
            digest.update(b")")
        elif isinstance(value, frozenset):
            feed(tuple(sorted(map(repr, value))))
        else:
            text = value if isinstance(value, bytes) else repr(value).encode()
            digest.update(f"{type(value).__name__}:{len(text)}:".encode() + text)

    feed(code)
    return digest.hexdigest()
