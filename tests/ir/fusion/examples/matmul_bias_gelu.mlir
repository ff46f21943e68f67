// linear + bias + gelu; the pre-activation is a result too (backward needs it). One contraction, one epilogue generic.
#a = affine_map<(d0, d1, d2) -> (d0, d2)>
#b = affine_map<(d0, d1, d2) -> (d1, d2)>
#c = affine_map<(d0, d1, d2) -> (d0, d1)>
#mn = affine_map<(d0, d1) -> (d0, d1)>
#n = affine_map<(d0, d1) -> (d1)>
module {
  func.func private @linear_gelu_0(%x: tensor<8192x768xf32>, %w: tensor<3072x768xf32>, %bias: tensor<3072xf32>,
      %pre: tensor<8192x3072xf32> {nova.out}, %act: tensor<8192x3072xf32> {nova.out})
      -> (tensor<8192x3072xf32>, tensor<8192x3072xf32>)
      attributes {nova.kernel = "contraction", nova.dims = array<i64: 8192, 3072, 768>, nova.inplace = []} {
    %zero = arith.constant 0.0 : f32
    %e = tensor.empty() : tensor<8192x3072xf32>
    %init = linalg.fill ins(%zero : f32) outs(%e : tensor<8192x3072xf32>) -> tensor<8192x3072xf32>
    %acc = linalg.generic {indexing_maps = [#a, #b, #c], iterator_types = ["parallel", "parallel", "reduction"]}
        ins(%x, %w : tensor<8192x768xf32>, tensor<3072x768xf32>) outs(%init : tensor<8192x3072xf32>)
        attrs = {dims = array<i64: 0, 1, 2>, nova.contraction} {
    ^bb0(%l: f32, %r: f32, %s: f32):
      %m = arith.mulf %l, %r : f32
      %t = arith.addf %s, %m : f32
      linalg.yield %t : f32
    } -> tensor<8192x3072xf32>
    %o:2 = linalg.generic {indexing_maps = [#mn, #n, #mn, #mn], iterator_types = ["parallel", "parallel"]}
        ins(%acc, %bias : tensor<8192x3072xf32>, tensor<3072xf32>) outs(%pre, %act : tensor<8192x3072xf32>, tensor<8192x3072xf32>)
        attrs = {dims = array<i64: 0, 1>} {
    ^bb0(%s: f32, %bb: f32, %o0: f32, %o1: f32):
      %half = arith.constant 5.000000e-01 : f32
      %one = arith.constant 1.000000e+00 : f32
      %rsqrt2 = arith.constant 0.707106769 : f32
      %p = arith.addf %s, %bb : f32
      %sc = arith.mulf %p, %rsqrt2 : f32
      %er = math.erf %sc : f32
      %q = arith.addf %er, %one : f32
      %h = arith.mulf %p, %half : f32
      %g = arith.mulf %h, %q : f32
      linalg.yield %p, %g : f32, f32
    } -> (tensor<8192x3072xf32>, tensor<8192x3072xf32>)
    return %o#0, %o#1 : tensor<8192x3072xf32>, tensor<8192x3072xf32>
  }
}
