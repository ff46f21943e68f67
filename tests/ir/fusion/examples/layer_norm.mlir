// Layer norm forward: two row reductions (mean, then centred variance), per-row scalars, one normalising pass.
// nova.rows names the row loops: every generic has them as parallel loops, or (cross-row reduction) as reduction loops.
// An operand or result map of a 1-row generic `dims = [0]` is a per-row scalar.
#xy = affine_map<(d0, d1) -> (d0, d1)>
#x_ = affine_map<(d0, d1) -> (d0)>
#_y = affine_map<(d0, d1) -> (d1)>
#r = affine_map<(d0) -> (d0)>
module {
  func.func private @layer_norm_0(%x: tensor<8192x768xf32>, %w: tensor<768xf32>, %b: tensor<768xf32>,
      %y: tensor<8192x768xf32> {nova.out}, %mean: tensor<8192xf32> {nova.out}, %rstd: tensor<8192xf32> {nova.out})
      -> (tensor<8192x768xf32>, tensor<8192xf32>, tensor<8192xf32>)
      attributes {nova.kernel = "loops", nova.dims = array<i64: 8192, 768>, nova.rows = array<i64: 0>,
                  nova.inplace = [array<i64: 0, 0>]} {
    %zero = arith.constant 0.0 : f32
    %e0 = tensor.empty() : tensor<8192xf32>
    %f0 = linalg.fill ins(%zero : f32) outs(%e0 : tensor<8192xf32>) -> tensor<8192xf32>
    %sum = linalg.generic {indexing_maps = [#xy, #x_], iterator_types = ["parallel", "reduction"]}
        ins(%x : tensor<8192x768xf32>) outs(%f0 : tensor<8192xf32>) attrs = {dims = array<i64: 0, 1>} {
    ^bb0(%a: f32, %acc: f32):
      %s = arith.addf %acc, %a : f32
      linalg.yield %s : f32
    } -> tensor<8192xf32>
    %m = linalg.generic {indexing_maps = [#r, #r], iterator_types = ["parallel"]}
        ins(%sum : tensor<8192xf32>) outs(%mean : tensor<8192xf32>) attrs = {dims = array<i64: 0>} {
    ^bb0(%a: f32, %o: f32):
      %n = arith.constant 7.680000e+02 : f32
      %d = arith.divf %a, %n : f32
      linalg.yield %d : f32
    } -> tensor<8192xf32>
    %e1 = tensor.empty() : tensor<8192xf32>
    %f1 = linalg.fill ins(%zero : f32) outs(%e1 : tensor<8192xf32>) -> tensor<8192xf32>
    %sq = linalg.generic {indexing_maps = [#xy, #x_, #x_], iterator_types = ["parallel", "reduction"]}
        ins(%x, %m : tensor<8192x768xf32>, tensor<8192xf32>) outs(%f1 : tensor<8192xf32>) attrs = {dims = array<i64: 0, 1>} {
    ^bb0(%a: f32, %mu: f32, %acc: f32):
      %c = arith.subf %a, %mu : f32
      %c2 = arith.mulf %c, %c : f32
      %s = arith.addf %acc, %c2 : f32
      linalg.yield %s : f32
    } -> tensor<8192xf32>
    %rs = linalg.generic {indexing_maps = [#r, #r], iterator_types = ["parallel"]}
        ins(%sq : tensor<8192xf32>) outs(%rstd : tensor<8192xf32>) attrs = {dims = array<i64: 0>} {
    ^bb0(%a: f32, %o: f32):
      %n = arith.constant 7.680000e+02 : f32
      %eps = arith.constant 1.000000e-05 : f32
      %v = arith.divf %a, %n : f32
      %ve = arith.addf %v, %eps : f32
      %r = math.rsqrt %ve : f32
      linalg.yield %r : f32
    } -> tensor<8192xf32>
    %out = linalg.generic {indexing_maps = [#xy, #x_, #x_, #_y, #_y, #xy], iterator_types = ["parallel", "parallel"]}
        ins(%x, %m, %rs, %w, %b : tensor<8192x768xf32>, tensor<8192xf32>, tensor<8192xf32>, tensor<768xf32>, tensor<768xf32>)
        outs(%y : tensor<8192x768xf32>) attrs = {dims = array<i64: 0, 1>} {
    ^bb0(%a: f32, %mu: f32, %r: f32, %g: f32, %bb: f32, %o: f32):
      %c = arith.subf %a, %mu : f32
      %n = arith.mulf %c, %r : f32
      %s = arith.mulf %n, %g : f32
      %t = arith.addf %s, %bb : f32
      linalg.yield %t : f32
    } -> tensor<8192x768xf32>
    return %out, %m, %rs : tensor<8192x768xf32>, tensor<8192xf32>, tensor<8192xf32>
  }
}
