// RUN: nova-opt tile-program
// TARGET: h200
// Key blocks below the diagonal have a loop without masks; the rest of them another. Long rows start first.

module {
  func.func private @attention(%arg0: tensor<2x4x128x32xbf16>, %arg1: tensor<2x2x128x32xbf16>, %arg2: tensor<2x2x128x32xbf16>, %arg3: tensor<2x4x128x32xbf16> {nova.out}, %arg4: tensor<2x4x128xf32> {nova.out}) -> (tensor<2x4x128x32xbf16>, tensor<2x4x128xf32>) attributes {lowering_config = {block_keys = 32 : i64, block_queries = 64 : i64, halves = false, hold = true, key_half = [], key_launches = 1 : i64, kind = "mma_sync", panel = 16 : i64, predicted_seconds = 1.000000e-05 : f64, reasons = [], registers = 200 : i64, resident = 0 : i64, shared_bytes = 40000 : i64, stages = 2 : i64, threads = 128 : i64}, nova.kernel = "attention_forward"} {
    %0:2 = "nova.online_attention"(%arg0, %arg1, %arg2, %arg0, %arg0, %arg3, %arg4) {causal = true, dropout_p = 0.000000e+00 : f64, k_access = array<i64: 0, 8192, 4096, 32, 1>, lse_access = array<i64: 0, 512, 128, 1>, mask_access = array<i64>, out_access = array<i64: 0, 16384, 4096, 32, 1>, q_access = array<i64: 0, 16384, 4096, 32, 1>, scale = 0.17677669529663687 : f64, seed_access = array<i64>, sizes = array<i64: 2, 4, 2, 128, 128, 32, 32>, stream = 5 : i64, v_access = array<i64: 0, 8192, 4096, 32, 1>} : (tensor<2x4x128x32xbf16>, tensor<2x2x128x32xbf16>, tensor<2x2x128x32xbf16>, tensor<2x4x128x32xbf16>, tensor<2x4x128x32xbf16>, tensor<2x4x128x32xbf16>, tensor<2x4x128xf32>) -> (tensor<2x4x128x32xbf16>, tensor<2x4x128xf32>)
    return %0#0, %0#1 : tensor<2x4x128x32xbf16>, tensor<2x4x128xf32>
  }
}

// CHECK: func.func @attention_0(
// CHECK-SAME: nova_tile.grid = array<i64: 8, 2, 1>
// CHECK: arith.subi %{{.*}}, %{{.*}} : i32
// CHECK: memref<1x64x32xbf16, 3>
// CHECK: memref<2x32x32xbf16, 3>
// the maximum, the sum and the output
// CHECK: scf.for {{.*}} -> (vector<64xf32>, vector<64x16xf32>, vector<64x32xf32>)
// CHECK-NOT: arith.cmpi sle
// CHECK: MMA_SYNC_BF16_16x8x16
// CHECK: math.exp2
// CHECK: scf.for
// CHECK: arith.cmpi sle
// CHECK: math.exp2
// CHECK: nova_tile.store
// CHECK: math.log
// CHECK: nova_tile.store
