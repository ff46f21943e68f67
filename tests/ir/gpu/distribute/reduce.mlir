// RUN: nova-opt distribute
// Registers as a tree, whose first sums may be multiply-adds; then a butterfly over the 32 lanes, in which two threads share
// out their two rows, add up one each and tell each other; then four warps through shared memory; one thread stores.

module attributes {nova_tile.workspace = 0 : i64} {
func.func @rows(%arg0: !llvm.ptr<1>, %arg1: !llvm.ptr<1>) attributes {nova_tile.grid = array<i64: 1, 1, 1>, nova_tile.threads = 128 : i64, nova_tile.min_blocks = 0 : i64} {
  %c0 = arith.constant 0 : i64
  %c1 = arith.constant 0 : i32
  %v1 = "nova_tile.load"(%arg0, %c0, %c1, %c1) {strides = array<i64: 256, 1>, extents = array<i64: -1, -1>, vector = 2 : i64, wide = false, fill = 0x00000000 : f32, layout = {subgroup = array<i64: 1, 4>, batch = array<i64: 2, 1>, outer = array<i64: 1, 1>, thread = array<i64: 1, 32>, element = array<i64: 1, 2>, subgroup_strides = array<i64: 0, 1>, thread_strides = array<i64: 0, 1>}} : (!llvm.ptr<1>, i64, i32, i32) -> vector<2x256xf32>
  %v2 = "nova_tile.reduce"(%v1) {dims = array<i64: 1>, kind = "addf", layout = {subgroup = array<i64: 1, 4>, batch = array<i64: 2, 1>, outer = array<i64: 1, 1>, thread = array<i64: 1, 32>, element = array<i64: 1, 2>, subgroup_strides = array<i64: 0, 1>, thread_strides = array<i64: 0, 1>}} : (vector<2x256xf32>) -> vector<2xf32>
  "nova_tile.store"(%v2, %arg1, %c0, %c1) {strides = array<i64: 1>, extents = array<i64: -1>, vector = 1 : i64, wide = false, layout = {subgroup = array<i64: 1>, batch = array<i64: 2>, outer = array<i64: 1>, thread = array<i64: 1>, element = array<i64: 1>, subgroup_strides = array<i64: 0>, thread_strides = array<i64: 0>}} : (vector<2xf32>, !llvm.ptr<1>, i64, i32) -> ()
  return
}
}

// CHECK: llvm.mlir.global external @nova_smem() {addr_space = 3 : i32, alignment = 1024 : i64}
// CHECK: nova_gpu.shared = 128 : i64
// CHECK: arith.addf %{{.*}}, %{{.*}} fastmath<contract> : vector<2xf32>
// CHECK-COUNT-2: arith.select
// CHECK-COUNT-6: nvvm.shfl.sync bfly
// CHECK-NOT: {{nvvm.shfl.sync bfly|contract}}
// CHECK: "@$1 st.shared.v2.b32 [$0+$2], {$3, $4};"
// CHECK-NEXT: nvvm.barrier
// CHECK-COUNT-2: llvm.load %{{.*}} {alignment = 16 : i64} : !llvm.ptr<3> -> vector<4xf32>
// CHECK-NOT: nvvm.barrier
// CHECK: arith.addf %{{[0-9]+}}, %{{[0-9]+}} : vector<4xf32>
// CHECK: arith.addf %{{[0-9]+}}, %{{[0-9]+}} : vector<2xf32>
// CHECK: "@$1 st.global.b32 [$0+$2], $3;"
