// RUN: nova-opt distribute
// The first change renames registers in order, so nothing is emitted; the second needs other lanes of the same warp.

module attributes {nova_tile.workspace = 0 : i64} {
func.func @move(%arg0: !llvm.ptr<1>, %arg1: !llvm.ptr<1>) attributes {nova_tile.grid = array<i64: 1, 1, 1>, nova_tile.threads = 32 : i64, nova_tile.min_blocks = 0 : i64} {
  %c0 = arith.constant 0 : i64
  %c1 = arith.constant 0 : i32
  %v1 = "nova_tile.load"(%arg0, %c0, %c1) {strides = array<i64: 1>, extents = array<i64: -1>, vector = 2 : i64, wide = false, fill = 0x00000000 : f32, layout = {subgroup = array<i64: 1>, batch = array<i64: 4>, outer = array<i64: 1>, thread = array<i64: 32>, element = array<i64: 2>, subgroup_strides = array<i64: 0>, thread_strides = array<i64: 1>}} : (!llvm.ptr<1>, i64, i32) -> vector<256xf32>
  %v2 = "nova_tile.to_layout"(%v1) {source = {subgroup = array<i64: 1>, batch = array<i64: 4>, outer = array<i64: 1>, thread = array<i64: 32>, element = array<i64: 2>, subgroup_strides = array<i64: 0>, thread_strides = array<i64: 1>}, layout = {subgroup = array<i64: 1>, batch = array<i64: 2>, outer = array<i64: 2>, thread = array<i64: 32>, element = array<i64: 2>, subgroup_strides = array<i64: 0>, thread_strides = array<i64: 1>}} : (vector<256xf32>) -> vector<256xf32>
  %v3 = "nova_tile.to_layout"(%v2) {source = {subgroup = array<i64: 1>, batch = array<i64: 2>, outer = array<i64: 2>, thread = array<i64: 32>, element = array<i64: 2>, subgroup_strides = array<i64: 0>, thread_strides = array<i64: 1>}, layout = {subgroup = array<i64: 1>, batch = array<i64: 2>, outer = array<i64: 1>, thread = array<i64: 32>, element = array<i64: 4>, subgroup_strides = array<i64: 0>, thread_strides = array<i64: 1>}} : (vector<256xf32>) -> vector<256xf32>
  "nova_tile.store"(%v3, %arg1, %c0, %c1) {strides = array<i64: 1>, extents = array<i64: -1>, vector = 4 : i64, wide = false, layout = {subgroup = array<i64: 1>, batch = array<i64: 2>, outer = array<i64: 1>, thread = array<i64: 32>, element = array<i64: 4>, subgroup_strides = array<i64: 0>, thread_strides = array<i64: 1>}} : (vector<256xf32>, !llvm.ptr<1>, i64, i32) -> ()
  return
}
}

// CHECK-COUNT-4: llvm.load %{{.*}} {alignment = 8 : i64} : !llvm.ptr<1> -> vector<2xf32>
// CHECK-NOT: vector.shuffle
// CHECK-COUNT-4: llvm.store %{{.*}} : vector<2xf32>, !llvm.ptr<3>
// CHECK: nvvm.bar.warp.sync
// CHECK-COUNT-2: llvm.load %{{.*}} {alignment = 16 : i64} : !llvm.ptr<3> -> vector<4xf32>
// CHECK-COUNT-2: llvm.store %{{.*}} : vector<4xf32>, !llvm.ptr<1>
