"""Structural keys: equal for equal structure, different for any difference, and never process-dependent."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nova.runtime.key import Key, canonical, describe_target, kernel_key, normal_text

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))


def typed(value):
    """`value` such that == is equality of structure: 1, 1.0 and True differ, -0.0 and 0.0 differ."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return (type(value).__name__, repr(value))


@given(values, values)
@settings(max_examples=300, deadline=None)
def test_keys_are_equal_iff_the_values_are(a, b):
    assert (Key.of({"x": a}).digest == Key.of({"x": b}).digest) == (typed(a) == typed(b))


def test_scalars_of_different_types_differ():
    spellings = [1, 1.0, True, "1", b"1", None, 0.0, -0.0, [1], {"i": "1"}, {"f": "3ff0000000000000"}, {1: 1}, {"1": 1}]
    assert len({Key.of({"x": value}).digest for value in spellings}) == len(spellings)


def test_order_of_dicts_and_sets_is_irrelevant_and_of_lists_is_not():
    assert Key.of({"a": 1, "b": {"x", "y", "z"}}).digest == Key.of({"b": {"z", "x", "y"}, "a": 1}).digest
    assert Key.of({"a": [1, 2]}).digest != Key.of({"a": [2, 1]}).digest


def test_objects_are_refused():
    with pytest.raises(TypeError, match="object"):
        canonical({"x": [object()]})


def test_difference_names_the_parts():
    key = Key.of({"graph": "a", "target": "zen", "options": {"fast": True}})
    assert key.difference({"graph": "a", "target": "sky", "options": {"fast": 1}}) == ["options", "target"]


def test_digest_is_the_same_in_another_process():
    program = (
        "from nova.runtime.key import Key\nprint(Key.of({'s': {'b', 'a', 'c'}, 'f': 0.1, 'd': {'k': (1, 2)}}).digest)"
    )
    digests = set()
    for seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        digests.add(subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True,
                                   check=True).stdout.strip())  # fmt: skip
    assert digests == {Key.of({"s": {"b", "a", "c"}, "f": 0.1, "d": {"k": (1, 2)}}).digest}


KERNEL = """
func.func @layer_norm_0(%arg0: tensor<8x16xf32>, %arg1: tensor<16xf32>) -> tensor<8x16xf32> attributes {n = 1 : i64} {
  %0 = "nova.mul"(%arg0, %arg1) : (tensor<8x16xf32>, tensor<16xf32>) -> tensor<8x16xf32> loc("h.0"("a.py":3:1))
  %1 = "nova.add"(%0, %arg1) : (tensor<8x16xf32>, tensor<16xf32>) -> tensor<8x16xf32>
  return %1 : tensor<8x16xf32>
}
#loc1 = loc("a.py":9:9)
"""


@dataclass(frozen=True)
class Target:
    name: str = "cpu"
    cores: int = 2


def digest(text: str, target: Target | None = None) -> str:
    return kernel_key(text, target or Target()).digest


def test_kernel_key_ignores_names_values_and_lines():
    renamed = KERNEL.replace("@layer_norm_0", "@ln_17").replace("%arg0", "%x").replace("%0", "%product")
    moved = renamed.replace('loc("h.0"("a.py":3:1))', 'loc("h.7"("b (copy).py":99:4))').replace("a.py", "c.py")
    assert digest(KERNEL) == digest(renamed) == digest(moved)
    assert "loc" not in normal_text(KERNEL)


@pytest.mark.parametrize(("old", "new"), [
    ("8x16", "8x17"), ("f32", "f64"), ("nova.mul", "nova.div"), ("n = 1", "n = 2"), ("%0, %arg1", "%arg1, %0"),
    ('"nova.add"(%0', '"nova.add"(%arg0'), ("return %1", "return %0"),
])  # fmt: skip
def test_kernel_key_sees_every_edit(old, new):
    assert digest(KERNEL) != digest(KERNEL.replace(old, new))


def test_kernel_key_depends_on_the_target():
    assert digest(KERNEL) != digest(KERNEL, Target(cores=4))
    assert describe_target(Target()) == {"class": "Target", "name": "cpu", "cores": 2}
