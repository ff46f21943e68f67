// RUN: nova-opt distribute
// Two reductions of a row that need nothing of each other meet in shared memory at once: one barrier, a pair of sums a
// warp. The third needs the second, and stands alone.

module attributes {nova_tile.workspace = 0 : i64} {
func.func @rows(%arg0: !llvm.ptr<1>, %arg1: !llvm.ptr<1>) attributes {nova_tile.grid = array<i64: 1, 1, 1>, nova_tile.threads = 128 : i64, nova_tile.min_blocks = 0 : i64} {
  %c0 = arith.constant 0 : i64
  %c1 = arith.constant 0 : i32
  %v1 = "nova_tile.load"(%arg0, %c0, %c1, %c1) {strides = array<i64: 256, 1>, extents = array<i64: -1, -1>, vector = 2 : i64, wide = false, fill = 0x00000000 : f32, layout = {subgroup = array<i64: 1, 4>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 1, 32>, element = array<i64: 1, 2>, subgroup_strides = array<i64: 0, 1>, thread_strides = array<i64: 0, 1>}} : (!llvm.ptr<1>, i64, i32, i32) -> vector<1x256xf32>
  %v2 = arith.mulf %v1, %v1 : vector<1x256xf32>
  %v3 = "nova_tile.reduce"(%v1) {dims = array<i64: 1>, kind = "addf", layout = {subgroup = array<i64: 1, 4>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 1, 32>, element = array<i64: 1, 2>, subgroup_strides = array<i64: 0, 1>, thread_strides = array<i64: 0, 1>}} : (vector<1x256xf32>) -> vector<1xf32>
  %v4 = "nova_tile.reduce"(%v2) {dims = array<i64: 1>, kind = "addf", layout = {subgroup = array<i64: 1, 4>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 1, 32>, element = array<i64: 1, 2>, subgroup_strides = array<i64: 0, 1>, thread_strides = array<i64: 0, 1>}} : (vector<1x256xf32>) -> vector<1xf32>
  %v5 = "nova_tile.expand"(%v4) {dims = array<i64: 1>, layout = {subgroup = array<i64: 1, 4>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 1, 32>, element = array<i64: 1, 2>, subgroup_strides = array<i64: 0, 1>, thread_strides = array<i64: 0, 1>}} : (vector<1xf32>) -> vector<1x256xf32>
  %v6 = arith.mulf %v1, %v5 : vector<1x256xf32>
  %v7 = "nova_tile.reduce"(%v6) {dims = array<i64: 1>, kind = "addf", layout = {subgroup = array<i64: 1, 4>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 1, 32>, element = array<i64: 1, 2>, subgroup_strides = array<i64: 0, 1>, thread_strides = array<i64: 0, 1>}} : (vector<1x256xf32>) -> vector<1xf32>
  %v8 = arith.addf %v3, %v7 : vector<1xf32>
  "nova_tile.store"(%v8, %arg1, %c0, %c1) {strides = array<i64: 1>, extents = array<i64: -1>, vector = 1 : i64, wide = false, layout = {subgroup = array<i64: 1>, batch = array<i64: 1>, outer = array<i64: 1>, thread = array<i64: 1>, element = array<i64: 1>, subgroup_strides = array<i64: 0>, thread_strides = array<i64: 0>}} : (vector<1xf32>, !llvm.ptr<1>, i64, i32) -> ()
  return
}
}

// CHECK-COUNT-6: nvvm.shfl.sync bfly
// CHECK: st.shared.v2.b32
// CHECK-NEXT: nvvm.barrier
// CHECK-COUNT-5: nvvm.shfl.sync bfly
// CHECK: st.shared.b32
// CHECK-NEXT: nvvm.barrier
// CHECK-NOT: nvvm.barrier
