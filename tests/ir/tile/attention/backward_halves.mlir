// RUN: nova-opt tile-program
// TARGET: h200
// Two launches; the query half leaves statistics of rows in the workspace, and the key half copies them with its blocks.

module {
  func.func private @attention(%arg0: tensor<2x4x128x32xbf16>, %arg1: tensor<2x4x128x32xbf16>, %arg2: tensor<2x2x128x32xbf16>, %arg3: tensor<2x2x128x32xbf16>, %arg4: tensor<2x4x128x32xbf16>, %arg5: tensor<2x4x128xf32>, %arg6: tensor<2x4x128x32xbf16> {nova.out}, %arg7: tensor<2x2x128x32xbf16> {nova.out}, %arg8: tensor<2x2x128x32xbf16> {nova.out}) -> (tensor<2x4x128x32xbf16>, tensor<2x2x128x32xbf16>, tensor<2x2x128x32xbf16>) attributes {lowering_config = {block_keys = 32 : i64, block_queries = 64 : i64, halves = true, hold = true, key_half = array<i64: 64, 32, 128, 2, 1, 0>, key_launches = 1 : i64, kind = "mma_sync", panel = 16 : i64, predicted_seconds = 1.000000e-05 : f64, reasons = [], registers = 200 : i64, resident = 0 : i64, shared_bytes = 40000 : i64, stages = 2 : i64, threads = 128 : i64}, nova.kernel = "attention_backward"} {
    %0 = "nova.online_attention_backward_query"(%arg0, %arg1, %arg2, %arg3, %arg4, %arg5, %arg0, %arg0, %arg6) {causal = true, dout_access = array<i64: 0, 16384, 4096, 32, 1>, dq_access = array<i64: 0, 16384, 4096, 32, 1>, dropout_p = 0.000000e+00 : f64, k_access = array<i64: 0, 8192, 4096, 32, 1>, lse_access = array<i64: 0, 512, 128, 1>, mask_access = array<i64>, out_access = array<i64: 0, 16384, 4096, 32, 1>, q_access = array<i64: 0, 16384, 4096, 32, 1>, scale = 0.17677669529663687 : f64, seed_access = array<i64>, sizes = array<i64: 2, 4, 2, 128, 128, 32, 32>, stream = 5 : i64, v_access = array<i64: 0, 8192, 4096, 32, 1>} : (tensor<2x4x128x32xbf16>, tensor<2x4x128x32xbf16>, tensor<2x2x128x32xbf16>, tensor<2x2x128x32xbf16>, tensor<2x4x128x32xbf16>, tensor<2x4x128xf32>, tensor<2x4x128x32xbf16>, tensor<2x4x128x32xbf16>, tensor<2x4x128x32xbf16>) -> tensor<2x4x128x32xbf16>
    %1:2 = "nova.online_attention_backward_key"(%arg0, %arg1, %arg2, %arg3, %arg4, %arg5, %arg0, %arg0, %arg7, %arg8) {causal = true, dk_access = array<i64: 0, 8192, 4096, 32, 1>, dout_access = array<i64: 0, 16384, 4096, 32, 1>, dropout_p = 0.000000e+00 : f64, dv_access = array<i64: 0, 8192, 4096, 32, 1>, k_access = array<i64: 0, 8192, 4096, 32, 1>, lse_access = array<i64: 0, 512, 128, 1>, mask_access = array<i64>, out_access = array<i64: 0, 16384, 4096, 32, 1>, q_access = array<i64: 0, 16384, 4096, 32, 1>, scale = 0.17677669529663687 : f64, seed_access = array<i64>, sizes = array<i64: 2, 4, 2, 128, 128, 32, 32>, stream = 5 : i64, v_access = array<i64: 0, 8192, 4096, 32, 1>} : (tensor<2x4x128x32xbf16>, tensor<2x4x128x32xbf16>, tensor<2x2x128x32xbf16>, tensor<2x2x128x32xbf16>, tensor<2x4x128x32xbf16>, tensor<2x4x128xf32>, tensor<2x4x128x32xbf16>, tensor<2x4x128x32xbf16>, tensor<2x2x128x32xbf16>, tensor<2x2x128x32xbf16>) -> (tensor<2x2x128x32xbf16>, tensor<2x2x128x32xbf16>)
    return %0, %1#0, %1#1 : tensor<2x4x128x32xbf16>, tensor<2x2x128x32xbf16>, tensor<2x2x128x32xbf16>
  }
}

// CHECK: nova_tile.workspace = 8192 : i64
// CHECK: func.func @attention_0(
// CHECK: nova_tile.reduce
// CHECK: nova_tile.store
// CHECK: nova_tile.store
// CHECK: scf.for {{.*}} -> (vector<64x32xf32>)
// CHECK: func.func @attention_1(
// CHECK-SAME: nova_tile.grid = array<i64: 4, 2, 1>
// CHECK: memref<2x2x32xf32, 3>
// the query heads of a key head are a loop around the one over blocks of queries
// CHECK: scf.for {{.*}} -> (vector<64x32xf32>, vector<64x32xf32>)
// CHECK: scf.for {{.*}} -> (vector<64x32xf32>, vector<64x32xf32>)
// CHECK-NOT: func.func
