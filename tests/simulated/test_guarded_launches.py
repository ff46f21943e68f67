"""Launches that do nothing once a step has found an error: guards, the step's flag, and the copies of new state."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nova import mlir, pipeline
from nova.gpu import distribute, simulate
from nova.schedule import target
from nova.tile import guarded_copy, interpret
from nova.tile.builder import Program, module_text
from nova.tile.layout import blocked

BOARD = target.PRESETS["h200"]
LAYOUT = blocked([64], [2], [32])


def both(text: str, buffers, memory=()) -> None:
    """Runs on the interpreter and on the simulator; the results must be the same."""
    copies = [b.copy() for b in buffers]
    interpret.run(text, copies, memory=memory)
    with mlir.context():
        level5 = distribute.distribute(mlir.parse(text))
    simulate.run(level5, buffers, memory=memory)
    for a, b in zip(copies, buffers, strict=True):
        np.testing.assert_array_equal(a, b)


def doubling() -> Program:
    """y = 2 x, by way of shared memory, so that barriers stand in the guard's region."""
    p = Program("double", 4, (1, 1, 1), 64)
    x = p.load(p.args[0], 0, [0], "f32", LAYOUT, strides=[1])
    total = p.reduce(x, [0], "addf")
    p.store(p.binary("arith.addf", x, x), p.args[1], 0, [0], strides=[1])
    p.store_scalar(total, p.args[2], 0)
    p.guard_first()
    return p


@pytest.mark.parametrize("flag", [0, 1])
def test_a_guarded_launch_writes_only_while_nothing_is_flagged(flag):
    x, y, total = np.arange(64, dtype=np.float32), np.full(64, 7, np.float32), np.zeros(1, np.float32)
    both(module_text([doubling()]), [x, y, total, np.array([flag, 0, 0, 0])])
    assert (y == (7 if flag else 2 * x)).all() and total[0] == (0 if flag else x.sum())


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("linked", [False, True])
def test_a_check_flags_its_record_and_the_step(bad, linked):
    p = Program("check", 2, (1, 1, 1), 64)
    x = p.load(p.args[0], 0, [0], "i64", LAYOUT, strides=[1])
    p.check(p.cmp("sgt", x, 60), x, p.args[1])
    text = module_text([p])
    x = np.full(64, 3)
    x[5] = 61 if bad else 60
    for run in (interpret.run, lambda text, *more, **keys: simulate.run(_threads(text), *more, **keys)):
        step, record = np.zeros(4, np.int64), np.zeros(4, np.int64)
        record[2] = step.ctypes.data if linked else 0
        run(text, [x.copy(), record], memory=[step])
        assert record[:2].tolist() == ([1, 61] if bad else [0, 0])
        assert step.tolist() == [int(bad and linked), 0, 0, 0]


def _threads(text: str) -> str:
    with mlir.context():
        return distribute.distribute(mlir.parse(text))


@pytest.mark.parametrize("flag", [0, 1])
def test_copies_of_all_sizes_in_one_launch(flag):
    small = dataclasses.replace(BOARD, sms=2)
    *_, (_, module) = pipeline.lower_kernel(guarded_copy.TEXT, small)
    round_ = 2 * guarded_copy.BLOCKS_PER_SM * guarded_copy.THREADS * guarded_copy.VECTOR  # what all blocks move at once
    sizes = [1, 4, 8, 16, 17, 64, 4102, 0, 2 * round_ + 3]
    rng = np.random.default_rng(0)
    sources = [rng.integers(1, 255, n + 16, dtype=np.uint8) for n in sizes]
    targets = [np.zeros(n + 16, np.uint8) for n in sizes]
    record = np.array([flag, 0, 0, 0])
    words = [len(sizes), record.ctypes.data]
    for source, place, n in zip(sources, targets, sizes, strict=True):
        words += [place.ctypes.data, source.ctypes.data, n]
    simulate.run(str(module), [np.array(words)], memory=[record, *sources, *targets])
    for source, place, n in zip(sources, targets, sizes, strict=True):
        assert not place[n:].any() and (place[:n] == (0 if flag else source[:n])).all()
