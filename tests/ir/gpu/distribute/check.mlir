// RUN: nova-opt distribute
// One pair of predicated stores a thread: the last bad value of its registers, then the flag.

module attributes {nova_tile.workspace = 0 : i64} {
func.func @check(%arg0: !llvm.ptr<1>, %arg1: !llvm.ptr<1>) attributes {nova_tile.grid = array<i64: 1, 1, 1>, nova_tile.threads = 32 : i64, nova_tile.min_blocks = 0 : i64} {
  %c0 = arith.constant 0 : i64
  %c1 = arith.constant 0 : i32
  %c2 = arith.constant 10 : i64
  %v1 = "nova_tile.load"(%arg0, %c0, %c1) {strides = array<i64: 1>, extents = array<i64: -1>, vector = 2 : i64, wide = false, fill = 0 : i64, layout = {subgroup = array<i64: 1>, batch = array<i64: 1>, outer = array<i64: 1>, thread = array<i64: 32>, element = array<i64: 2>, subgroup_strides = array<i64: 0>, thread_strides = array<i64: 1>}} : (!llvm.ptr<1>, i64, i32) -> vector<64xi64>
  %v2 = vector.broadcast %c2 : i64 to vector<64xi64>
  %v3 = arith.cmpi uge, %v1, %v2 : vector<64xi64>
  "nova_tile.check"(%v3, %v1, %arg1) {} : (vector<64xi1>, vector<64xi64>, !llvm.ptr<1>) -> ()
  return
}
}

// CHECK-DAG: %[[VALUE:.*]] = llvm.mlir.constant(8 : i32) : i32
// CHECK-DAG: %[[FLAG:.*]] = llvm.mlir.constant(0 : i32) : i32
// CHECK: %[[BAD:.*]] = arith.ori %{{.*}}, %{{.*}} : i1
// CHECK: arith.select %{{.*}}, %{{.*}}, %{{.*}} : i64
// CHECK: "@$1 st.global.b64 [$0+$2], $3;"
// CHECK-SAME: %arg1, %[[BAD]], %[[VALUE]], %{{.*}}
// CHECK: "@$1 st.global.b64 [$0+$2], $3;"
// CHECK-SAME: %arg1, %[[BAD]], %[[FLAG]], %{{.*}}
