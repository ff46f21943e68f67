"""Every setting in one typed table: environment variables, and what a user passes to `nova.jit`.

`knobs` reads the environment on each access, so a test or a notebook may change a variable at any time.
`Options` is frozen and is the part of a cache key that a user can set.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

# name, default, meaning: printed by `python -m nova doctor`, and the whole list
TABLE: tuple[tuple[str, str, str], ...] = (
    ("NOVA", "1", "0 runs every step eagerly, as if it were not decorated"),
    ("NOVA_DEBUG", "0", "1 a line for each capture: what, why, how long; 2 also every kernel with its schedule"),
    ("NOVA_DUMP", "", "folder for the IR of every level of the steps that are compiled"),
    ("NOVA_CACHE", "", "folder of the artifact cache (default ~/.cache/nova); 0 keeps nothing on disk"),
    ("NOVA_VERIFY", "0", "1 checks the IR after every pass"),
    ("NOVA_DISABLE", "", "names of optional passes to leave out, separated by commas"),
    ("NOVA_THREADS", "0", "threads of the compiled kernels; 0 takes PyTorch's"),
    ("NOVA_WORKERS", "", "processes that compile kernels (default: one a core, at most eight); 0 uses this process"),
    ("NOVA_NATIVE", "1", "0 checks guards and binds arguments in Python only"),
)
_DEFAULTS = {name: default for name, default, _ in TABLE}


def _read(name: str) -> str:
    return os.environ.get(name, _DEFAULTS[name])


def _number(name: str) -> int:
    text = _read(name).strip() or "0"
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be a whole number, not {text!r}") from None


class Knobs:
    """The environment, typed."""

    @property
    def enabled(self) -> bool:
        return _read("NOVA") != "0"

    @property
    def debug(self) -> int:
        return _number("NOVA_DEBUG")

    @property
    def dump(self) -> Path | None:
        text = _read("NOVA_DUMP")
        return Path(text) if text else None

    @property
    def disk_cache(self) -> bool:
        return _read("NOVA_CACHE") != "0"

    @property
    def verify(self) -> bool:
        return _read("NOVA_VERIFY") not in ("", "0")

    @property
    def disabled_passes(self) -> frozenset[str]:
        return frozenset(name.strip() for name in _read("NOVA_DISABLE").split(",") if name.strip())

    @property
    def threads(self) -> int:
        return _number("NOVA_THREADS")

    @property
    def native(self) -> bool:
        return _read("NOVA_NATIVE") != "0"


knobs = Knobs()


@dataclass(frozen=True)
class Options:
    """What a user can choose for one step.

    precision: "float32" computes in the tensors' own type; "bf16" casts the operands of float32 contractions.
    on_unsupported: "eager" runs operations without a lowering through PyTorch inside the step; "error" refuses them.
    backend: "compile" for the device that the step's tensors are on; "interpret" runs the captured graph node by node
        in PyTorch (to tell a capture bug from a compiler bug).
    """

    precision: Literal["float32", "bf16"] = "float32"
    on_unsupported: Literal["eager", "error"] = "eager"
    backend: Literal["compile", "interpret"] = "compile"

    def __post_init__(self) -> None:
        choices = {
            "precision": ("float32", "bf16"),
            "on_unsupported": ("eager", "error"),
            "backend": ("compile", "interpret"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"nova.jit: {name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")

    @classmethod
    def of(cls, **given: Any) -> Options:
        """Options from keyword arguments, with an error that lists the known ones."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise TypeError(f"nova.jit has no option {name!r}; options: {', '.join(known)}")
        return cls(**given)

    def key(self) -> tuple[tuple[str, Any], ...]:
        """For cache keys."""
        return tuple((field.name, getattr(self, field.name)) for field in fields(self))
