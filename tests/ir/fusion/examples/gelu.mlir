// Elementwise over one merged loop (contiguous dims that every operand agrees on are merged). No rows attr entries:
// all loops parallel. Constants live inside the region (cheap to hoist) or outside as scalars.
#i = affine_map<(d0) -> (d0)>
module {
  func.func private @gelu_0(%x: tensor<25165824xf32>, %y: tensor<25165824xf32> {nova.out}) -> tensor<25165824xf32>
      attributes {nova.kernel = "loops", nova.dims = array<i64: 25165824>, nova.rows = array<i64: 0>, nova.inplace = [array<i64: 0, 0>]} {
    %o = linalg.generic {indexing_maps = [#i, #i], iterator_types = ["parallel"]}
        ins(%x : tensor<25165824xf32>) outs(%y : tensor<25165824xf32>) attrs = {dims = array<i64: 0>} {
    ^bb0(%a: f32, %out: f32):
      %half = arith.constant 5.000000e-01 : f32
      %one = arith.constant 1.000000e+00 : f32
      %rsqrt2 = arith.constant 0.707106769 : f32
      %s = arith.mulf %a, %rsqrt2 : f32
      %e = math.erf %s : f32
      %p = arith.addf %e, %one : f32
      %h = arith.mulf %a, %half : f32
      %g = arith.mulf %h, %p : f32
      linalg.yield %g : f32
    } -> tensor<25165824xf32>
    return %o : tensor<25165824xf32>
  }
}
