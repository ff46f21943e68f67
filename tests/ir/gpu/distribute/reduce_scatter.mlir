// RUN: nova-opt distribute
// Sums over four warps, of two tiles at once: every thread writes its shares, there is one barrier, and each of the 128
// threads adds up the one element that it keeps. The next launch may begin after that.

module attributes {nova_tile.workspace = 0 : i64} {
func.func @columns(%arg0: !llvm.ptr<1>, %arg1: !llvm.ptr<1>, %arg2: !llvm.ptr<1>) attributes {nova_tile.grid = array<i64: 1, 1, 1>, nova_tile.threads = 128 : i64, nova_tile.min_blocks = 0 : i64} {
  %c0 = arith.constant 0 : i64
  %c1 = arith.constant 0 : i32
  %v1 = "nova_tile.load"(%arg0, %c0, %c1, %c1, %c1) {strides = array<i64: 128, 4, 1>, extents = array<i64: -1, -1, -1>, vector = 4 : i64, wide = false, fill = 0x00000000 : f32, layout = {subgroup = array<i64: 4, 1, 1>, batch = array<i64: 1, 1, 1>, outer = array<i64: 1, 1, 1>, thread = array<i64: 1, 32, 1>, element = array<i64: 1, 1, 4>, subgroup_strides = array<i64: 1, 0, 0>, thread_strides = array<i64: 0, 1, 0>}} : (!llvm.ptr<1>, i64, i32, i32, i32) -> vector<4x32x4xf32>
  %v2 = arith.mulf %v1, %v1 : vector<4x32x4xf32>
  %v3 = "nova_tile.reduce_scatter"(%v1) {dims = array<i64: 0>, kind = "addf", source = {subgroup = array<i64: 4, 1, 1>, batch = array<i64: 1, 1, 1>, outer = array<i64: 1, 1, 1>, thread = array<i64: 1, 32, 1>, element = array<i64: 1, 1, 4>, subgroup_strides = array<i64: 1, 0, 0>, thread_strides = array<i64: 0, 1, 0>}, layout = {subgroup = array<i64: 4, 1>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 8, 4>, element = array<i64: 1, 1>, subgroup_strides = array<i64: 1, 0>, thread_strides = array<i64: 4, 1>}} : (vector<4x32x4xf32>) -> vector<32x4xf32>
  %v4 = "nova_tile.reduce_scatter"(%v2) {dims = array<i64: 0>, kind = "addf", source = {subgroup = array<i64: 4, 1, 1>, batch = array<i64: 1, 1, 1>, outer = array<i64: 1, 1, 1>, thread = array<i64: 1, 32, 1>, element = array<i64: 1, 1, 4>, subgroup_strides = array<i64: 1, 0, 0>, thread_strides = array<i64: 0, 1, 0>}, layout = {subgroup = array<i64: 4, 1>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 8, 4>, element = array<i64: 1, 1>, subgroup_strides = array<i64: 1, 0>, thread_strides = array<i64: 4, 1>}} : (vector<4x32x4xf32>) -> vector<32x4xf32>
  "nova_tile.store"(%v3, %arg1, %c0, %c1, %c1) {strides = array<i64: 4, 1>, extents = array<i64: -1, -1>, vector = 1 : i64, wide = false, layout = {subgroup = array<i64: 4, 1>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 8, 4>, element = array<i64: 1, 1>, subgroup_strides = array<i64: 1, 0>, thread_strides = array<i64: 4, 1>}} : (vector<32x4xf32>, !llvm.ptr<1>, i64, i32, i32) -> ()
  "nova_tile.store"(%v4, %arg2, %c0, %c1, %c1) {strides = array<i64: 4, 1>, extents = array<i64: -1, -1>, vector = 1 : i64, wide = false, layout = {subgroup = array<i64: 4, 1>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 8, 4>, element = array<i64: 1, 1>, subgroup_strides = array<i64: 1, 0>, thread_strides = array<i64: 4, 1>}} : (vector<32x4xf32>, !llvm.ptr<1>, i64, i32, i32) -> ()
  return
}
}

// CHECK: nova_gpu.shared = 4096 : i64
// CHECK-COUNT-2: llvm.store %{{.*}} {alignment = 16 : i64} : vector<4xf32>, !llvm.ptr<3>
// CHECK: nvvm.barrier
// CHECK-COUNT-8: llvm.load %{{.*}} : !llvm.ptr<3> -> f32
// CHECK-NOT: nvvm.barrier
// CHECK: arith.addf
// CHECK: llvm.store %{{.*}} !llvm.ptr<1>
