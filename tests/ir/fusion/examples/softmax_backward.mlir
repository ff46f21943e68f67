// Softmax backward: dx = y * (dy - sum(dy * y)); bf16 in and out, computed in f32.
#xy = affine_map<(d0, d1) -> (d0, d1)>
#x_ = affine_map<(d0, d1) -> (d0)>
module {
  func.func private @softmax_backward_0(%dy: tensor<4096x1024xbf16>, %y: tensor<4096x1024xbf16>, %dx: tensor<4096x1024xbf16> {nova.out})
      -> tensor<4096x1024xbf16> attributes {nova.kernel = "loops", nova.dims = array<i64: 4096, 1024>, nova.rows = array<i64: 0>,
      nova.inplace = [array<i64: 0, 0>, array<i64: 1, 0>]} {
    %zero = arith.constant 0.0 : f32
    %e0 = tensor.empty() : tensor<4096xf32>
    %f0 = linalg.fill ins(%zero : f32) outs(%e0 : tensor<4096xf32>) -> tensor<4096xf32>
    %s = linalg.generic {indexing_maps = [#xy, #xy, #x_], iterator_types = ["parallel", "reduction"]}
        ins(%dy, %y : tensor<4096x1024xbf16>, tensor<4096x1024xbf16>) outs(%f0 : tensor<4096xf32>) attrs = {dims = array<i64: 0, 1>} {
    ^bb0(%g: bf16, %p: bf16, %acc: f32):
      %gf = arith.extf %g : bf16 to f32
      %pf = arith.extf %p : bf16 to f32
      %m = arith.mulf %gf, %pf : f32
      %t = arith.addf %acc, %m : f32
      linalg.yield %t : f32
    } -> tensor<4096xf32>
    %o = linalg.generic {indexing_maps = [#xy, #xy, #x_, #xy], iterator_types = ["parallel", "parallel"]}
        ins(%dy, %y, %s : tensor<4096x1024xbf16>, tensor<4096x1024xbf16>, tensor<4096xf32>) outs(%dx : tensor<4096x1024xbf16>)
        attrs = {dims = array<i64: 0, 1>} {
    ^bb0(%g: bf16, %p: bf16, %t: f32, %out: bf16):
      %gf = arith.extf %g : bf16 to f32
      %pf = arith.extf %p : bf16 to f32
      %d = arith.subf %gf, %t : f32
      %m = arith.mulf %pf, %d : f32
      %r = arith.truncf %m : f32 to bf16
      linalg.yield %r : bf16
    } -> tensor<4096x1024xbf16>
    return %o : tensor<4096x1024xbf16>
  }
}
