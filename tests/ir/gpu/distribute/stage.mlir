// RUN: nova-opt distribute
// A thread copies its own values in the background, zeros where the tile is cut off, and reads them back without a barrier.

module attributes {nova_tile.workspace = 0 : i64} {
func.func @copy(%arg0: !llvm.ptr<1>, %arg1: !llvm.ptr<1>) attributes {nova_tile.grid = array<i64: 1, 1, 1>, nova_tile.threads = 64 : i64, nova_tile.min_blocks = 0 : i64} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 0 : i64
  %s0 = "nova_tile.alloc_shared"() {swizzle = "none"} : () -> memref<2x2x256xf32, 3>
  "nova_tile.stage"(%arg0, %s0, %c0, %c1, %c0) {strides = array<i64: 1>, extents = array<i64: 300>, vector = 4 : i64, wide = false, layout = {subgroup = array<i64: 2>, batch = array<i64: 2>, outer = array<i64: 1>, thread = array<i64: 32>, element = array<i64: 4>, subgroup_strides = array<i64: 1>, thread_strides = array<i64: 1>}} : (!llvm.ptr<1>, memref<2x2x256xf32, 3>, i32, i64, i32) -> ()
  "nova_tile.async_commit"() : () -> ()
  "nova_tile.async_wait"() {pending = 0 : i64} : () -> ()
  %v0 = "nova_tile.staged"(%s0, %c0) {strides = array<i64: 1>, vector = 4 : i64, layout = {subgroup = array<i64: 2>, batch = array<i64: 2>, outer = array<i64: 1>, thread = array<i64: 32>, element = array<i64: 4>, subgroup_strides = array<i64: 1>, thread_strides = array<i64: 1>}} : (memref<2x2x256xf32, 3>, i32) -> vector<512xf32>
  "nova_tile.store"(%v0, %arg1, %c1, %c0) {strides = array<i64: 1>, extents = array<i64: -1>, vector = 4 : i64, wide = false, layout = {subgroup = array<i64: 2>, batch = array<i64: 2>, outer = array<i64: 1>, thread = array<i64: 32>, element = array<i64: 4>, subgroup_strides = array<i64: 1>, thread_strides = array<i64: 1>}} : (vector<512xf32>, !llvm.ptr<1>, i64, i32) -> ()
  return
}
}

// CHECK-COUNT-2: nvvm.cp.async.shared.global {{.*}}, 16, cache = cg, %{{.*}}
// CHECK: nvvm.cp.async.commit.group
// CHECK: nvvm.cp.async.wait.group 0
// CHECK-NOT: nvvm.barrier
// CHECK-COUNT-2: llvm.load {{.*}}!llvm.ptr<3> -> vector<4xf32>
