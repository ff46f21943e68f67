// RUN: nova-opt distribute
// One address a thread, registers at constants from it; nothing is checked where the extents are divided.

module attributes {nova_tile.workspace = 0 : i64} {
func.func @copy(%arg0: !llvm.ptr<1>, %arg1: !llvm.ptr<1>) attributes {nova_tile.grid = array<i64: 8, 1, 1>, nova_tile.threads = 128 : i64, nova_tile.min_blocks = 0 : i64} {
  %c0 = arith.constant 4 : i32
  %c1 = arith.constant 0 : i64
  %c2 = arith.constant 0 : i32
  %c3 = arith.constant 0x40000000 : f32
  %v1 = "nova_tile.program_id"() {axis = 0 : i64} : () -> i32
  %v2 = arith.muli %v1, %c0 : i32
  %v3 = "nova_tile.load"(%arg0, %c1, %v2, %c2) {strides = array<i64: 128, 1>, extents = array<i64: -1, -1>, vector = 4 : i64, wide = false, fill = 0x3F800000 : f32, layout = {subgroup = array<i64: 4, 1>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 1, 32>, element = array<i64: 1, 4>, subgroup_strides = array<i64: 1, 0>, thread_strides = array<i64: 0, 1>}} : (!llvm.ptr<1>, i64, i32, i32) -> vector<4x128xf32>
  %v4 = vector.broadcast %c3 : f32 to vector<4x128xf32>
  %v5 = "arith.mulf"(%v3, %v4) {} : (vector<4x128xf32>, vector<4x128xf32>) -> vector<4x128xf32>
  "nova_tile.store"(%v5, %arg1, %c1, %v2, %c2) {strides = array<i64: 128, 1>, extents = array<i64: -1, -1>, vector = 4 : i64, wide = false, layout = {subgroup = array<i64: 4, 1>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 1, 32>, element = array<i64: 1, 4>, subgroup_strides = array<i64: 1, 0>, thread_strides = array<i64: 0, 1>}} : (vector<4x128xf32>, !llvm.ptr<1>, i64, i32, i32) -> ()
  return
}
}

// CHECK: llvm.func @copy(%{{.*}}: !llvm.ptr<1>, %{{.*}}: !llvm.ptr<1>)
// CHECK-NOT: inline_asm
// CHECK: llvm.getelementptr %arg0
// CHECK-NEXT: %[[P:.*]] = llvm.getelementptr
// CHECK-NEXT: %[[X:.*]] = llvm.load %[[P]] {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xf32>
// CHECK: arith.mulf %[[X]], %{{.*}} : vector<4xf32>
// CHECK: llvm.store %{{.*}}, %{{.*}} {alignment = 16 : i64} : vector<4xf32>, !llvm.ptr<1>
// CHECK-NEXT: llvm.return
