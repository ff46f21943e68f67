// RUN: nova-opt distribute
// Arithmetic of 16-bit floats is done in f32 and rounded after each op.

module attributes {nova_tile.workspace = 0 : i64} {
func.func @halves(%arg0: !llvm.ptr<1>) attributes {nova_tile.grid = array<i64: 1, 1, 1>, nova_tile.threads = 32 : i64, nova_tile.min_blocks = 0 : i64} {
  %c0 = arith.constant 0 : i64
  %c1 = arith.constant 0 : i32
  %v1 = "nova_tile.load"(%arg0, %c0, %c1) {strides = array<i64: 1>, extents = array<i64: -1>, vector = 2 : i64, wide = false, fill = 0x0000 : bf16, layout = {subgroup = array<i64: 1>, batch = array<i64: 1>, outer = array<i64: 1>, thread = array<i64: 32>, element = array<i64: 2>, subgroup_strides = array<i64: 0>, thread_strides = array<i64: 1>}} : (!llvm.ptr<1>, i64, i32) -> vector<64xbf16>
  %v2 = "arith.addf"(%v1, %v1) {} : (vector<64xbf16>, vector<64xbf16>) -> vector<64xbf16>
  "nova_tile.store"(%v2, %arg0, %c0, %c1) {strides = array<i64: 1>, extents = array<i64: -1>, vector = 2 : i64, wide = false, layout = {subgroup = array<i64: 1>, batch = array<i64: 1>, outer = array<i64: 1>, thread = array<i64: 32>, element = array<i64: 2>, subgroup_strides = array<i64: 0>, thread_strides = array<i64: 1>}} : (vector<64xbf16>, !llvm.ptr<1>, i64, i32) -> ()
  return
}
}

// CHECK: arith.extf %{{.*}} : vector<2xbf16> to vector<2xf32>
// CHECK: %[[SUM:.*]] = arith.addf %{{.*}}, %{{.*}} : vector<2xf32>
// CHECK: arith.truncf %[[SUM]] : vector<2xf32> to vector<2xbf16>
