// RUN: nova-opt distribute
// What a reduction leaves is where it is needed: within a warp no shared memory, and repeating it is a broadcast.

module attributes {nova_tile.workspace = 0 : i64} {
func.func @rowsum(%arg0: !llvm.ptr<1>, %arg1: !llvm.ptr<1>) attributes {nova_tile.grid = array<i64: 1, 1, 1>, nova_tile.threads = 128 : i64, nova_tile.min_blocks = 0 : i64} {
  %c0 = arith.constant 0 : i64
  %c1 = arith.constant 0 : i32
  %v1 = "nova_tile.load"(%arg0, %c0, %c1, %c1) {strides = array<i64: 128, 1>, extents = array<i64: -1, -1>, vector = 4 : i64, wide = false, fill = 0x00000000 : f32, layout = {subgroup = array<i64: 4, 1>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 1, 32>, element = array<i64: 1, 4>, subgroup_strides = array<i64: 1, 0>, thread_strides = array<i64: 0, 1>}} : (!llvm.ptr<1>, i64, i32, i32) -> vector<4x128xf32>
  %v2 = "nova_tile.reduce"(%v1) {dims = array<i64: 1>, kind = "maximumf", layout = {subgroup = array<i64: 4, 1>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 1, 32>, element = array<i64: 1, 4>, subgroup_strides = array<i64: 1, 0>, thread_strides = array<i64: 0, 1>}} : (vector<4x128xf32>) -> vector<4xf32>
  %v3 = "nova_tile.expand"(%v2) {dims = array<i64: 1>, layout = {subgroup = array<i64: 4, 1>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 1, 32>, element = array<i64: 1, 4>, subgroup_strides = array<i64: 1, 0>, thread_strides = array<i64: 0, 1>}} : (vector<4xf32>) -> vector<4x128xf32>
  %v4 = "arith.subf"(%v1, %v3) {} : (vector<4x128xf32>, vector<4x128xf32>) -> vector<4x128xf32>
  "nova_tile.store"(%v4, %arg1, %c0, %c1, %c1) {strides = array<i64: 128, 1>, extents = array<i64: -1, -1>, vector = 4 : i64, wide = false, layout = {subgroup = array<i64: 4, 1>, batch = array<i64: 1, 1>, outer = array<i64: 1, 1>, thread = array<i64: 1, 32>, element = array<i64: 1, 4>, subgroup_strides = array<i64: 1, 0>, thread_strides = array<i64: 0, 1>}} : (vector<4x128xf32>, !llvm.ptr<1>, i64, i32, i32) -> ()
  return
}
}

// CHECK-NOT: nova_smem
// CHECK: %[[ALL:.*]] = vector.broadcast %{{.*}} : f32 to vector<4xf32>
// CHECK: arith.subf %{{.*}}, %[[ALL]] : vector<4xf32>
