// RUN: nova-opt distribute
// Two warps share a row: they wait for each other at a barrier of their own, and use a piece of the scratch that no other
// warp touches. So two areas in turn are enough for a loop, without any barrier of the whole block.

module attributes {nova_tile.workspace = 0 : i64} {
func.func @rows(%arg0: !llvm.ptr<1>, %arg1: !llvm.ptr<1>) attributes {nova_tile.grid = array<i64: 1, 1, 1>, nova_tile.threads = 256 : i64, nova_tile.min_blocks = 0 : i64} {
  %c0 = arith.constant 0 : i64
  %z = arith.constant 0 : i32
  %one = arith.constant 1 : i32
  %n = arith.constant 16 : i32
  scf.for %i = %z to %n step %one : i32 {
    %v1 = "nova_tile.load"(%arg0, %c0, %i, %z) {strides = array<i64: 64, 1>, extents = array<i64: -1, -1>, vector = 1 : i64, wide = false, fill = 0x00000000 : f32, layout = {subgroup = array<i64: 4, 2>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 1, 32>, element = array<i64: 1, 1>, subgroup_strides = array<i64: 2, 1>, thread_strides = array<i64: 0, 1>}} : (!llvm.ptr<1>, i64, i32, i32) -> vector<4x64xf32>
    %v2 = "nova_tile.reduce"(%v1) {dims = array<i64: 1>, kind = "addf", layout = {subgroup = array<i64: 4, 2>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 1, 32>, element = array<i64: 1, 1>, subgroup_strides = array<i64: 2, 1>, thread_strides = array<i64: 0, 1>}} : (vector<4x64xf32>) -> vector<4xf32>
    %v3 = "nova_tile.expand"(%v2) {dims = array<i64: 1>, layout = {subgroup = array<i64: 4, 2>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 1, 32>, element = array<i64: 1, 1>, subgroup_strides = array<i64: 2, 1>, thread_strides = array<i64: 0, 1>}} : (vector<4xf32>) -> vector<4x64xf32>
    %v4 = arith.subf %v1, %v3 : vector<4x64xf32>
    %v5 = "nova_tile.reduce"(%v4) {dims = array<i64: 1>, kind = "maximumf", layout = {subgroup = array<i64: 4, 2>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 1, 32>, element = array<i64: 1, 1>, subgroup_strides = array<i64: 2, 1>, thread_strides = array<i64: 0, 1>}} : (vector<4x64xf32>) -> vector<4xf32>
    "nova_tile.store"(%v5, %arg1, %c0, %i) {strides = array<i64: 1>, extents = array<i64: -1>, vector = 1 : i64, wide = false, layout = {subgroup = array<i64: 4>, batch = array<i64: 1>, outer = array<i64: 1>, thread = array<i64: 1>, element = array<i64: 1>, subgroup_strides = array<i64: 2>, thread_strides = array<i64: 0>}} : (vector<4xf32>, !llvm.ptr<1>, i64, i32) -> ()
  }
  return
}
}

// CHECK: nova_gpu.shared = 256 : i64
// CHECK: [[id:%[0-9]+]] = arith.addi %{{[0-9]+}}, %c4_i32 : i32
// CHECK: scf.for
// CHECK: nvvm.barrier id = [[id]] number_of_threads = %c64_i32
// CHECK-NOT: nvvm.barrier
// CHECK: arith.subf
// CHECK: nvvm.barrier id = [[id]] number_of_threads = %c64_i32
// CHECK-NOT: nvvm.barrier
// CHECK: llvm.return
