"""Which names a function's bytecode reads: what a replayed step depends on outside its arguments.

A captured step is replayed without running its Python, so every global, closure variable and attribute that
the Python would have read must be guarded. The bytecode of a function names them all:

    def step(x):                       globals:    model, cfg, F
        return F.relu(model(x)) * cfg.scale
                                       chains:     ("F", "relu"), ("model",), ("cfg", "scale")
                                       attributes: {"relu", "scale"}

Attribute names are also collected by themselves: an object that is reached through a local variable is
guarded on every attribute whose name the code mentions.

A table of names that is read with a constant is a read of that name; with anything else, of all names:

    globals()["SCALE"]                          globals:    SCALE
    sys.modules["config"].width                 imports:    config
    globals()[name]                             open:       "globals"
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
_NOISE = {"PRECALL", "CACHE", "NOP", "EXTENDED_ARG", "PUSH_NULL"}
OWN_MODULE = "__name__"  # stands for the module of the code, in `imports`


@dataclass(frozen=True)
class CodeNames:
    """Names read by a code object and by the functions nested in it."""

    globals: tuple[tuple[str, ...], ...]  # chains that start at a global: ("cfg", "model", "width")
    cells: tuple[tuple[str, ...], ...]  # chains that start at a closure variable
    attributes: frozenset[str]  # every attribute name, whatever it is read from
    written: frozenset[str]  # globals assigned or deleted
    imports: tuple[tuple[int, str], ...]  # what it imports when it runs: (level, name)
    subscripts: bool  # the code indexes something with a constant or a variable
    open: frozenset[str] = frozenset()  # tables read by names that are computed: "globals", "modules"
    matches: bool = False  # a `match` names a class, whose `__match_args__` name attributes


@cache
def names(code: CodeType) -> CodeNames:
    """Names that `code` and the code objects nested in it mention."""
    roots: dict[str, dict[tuple[str, ...], None]] = {"global": {}, "cell": {}}
    attributes: set[str] = set()
    written: set[str] = set()
    imports: dict[tuple[int, str], None] = {}
    constants: list[object] = [0, None]  # the last two: the level and the names of an import
    subscripts = matches = False
    opened: set[str] = set()
    chain: tuple[str, ...] = ()
    kind = ""
    instructions = [i for i in dis.get_instructions(code) if i.opname not in _NOISE]
    for position, instruction in enumerate(instructions):
        op, argument = instruction.opname, instruction.argval
        if op in _GLOBAL or op in _CELL:
            if chain:
                roots[kind][chain] = None
            kind, chain = ("global" if op in _GLOBAL else "cell"), (argument,)
            if argument == "globals":
                key, stored = _key(instructions, position + 2)  # after the call
                if key is None:
                    opened.add("globals")
                else:
                    roots["global"][(key,)] = None
                    written |= {key} if stored else set()
            elif argument in _IMPORTERS:
                _imported_name(_key(instructions, position + 1)[0], imports, opened)
            continue
        if op in _ATTRIBUTE:
            key = _key(instructions, position + 1)[0] if argument == "__dict__" else None
            argument = argument if key is None else key
            attributes.add(argument)
            if chain:
                chain = (*chain, argument)
                if chain == ("sys", "modules") or argument == "import_module":
                    _imported_name(_key(instructions, position + 1)[0], imports, opened)
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
        elif op == "MATCH_CLASS":
            matches = True
            if isinstance(constants[1], tuple):
                attributes.update(name for name in constants[1] if isinstance(name, str))
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
            opened |= inner.open
            subscripts, matches = subscripts or inner.subscripts, matches or inner.matches
    return CodeNames(
        tuple(roots["global"]),
        tuple(roots["cell"]),
        frozenset(attributes),
        frozenset(written),
        tuple(imports),
        subscripts,
        frozenset(opened),
        matches,
    )


_IMPORTERS = {"__import__", "import_module"}


def _key(instructions: list[dis.Instruction], position: int) -> tuple[str | None, bool]:
    """The constant with which a table is read at a position, or a function called, and whether it is written."""
    found = instructions[position : position + 4]
    if found and found[0].opname in _ATTRIBUTE and found[0].argval == "get":
        del found[0]
    if len(found) < 2:
        return None, False
    own = found[0].opname in _GLOBAL and found[0].argval == OWN_MODULE
    if not own and not (found[0].opname == "LOAD_CONST" and isinstance(found[0].argval, str)):
        return None, False
    if found[1].opname == "LOAD_CONST" and len(found) > 2:  # the default of `get`
        del found[1]
    use = found[1].opname
    if not use.startswith(("BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR", "CALL")) and found[1].argrepr != "[]":
        return None, False  # the constant is part of a larger expression
    return (OWN_MODULE if own else found[0].argval), use.startswith(("STORE", "DELETE"))


def _imported_name(key: str | None, imports: dict[tuple[int, str], None], opened: set[str]) -> None:
    if key is None or key.startswith("."):
        opened.add("modules")
    else:
        imports[0, key] = None


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
