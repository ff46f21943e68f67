// RUN: nova-opt distribute
// A prefix: two registers, then five shuffles over the lanes, then the total of the warp before by shared memory.

module attributes {nova_tile.workspace = 0 : i64} {
func.func @scan(%arg0: !llvm.ptr<1>, %arg1: !llvm.ptr<1>) attributes {nova_tile.grid = array<i64: 1, 1, 1>, nova_tile.threads = 64 : i64, nova_tile.min_blocks = 0 : i64} {
  %c0 = arith.constant 0 : i64
  %c1 = arith.constant 0 : i32
  %v1 = "nova_tile.load"(%arg0, %c0, %c1) {strides = array<i64: 1>, extents = array<i64: -1>, vector = 2 : i64, wide = false, fill = 0 : i32, layout = {subgroup = array<i64: 2>, batch = array<i64: 1>, outer = array<i64: 1>, thread = array<i64: 32>, element = array<i64: 2>, subgroup_strides = array<i64: 1>, thread_strides = array<i64: 1>}} : (!llvm.ptr<1>, i64, i32) -> vector<128xi32>
  %v2 = "nova_tile.scan"(%v1) {dim = 0 : i64, kind = "addi", layout = {subgroup = array<i64: 2>, batch = array<i64: 1>, outer = array<i64: 1>, thread = array<i64: 32>, element = array<i64: 2>, subgroup_strides = array<i64: 1>, thread_strides = array<i64: 1>}} : (vector<128xi32>) -> vector<128xi32>
  "nova_tile.store"(%v2, %arg1, %c0, %c1) {strides = array<i64: 1>, extents = array<i64: -1>, vector = 2 : i64, wide = false, layout = {subgroup = array<i64: 2>, batch = array<i64: 1>, outer = array<i64: 1>, thread = array<i64: 32>, element = array<i64: 2>, subgroup_strides = array<i64: 1>, thread_strides = array<i64: 1>}} : (vector<128xi32>, !llvm.ptr<1>, i64, i32) -> ()
  return
}
}

// CHECK-DAG: %[[ONE:.*]] = arith.constant 1 : i32
// CHECK-DAG: %[[SIXTEEN:.*]] = arith.constant 16 : i32
// CHECK: %[[AFTER:.*]] = arith.cmpi sge, %{{.*}}, %[[ONE]] : i32
// CHECK: %[[RUN:.*]] = arith.addi %{{.*}}, %{{.*}} : vector<1xi32>
// CHECK: nvvm.shfl.sync up %{{.*}}, %{{.*}}, %[[ONE]],
// CHECK: nvvm.shfl.sync up %{{.*}}, %{{.*}}, %[[SIXTEEN]],
// CHECK: %[[BEFORE:.*]] = nvvm.shfl.sync up %{{.*}}, %[[ALL:.*]], %[[ONE]],
// CHECK: nvvm.shfl.sync idx
// CHECK: st.shared.b32
// CHECK-NEXT: nvvm.barrier
// CHECK-NEXT: llvm.load %{{.*}} : !llvm.ptr<3> -> vector<1xi32>
// CHECK: llvm.store %{{.*}}, %{{.*}} {alignment = 8 : i64} : vector<2xi32>, !llvm.ptr<1>
