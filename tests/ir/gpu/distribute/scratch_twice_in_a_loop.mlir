// RUN: nova-opt distribute
// Two reductions an iteration write to places of their own: when one is written, every thread has passed the barrier of
// the other since it was read. So neither waits, at the loop's top either.

module attributes {nova_tile.workspace = 0 : i64} {
func.func @sum(%arg0: !llvm.ptr<1>, %arg1: !llvm.ptr<1>) attributes {nova_tile.grid = array<i64: 1, 1, 1>, nova_tile.threads = 64 : i64, nova_tile.min_blocks = 0 : i64} {
  %c0 = arith.constant 0x00000000 : f32
  %c1 = arith.constant 0 : i32
  %c2 = arith.constant 256 : i32
  %c3 = arith.constant 64 : i32
  %c4 = arith.constant 0 : i64
  %v3 = scf.for %i1 = %c1 to %c2 step %c3 iter_args(%v2 = %c0) -> (f32) : i32 {
    %v4 = "nova_tile.load"(%arg0, %c4, %i1) {strides = array<i64: 1>, extents = array<i64: -1>, vector = 1 : i64, wide = false, fill = 0x00000000 : f32, layout = {subgroup = array<i64: 2>, batch = array<i64: 1>, outer = array<i64: 1>, thread = array<i64: 32>, element = array<i64: 1>, subgroup_strides = array<i64: 1>, thread_strides = array<i64: 1>}} : (!llvm.ptr<1>, i64, i32) -> vector<64xf32>
    %v5 = "nova_tile.reduce"(%v4) {dims = array<i64: 0>, kind = "addf", layout = {subgroup = array<i64: 2>, batch = array<i64: 1>, outer = array<i64: 1>, thread = array<i64: 32>, element = array<i64: 1>, subgroup_strides = array<i64: 1>, thread_strides = array<i64: 1>}} : (vector<64xf32>) -> f32
    %v6 = vector.broadcast %v5 : f32 to vector<64xf32>
    %v7 = "arith.mulf"(%v4, %v6) {} : (vector<64xf32>, vector<64xf32>) -> vector<64xf32>
    %v8 = "nova_tile.reduce"(%v7) {dims = array<i64: 0>, kind = "addf", layout = {subgroup = array<i64: 2>, batch = array<i64: 1>, outer = array<i64: 1>, thread = array<i64: 32>, element = array<i64: 1>, subgroup_strides = array<i64: 1>, thread_strides = array<i64: 1>}} : (vector<64xf32>) -> f32
    %v9 = "arith.addf"(%v2, %v8) {} : (f32, f32) -> f32
    scf.yield %v9 : f32
  }
  "nova_tile.store_scalar"(%v3, %arg1, %c4) {} : (f32, !llvm.ptr<1>, i64) -> ()
  return
}
}

// CHECK: scf.for
// CHECK-NOT: nvvm.barrier
// CHECK: st.shared
// CHECK: nvvm.barrier
// CHECK-NOT: nvvm.barrier
// CHECK: st.shared
// CHECK: nvvm.barrier
// CHECK-NOT: nvvm.barrier
// CHECK: scf.yield %{{.*}} : f32
