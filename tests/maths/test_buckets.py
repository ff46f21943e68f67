"""Gradient buckets: every gradient once, in order, within the limit, ready as early as possible."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nova import mlir
from nova.dialect.buckets import DEFAULT_BYTES, Bucket, Gradient, insert_markers, plan_buckets

gradients = st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(["f32", "bf16"])), min_size=1, max_size=40).map(
    lambda sizes: [Gradient(f"p{i}", n, dtype, 2 * i + 1) for i, (n, dtype) in enumerate(sizes)]
)


@settings(deadline=None)
@given(gradients, st.integers(1, 20000), st.none() | st.integers(1, 5000))
def test_a_plan_is_a_partition_in_order(grads, limit, first):
    buckets = plan_buckets(grads, limit, first)
    assert sorted(g.name for b in buckets for g in b.gradients) == sorted(g.name for g in grads)
    for bucket in buckets:
        assert len({g.dtype for g in bucket.gradients}) == 1
        positions = [g.position for g in bucket.gradients]
        assert positions == sorted(positions)
        assert bucket.bytes <= max(limit, first or 0) or len([g for g in bucket.gradients if g.bytes]) == 1
    ready = [b.ready_after for b in buckets]
    assert ready == sorted(ready)


@settings(deadline=None)
@given(gradients, st.integers(1, 20000))
def test_no_two_neighbours_could_have_been_one(grads, limit):
    buckets = plan_buckets(grads, limit)
    for dtype in {g.dtype for g in grads}:
        same = [b for b in buckets if b.gradients[0].dtype == dtype]
        for a, b in zip(same, same[1:]):
            assert a.bytes + b.gradients[0].bytes > limit


def test_gpt2_sized_buckets():
    layers = [Gradient(f"w{i}", 768 * 3072, "f32", i) for i in range(24)]  # 9 MB each: two a bucket
    buckets = plan_buckets(layers)
    assert len(buckets) == 12 and all(len(b.gradients) == 2 and b.bytes <= DEFAULT_BYTES for b in buckets)
    assert [b.ready_after for b in buckets] == list(range(1, 24, 2))


def test_large_gradient_and_first_bucket():
    grads = [Gradient("small", 10, "f32", 0), Gradient("head", 10**7, "f32", 1), Gradient("last", 10, "f32", 2)]
    assert [[g.name for g in b.gradients] for b in plan_buckets(grads)] == [["small"], ["head"], ["last"]]
    grads = [Gradient(f"g{i}", 256, "f32", i) for i in range(6)]
    assert [len(b.gradients) for b in plan_buckets(grads, limit=4096, first=1024)] == [1, 4, 1]
    with pytest.raises(ValueError, match="positive size"):
        plan_buckets(grads, 0)


def test_offsets_pack_without_gaps():
    bucket = Bucket((Gradient("a", 3, "f32", 0), Gradient("b", 0, "f32", 1), Gradient("c", 5, "f32", 2)))
    assert bucket.offsets() == [0, 3, 3]


def test_markers_stand_right_behind_the_last_gradient():
    module = mlir.parse("""
      func.func @step(%x: tensor<3xf32>) -> (tensor<3xf32>, tensor<3xf32>) {
        %0 = "nova.exp"(%x) : (tensor<3xf32>) -> tensor<3xf32>
        %1 = "nova.neg"(%0) : (tensor<3xf32>) -> tensor<3xf32>
        %2 = "nova.sin"(%1) : (tensor<3xf32>) -> tensor<3xf32>
        return %0, %2 : tensor<3xf32>, tensor<3xf32>
      }""")
    buckets = plan_buckets([Gradient("a", 3, "f32", 0), Gradient("b", 3, "f32", 2)], limit=12)
    insert_markers(module.body.operations[0].regions[0].blocks[0], buckets)
    assert module.operation.verify()
    names = [op.operation.name for op in module.body.operations[0].regions[0].blocks[0].operations]
    assert names == ["nova.exp", "nova.bucket_ready", "nova.neg", "nova.sin", "nova.bucket_ready", "func.return"]
    mlir.run_passes(module, "cse")
    assert str(module).count("nova.bucket_ready") == 2
