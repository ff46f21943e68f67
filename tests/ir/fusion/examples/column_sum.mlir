// Bias gradient: one cross-row reduction. Two-stage and deterministic is the back end's business: partials in the workspace over a
// fixed split of the rows that does not depend on the thread count, then a merge in order.
#xy = affine_map<(d0, d1) -> (d0, d1)>
#_y = affine_map<(d0, d1) -> (d1)>
module {
  func.func private @reduce_sum_0(%x: tensor<8192x3072xf32>, %out: tensor<3072xf32> {nova.out}) -> tensor<3072xf32>
      attributes {nova.kernel = "loops", nova.dims = array<i64: 8192, 3072>, nova.rows = array<i64: 0>, nova.inplace = []} {
    %zero = arith.constant 0.0 : f32
    %f = linalg.fill ins(%zero : f32) outs(%out : tensor<3072xf32>) -> tensor<3072xf32>
    %s = linalg.generic {indexing_maps = [#xy, #_y], iterator_types = ["reduction", "parallel"]}
        ins(%x : tensor<8192x3072xf32>) outs(%f : tensor<3072xf32>) attrs = {dims = array<i64: 0, 1>} {
    ^bb0(%a: f32, %acc: f32):
      %t = arith.addf %acc, %a : f32
      linalg.yield %t : f32
    } -> tensor<3072xf32>
    return %s : tensor<3072xf32>
  }
}
