// RUN: nova-opt configure tile-program
// TARGET: h200
// Few blocks and a long k: chunks of k leave partial sums, which a second launch adds to the start in order.

func.func private @k(%x: tensor<8192x192xbf16>, %dy: tensor<8192x192xbf16>, %grad: tensor<192x192xf32>,
    %o: tensor<192x192xf32> {nova.out}) -> tensor<192x192xf32>
    attributes {nova.kernel = "contraction", nova.inplace = [array<i64: 2, 0>], nova.dims = array<i64: 192, 192, 8192>} {
  %init = tensor.extract_slice %grad[0, 0][192, 192][1, 1] : tensor<192x192xf32> to tensor<192x192xf32>
  %acc = linalg.generic {indexing_maps = [affine_map<(m, n, k) -> (k, m)>, affine_map<(m, n, k) -> (k, n)>,
      affine_map<(m, n, k) -> (m, n)>], iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%x, %dy : tensor<8192x192xbf16>, tensor<8192x192xbf16>) outs(%init : tensor<192x192xf32>)
      attrs = {dims = array<i64: 0, 1, 2>, nova.contraction} {
  ^bb0(%l: bf16, %r: bf16, %s: f32):
    %lw = arith.extf %l : bf16 to f32
    %rw = arith.extf %r : bf16 to f32
    %m = arith.mulf %lw, %rw : f32
    %t = arith.addf %s, %m : f32
    linalg.yield %t : f32
  } -> tensor<192x192xf32>
  return %acc : tensor<192x192xf32>
}

// CHECK: func.func @k_main(
// CHECK: "nova_tile.load_shared"
// CHECK-SAME: transposed = true
// CHECK: MMA_SYNC_BF16_16x8x16
// CHECK: "nova_tile.store"({{.*}}, %arg4,
// CHECK: func.func @k_merge(
// CHECK: "nova_tile.load"(%arg2,
// CHECK: "nova_tile.load"(%arg4,
// CHECK: "nova_tile.load"(%arg4,
// CHECK: arith.addf
// CHECK: "nova_tile.store"({{.*}}, %arg3,
