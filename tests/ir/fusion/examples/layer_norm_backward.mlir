// Layer norm backward: two row reductions (one generic with two results), dx, and two cross-row (column) reductions
// that reduce the row loop 0. Cross-row results are complete only after all rows: they are results of the kernel,
// or feed "after" generics over the remaining dims (here the cast to bf16 of %db).
#xy = affine_map<(d0, d1) -> (d0, d1)>
#x_ = affine_map<(d0, d1) -> (d0)>
#_y = affine_map<(d0, d1) -> (d1)>
#i = affine_map<(d0) -> (d0)>
module {
  func.func private @layer_norm_backward_0(%dy: tensor<8192x768xf32>, %x: tensor<8192x768xf32>, %mean: tensor<8192xf32>,
      %rstd: tensor<8192xf32>, %w: tensor<768xf32>, %dx: tensor<8192x768xf32> {nova.out}, %dw: tensor<768xf32> {nova.out},
      %db: tensor<768xbf16> {nova.out}) -> (tensor<8192x768xf32>, tensor<768xf32>, tensor<768xbf16>)
      attributes {nova.kernel = "loops", nova.dims = array<i64: 8192, 768>, nova.rows = array<i64: 0>,
                  nova.inplace = [array<i64: 0, 0>, array<i64: 1, 0>]} {
    %zero = arith.constant 0.0 : f32
    %e0 = tensor.empty() : tensor<8192xf32>
    %f0 = linalg.fill ins(%zero : f32) outs(%e0 : tensor<8192xf32>) -> tensor<8192xf32>
    %f1 = linalg.fill ins(%zero : f32) outs(%e0 : tensor<8192xf32>) -> tensor<8192xf32>
    %s:2 = linalg.generic {indexing_maps = [#xy, #xy, #x_, #x_, #_y, #x_, #x_], iterator_types = ["parallel", "reduction"]}
        ins(%dy, %x, %mean, %rstd, %w : tensor<8192x768xf32>, tensor<8192x768xf32>, tensor<8192xf32>, tensor<8192xf32>, tensor<768xf32>)
        outs(%f0, %f1 : tensor<8192xf32>, tensor<8192xf32>) attrs = {dims = array<i64: 0, 1>} {
    ^bb0(%g: f32, %a: f32, %mu: f32, %r: f32, %ww: f32, %acc0: f32, %acc1: f32):
      %c = arith.subf %a, %mu : f32
      %h = arith.mulf %c, %r : f32
      %gw = arith.mulf %g, %ww : f32
      %gwh = arith.mulf %gw, %h : f32
      %t0 = arith.addf %acc0, %gw : f32
      %t1 = arith.addf %acc1, %gwh : f32
      linalg.yield %t0, %t1 : f32, f32
    } -> (tensor<8192xf32>, tensor<8192xf32>)
    %o = linalg.generic {indexing_maps = [#xy, #xy, #x_, #x_, #_y, #x_, #x_, #xy], iterator_types = ["parallel", "parallel"]}
        ins(%dy, %x, %mean, %rstd, %w, %s#0, %s#1 : tensor<8192x768xf32>, tensor<8192x768xf32>, tensor<8192xf32>, tensor<8192xf32>, tensor<768xf32>, tensor<8192xf32>, tensor<8192xf32>)
        outs(%dx : tensor<8192x768xf32>) attrs = {dims = array<i64: 0, 1>} {
    ^bb0(%g: f32, %a: f32, %mu: f32, %r: f32, %ww: f32, %s0: f32, %s1: f32, %out: f32):
      %inv = arith.constant 0.00130208337 : f32
      %c = arith.subf %a, %mu : f32
      %h = arith.mulf %c, %r : f32
      %gw = arith.mulf %g, %ww : f32
      %hs = arith.mulf %h, %s1 : f32
      %u = arith.addf %s0, %hs : f32
      %v = arith.mulf %u, %inv : f32
      %d = arith.subf %gw, %v : f32
      %e = arith.mulf %d, %r : f32
      linalg.yield %e : f32
    } -> tensor<8192x768xf32>
    %f2 = linalg.fill ins(%zero : f32) outs(%dw : tensor<768xf32>) -> tensor<768xf32>
    %e3 = tensor.empty() : tensor<768xf32>
    %f3 = linalg.fill ins(%zero : f32) outs(%e3 : tensor<768xf32>) -> tensor<768xf32>
    %cs:2 = linalg.generic {indexing_maps = [#xy, #xy, #x_, #x_, #_y, #_y], iterator_types = ["reduction", "parallel"]}
        ins(%dy, %x, %mean, %rstd : tensor<8192x768xf32>, tensor<8192x768xf32>, tensor<8192xf32>, tensor<8192xf32>)
        outs(%f2, %f3 : tensor<768xf32>, tensor<768xf32>) attrs = {dims = array<i64: 0, 1>} {
    ^bb0(%g: f32, %a: f32, %mu: f32, %r: f32, %acc0: f32, %acc1: f32):
      %c = arith.subf %a, %mu : f32
      %h = arith.mulf %c, %r : f32
      %gh = arith.mulf %g, %h : f32
      %t0 = arith.addf %acc0, %gh : f32
      %t1 = arith.addf %acc1, %g : f32
      linalg.yield %t0, %t1 : f32, f32
    } -> (tensor<768xf32>, tensor<768xf32>)
    %dbo = linalg.generic {indexing_maps = [#i, #i], iterator_types = ["parallel"]}
        ins(%cs#1 : tensor<768xf32>) outs(%db : tensor<768xbf16>) attrs = {dims = array<i64: 1>} {
    ^bb0(%a: f32, %out: bf16):
      %t = arith.truncf %a : f32 to bf16
      linalg.yield %t : bf16
    } -> tensor<768xbf16>
    return %o, %cs#0, %dbo : tensor<8192x768xf32>, tensor<768xf32>, tensor<768xbf16>
  }
}
