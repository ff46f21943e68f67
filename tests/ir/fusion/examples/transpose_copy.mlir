// A materialised transpose with a rotary-style half swap: dims 3 (which half, size 2) and 4 (position in the half). %x is read twice,
// through two slices, so no projected permutation of one operand is enough: linalg.index + arith.select choose.
// Also shows a linear access map (stride 2) on an operand: %every is read at 2 * t.
#src = affine_map<(b, h, t, p, j) -> (b, t, h, j)>
#dst = affine_map<(b, h, t, p, j) -> (b, h, t, p, j)>
#lin = affine_map<(b, h, t, p, j) -> (t * 2)>
module {
  func.func private @rotate_half_0(%x: tensor<2x16x4x2x8xf32>, %every: tensor<31xf32>, %out: tensor<2x4x16x2x8xf32> {nova.out})
      -> tensor<2x4x16x2x8xf32> attributes {nova.kernel = "loops", nova.dims = array<i64: 2, 4, 16, 2, 8>, nova.rows = array<i64: 0, 1, 2, 3, 4>, nova.inplace = []} {
    %x0 = tensor.extract_slice %x[0, 0, 0, 0, 0] [2, 16, 4, 1, 8] [1, 1, 1, 1, 1] : tensor<2x16x4x2x8xf32> to tensor<2x16x4x8xf32>
    %x1 = tensor.extract_slice %x[0, 0, 0, 1, 0] [2, 16, 4, 1, 8] [1, 1, 1, 1, 1] : tensor<2x16x4x2x8xf32> to tensor<2x16x4x8xf32>
    %o = linalg.generic {indexing_maps = [#src, #src, #lin, #dst], iterator_types = ["parallel", "parallel", "parallel", "parallel", "parallel"]}
        ins(%x0, %x1, %every : tensor<2x16x4x8xf32>, tensor<2x16x4x8xf32>, tensor<31xf32>) outs(%out : tensor<2x4x16x2x8xf32>)
        attrs = {dims = array<i64: 0, 1, 2, 3, 4>} {
    ^bb0(%a: f32, %b: f32, %s: f32, %d: f32):
      %p = linalg.index 3 : index
      %one = arith.constant 1 : index
      %first = arith.cmpi ult, %p, %one : index
      %n = arith.negf %b : f32
      %v = arith.select %first, %n, %a : f32
      %w = arith.mulf %v, %s : f32
      linalg.yield %w : f32
    } -> tensor<2x4x16x2x8xf32>
    return %o : tensor<2x4x16x2x8xf32>
  }
}
